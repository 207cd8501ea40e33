"""Channel norms whose sets do not fit a program's registers: forward in slices of a set.

moments_kernel   count, mean and moment of each slice, to a workspace
apply_kernel     merges a set's slices, or takes given statistics, and normalizes a slice
stream_kernel    both in one persistent kernel, the second one set behind the first: x comes from L2
average_kernel   running statistics of an instance norm whose channels span programs

The moments of two parts merge exactly (Chan): no difference of large sums.
"""

import triton
import triton.language as tl

from opkiln_norm.channel_forward import (
    load_optional,
    move_running,
    save_statistics,
    write_tiles,
)
from opkiln_norm.channel_tile import (
    channel_of,
    item_place,
    load_channel,
    load_tiles,
    over_set,
    place,
    row_pointers,
    slice_items,
)


@triton.jit
def merge_tiles(n, mean, moment, x, row_ok, first, J, PACKED: tl.constexpr, EVEN: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Chan's merge, lane by lane: the tiles x into the n values seen before."""
    new = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for c in tl.static_range(CHUNKS):
        j = first + c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        total += x[c].to(tl.float32)
        if not EVEN:
            new += (row_ok & (j < J)).to(tl.float32)
    if EVEN:
        new_mean = total * (1.0 / CHUNKS)
    else:
        new_mean = total / tl.maximum(new, 1.0)
    new_moment = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for c in tl.static_range(CHUNKS):
        centred = x[c].to(tl.float32) - new_mean
        if not EVEN:
            j = first + c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            centred = tl.where(row_ok & (j < J), centred, 0.0)
        new_moment += centred * centred
    delta = new_mean - mean
    if EVEN:
        share = CHUNKS / (n + CHUNKS)  # a scalar: every lane has seen as many
        n += CHUNKS
    else:
        share = new / tl.maximum(n + new, 1.0)
        n += new
    mean += delta * share
    moment += new_moment + delta * delta * ((n - n * share) * share)
    return n, mean, moment


@triton.jit
def slice_moments(x_ptr, ws_ptr, outer, first_row, part, slices, items, units, x_steps, outer_sizes,
                  col_sizes, I, J, X_DENSE: tl.constexpr, POOL: tl.constexpr, EVEN: tl.constexpr,
                  ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr):  # fmt: skip
    """Write the count, mean and moment of slice `part` of a set to the workspace."""
    local = tl.arange(0, BLOCK_M)[:, None]
    mean = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    moment = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    n = 0.0
    if not EVEN:
        n = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    start, end = slice_items(items, part, slices)
    for item in tl.range(start, end):
        i, first = item_place(item, first_row, J, POOL, BLOCK_M, BLOCK_N * CHUNKS)
        row_ok = (i < I) & (local < ROWS)
        rows = row_pointers(x_ptr, outer, i, outer_sizes, x_steps, X_DENSE, ALIGN)
        x = load_tiles(
            rows, row_ok, first, J, col_sizes, x_steps, X_DENSE, ALIGN, EVEN, BLOCK_N, CHUNKS, EVICT
        )
        n, mean, moment = merge_tiles(
            n, mean, moment, x, row_ok, first, J, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    lanes = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32) + n
    count = over_set(lanes, local, 1, POOL, False)
    slice_mean = over_set(lanes * mean, local, 1, POOL, False) / tl.maximum(count, 1.0)
    delta = mean - slice_mean
    slice_moment = over_set(moment + lanes * delta * delta, local, 1, POOL, False)
    ptr, row_ok = workspace(ws_ptr, outer, first_row + local, local, slices, I, POOL, ROWS)
    step = units * slices.to(tl.int64)
    for k in tl.static_range(3):
        value = (count, slice_mean, slice_moment)[k]
        if POOL:
            tl.store(ptr + k * step + part, value)
        else:
            tl.store(ptr + k * step + part, value, mask=row_ok)


@triton.jit
def workspace(ws_ptr, outer, i, local, slices, I, POOL: tl.constexpr, ROWS: tl.constexpr):
    """Where the slices of each set lie, and which sets exist."""
    if POOL:
        found = ws_ptr + outer.to(tl.int64) * slices
    else:
        found = ws_ptr + (outer.to(tl.int64) * I + i) * slices
    return found, (i < I) & (local < ROWS)


@triton.jit
def merge_slices(ws_ptr, outer, i, local, slices, sets, I, count, per_group, POOL: tl.constexpr,
                 SEGMENT: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr):  # fmt: skip
    """Mean and moment of each set."""
    ptr, row_ok = workspace(ws_ptr, outer, i, local, slices, I, POOL, ROWS)
    parts = tl.arange(0, SLICES)[None, :]
    ptrs = ptr + parts
    mask = parts < slices
    if not POOL:
        mask = mask & row_ok
    step = sets * slices.to(tl.int64)
    # Past L1, which does not see what other multiprocessors write.
    n = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    means = tl.load(ptrs + step, mask=mask, other=0.0, cache_modifier=".cg")
    moments = tl.load(ptrs + 2 * step, mask=mask, other=0.0, cache_modifier=".cg")
    mean = over_set(n * means, i, per_group, POOL, SEGMENT) / count
    delta = means - mean
    return mean, over_set(moments + n * delta * delta, i, per_group, POOL, SEGMENT)
