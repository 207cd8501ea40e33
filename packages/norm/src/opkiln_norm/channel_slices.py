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
def merge_tiles(n, mean, moment, x, row_ok, first, n_cols, EVEN: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Chan's merge, lane by lane: the tiles x into the n values seen before."""
    new = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for c in tl.static_range(CHUNKS):
        j = first + c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        total += x[c].to(tl.float32)
        if not EVEN:
            new += (row_ok & (j < n_cols)).to(tl.float32)
    new_mean = total * (1.0 / CHUNKS) if EVEN else total / tl.maximum(new, 1.0)
    new_moment = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for c in tl.static_range(CHUNKS):
        centred = x[c].to(tl.float32) - new_mean
        if not EVEN:
            j = first + c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            centred = tl.where(row_ok & (j < n_cols), centred, 0.0)
        new_moment = tl.fma(centred, centred, new_moment)
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
def slice_moments(x_ptr, ws_ptr, outer, first_row, part, slices, items, sets, x_steps, outer_sizes,
                  col_sizes, n_rows, n_cols, X_DENSE: tl.constexpr, POOL: tl.constexpr,
                  EVEN: tl.constexpr,
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
        i, first = item_place(item, first_row, n_cols, POOL, BLOCK_M, BLOCK_N * CHUNKS)
        row_ok = (i < n_rows) & (local < ROWS)
        rows = row_pointers(x_ptr, outer, i, outer_sizes, x_steps, X_DENSE, ALIGN)
        x = load_tiles(
            rows,
            row_ok,
            first,
            n_cols,
            col_sizes,
            x_steps,
            X_DENSE,
            ALIGN,
            EVEN,
            BLOCK_N,
            CHUNKS,
            EVICT,
        )
        n, mean, moment = merge_tiles(
            n, mean, moment, x, row_ok, first, n_cols, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    if EVEN:  # no sum over a splat: Triton 3.6 hoists it wrongly where BLOCK_M is 1
        width: tl.constexpr = BLOCK_N * BLOCK_M if POOL else BLOCK_N
        count = n * width
        slice_mean = over_set(mean, local, 1, POOL, False) * (1.0 / width)
    else:
        count = over_set(n, local, 1, POOL, False)
        slice_mean = over_set(tl.fma(n, mean, 0.0), local, 1, POOL, False) / tl.maximum(count, 1.0)
    delta = mean - slice_mean
    slice_moment = over_set(tl.fma(n * delta, delta, moment), local, 1, POOL, False)
    ptr, row_ok = workspace(ws_ptr, outer, first_row + local, local, slices, n_rows, POOL, ROWS)
    step = sets * tl.cast(slices, tl.int64)
    for k in tl.static_range(3):
        value = (count, slice_mean, slice_moment)[k]
        if POOL:
            tl.store(ptr + k * step + part, value)
        else:
            tl.store(ptr + k * step + part, value, mask=row_ok)


@triton.jit
def workspace(ws_ptr, outer, i, local, slices, n_rows, POOL: tl.constexpr, ROWS: tl.constexpr):
    """Where the slices of each set lie, and which sets exist."""
    if POOL:
        found = ws_ptr + outer.to(tl.int64) * slices
    else:
        found = ws_ptr + (outer.to(tl.int64) * n_rows + i) * slices
    return found, (i < n_rows) & (local < ROWS)


@triton.jit
def merge_slices(ws_ptr, outer, i, local, slices, sets, n_rows, count, per_group,
                 POOL: tl.constexpr,
                 SEGMENT: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr):  # fmt: skip
    """Mean and moment of each set."""
    ptr, row_ok = workspace(ws_ptr, outer, i, local, slices, n_rows, POOL, ROWS)
    parts = tl.arange(0, SLICES)[None, :]
    ptrs = ptr + parts
    mask = parts < slices
    if not POOL:
        mask = mask & row_ok
    step = sets * tl.cast(slices, tl.int64)
    # Past L1, which does not see what other multiprocessors write.
    n = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    means = tl.load(ptrs + step, mask=mask, other=0.0, cache_modifier=".cg")
    moments = tl.load(ptrs + 2 * step, mask=mask, other=0.0, cache_modifier=".cg")
    mean = over_set(tl.fma(n, means, 0.0), i, per_group, POOL, SEGMENT) / count
    delta = means - mean
    return mean, over_set(tl.fma(n * delta, delta, moments), i, per_group, POOL, SEGMENT)


@triton.jit
def moments_kernel(
    x_ptr, ws_ptr, x_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, slices, items,
    sets, X_DENSE: tl.constexpr, POOL: tl.constexpr, ONE_OUTER: tl.constexpr, EVEN: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_I: tl.constexpr, ALIGN_J: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Grid: outer * row_blocks * slices programs."""
    outer, first_row = place(tl.program_id(0) // slices, row_blocks, ONE_OUTER, ROWS)
    slice_moments(
        x_ptr, ws_ptr, outer, first_row, tl.program_id(0) % slices, slices, items, sets, x_steps,
        outer_sizes, col_sizes, i_units * ALIGN_I, j_units * ALIGN_J,
        X_DENSE, POOL, EVEN, ALIGN, ROWS, BLOCK_M, BLOCK_N, CHUNKS, EVICT,
    )  # fmt: skip


@triton.jit
def apply_slice(
    x_ptr, rm_ptr, rv_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, moment_ptr, ws_ptr,
    outer, first_row, part, slices, items, sets, x_steps, y_steps, outer_sizes, col_sizes, n_rows,
    n_cols,
    channels, per_group, stat, strides,
    count, eps, momentum, GIVEN: tl.constexpr, SLICES: tl.constexpr,
    X_DENSE: tl.constexpr, Y_DENSE: tl.constexpr, POOL: tl.constexpr, SEGMENT: tl.constexpr,
    CHANNEL: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
    STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Normalize slice `part` of a set, its last tile first; part 0 writes the statistics.

    GIVEN: the running statistics serve, and a row is a plane.
    """
    local = tl.arange(0, BLOCK_M)[:, None]
    i = first_row + local
    row_ok = (i < n_rows) & (local < ROWS)
    channel = channel_of(outer, i, channels, per_group, CHANNEL)
    w = load_optional(w_ptr, channel, strides[2], row_ok, CHANNEL)
    b = load_optional(b_ptr, channel, strides[3], row_ok, CHANNEL)
    old_mean = load_optional(rm_ptr, channel, strides[0], row_ok, CHANNEL)
    old_var = load_optional(rv_ptr, channel, strides[1], row_ok, CHANNEL)
    if GIVEN:
        mean = old_mean
        moment = old_var
        rstd = tl.rsqrt(old_var + eps)
    else:
        mean, moment = merge_slices(
            ws_ptr,
            outer,
            i,
            local,
            slices,
            sets,
            n_rows,
            count,
            per_group,
            POOL,
            SEGMENT,
            ROWS,
            SLICES,
        )
        rstd = tl.rsqrt(moment / count + eps)
    if part == 0:
        save_statistics(
            mean_ptr, rstd_ptr, moment_ptr, mean, rstd, moment, outer, i, row_ok, stat, per_group,
            POOL, SEGMENT,
        )  # fmt: skip
        if rm_ptr is not None and not GIVEN:
            var = moment / (count - 1)
            move_running(rm_ptr, old_mean, channel, strides[0], mean, momentum, row_ok, CHANNEL)
            move_running(rv_ptr, old_var, channel, strides[1], var, momentum, row_ok, CHANNEL)

    start, end = slice_items(items, part, slices)
    for k in tl.range(start, end):
        i, first = item_place(
            end - 1 - (k - start), first_row, n_cols, POOL, BLOCK_M, BLOCK_N * CHUNKS
        )
        row_ok = (i < n_rows) & (local < ROWS)
        if CHANNEL == "group":  # of this band of rows
            channel = channel_of(outer, i, channels, per_group, CHANNEL)
            w = load_optional(w_ptr, channel, strides[2], row_ok, CHANNEL)
            b = load_optional(b_ptr, channel, strides[3], row_ok, CHANNEL)
        x_rows = row_pointers(x_ptr, outer, i, outer_sizes, x_steps, X_DENSE, ALIGN)
        x = load_tiles(
            x_rows, row_ok, first, n_cols, col_sizes, x_steps, X_DENSE, ALIGN, EVEN, BLOCK_N,
            CHUNKS,
            EVICT,
        )  # fmt: skip
        y_rows = row_pointers(y_ptr, outer, i, outer_sizes, y_steps, Y_DENSE, ALIGN)
        write_tiles(
            x, y_rows, row_ok, first, n_cols, mean, rstd, w, b, col_sizes, y_steps,
            Y_DENSE, False, ALIGN, EVEN, BLOCK_N, CHUNKS, STORE_CACHE,
        )  # fmt: skip


@triton.jit
def apply_kernel(
    x_ptr, rm_ptr, rv_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, moment_ptr, ws_ptr,
    x_steps, y_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, channels, per_group,
    stat, strides, count, eps, momentum,
    slices, items, sets, GIVEN: tl.constexpr, SLICES: tl.constexpr,
    X_DENSE: tl.constexpr, Y_DENSE: tl.constexpr, POOL: tl.constexpr, SEGMENT: tl.constexpr,
    CHANNEL: tl.constexpr, ONE_OUTER: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_I: tl.constexpr, ALIGN_J: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
    STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: outer * row_blocks * slices programs, the last slice first: what moments_kernel read
    last is the likeliest still in L2.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    outer, first_row = place(program // slices, row_blocks, ONE_OUTER, ROWS)
    apply_slice(
        x_ptr, rm_ptr, rv_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, moment_ptr, ws_ptr,
        outer, first_row, program % slices, slices, items, sets, x_steps, y_steps, outer_sizes,
        col_sizes, i_units * ALIGN_I, j_units * ALIGN_J, channels, per_group, stat,
        strides, count, eps, momentum, GIVEN, SLICES,
        X_DENSE, Y_DENSE, POOL, SEGMENT, CHANNEL, EVEN, ALIGN, ROWS, BLOCK_M, BLOCK_N, CHUNKS,
        EVICT, STORE_CACHE,
    )  # fmt: skip


@triton.jit
def average_kernel(mean_ptr, moment_ptr, rm_ptr, rv_ptr, stride_rm, stride_rv, N, C, count,
                   momentum, BLOCK: tl.constexpr):  # fmt: skip
    """Running statistics from those of N instances of each of C channels, averaged over N."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = c < C
    mean = tl.full([BLOCK], 0.0, tl.float32)
    moment = tl.full([BLOCK], 0.0, tl.float32)
    index = c.to(tl.int64)
    for _ in tl.range(0, N):
        mean += tl.load(mean_ptr + index, mask=ok, other=0.0)
        moment += tl.load(moment_ptr + index, mask=ok, other=0.0)
        index += C
    old_mean = load_channel(rm_ptr, c, stride_rm, ok, "row")
    old_var = load_channel(rv_ptr, c, stride_rv, ok, "row")
    var = moment / N / (count - 1)
    move_running(rm_ptr, old_mean, c, stride_rm, mean / N, momentum, ok, "row")
    move_running(rv_ptr, old_var, c, stride_rv, var, momentum, ok, "row")
