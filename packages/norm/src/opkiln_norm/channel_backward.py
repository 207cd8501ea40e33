"""BatchNorm, backward.

With h = (x - mean[c]) * rstd[c] and sums over the n values of a channel:
grad_bias = sum(g), grad_weight = sum(g * h)
grad_input = w * rstd * (g - (grad_bias + h * grad_weight) / n); evaluation: w * rstd * g

g, x [N, C, *S] f16, bf16 or f32 with any strides; w, mean, rstd [C]; each gradient or absent.

resident_backward_kernel   a program holds one or several channels' g and x in registers
sums_kernel                both sums of a slice of a channel, to a workspace
gradient_kernel            adds up the slices and writes the gradients of a slice
"""

import os

import triton
import triton.language as tl

from opkiln_norm.channel_forward import load_optional
from opkiln_norm.channel_slices import workspace
from opkiln_norm.channel_tile import (
    add_pairs,
    channel_of,
    item_place,
    load_channel,
    load_tiles,
    over_set,
    place,
    row_pointers,
    slice_items,
    store_channel,
    store_tile,
)
from opkiln_norm.row_tiles import read_again

# The interpreter reduces a pair element by element, in Python, and not over all axes.
ONE_BY_ONE = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def add_up(a, b, POOL: tl.constexpr):
    """Both sums over a channel, in one reduction: one barrier less."""
    if ONE_BY_ONE:
        sums = (over_set(a, a, 1, POOL, False), over_set(b, b, 1, POOL, False))
    elif POOL:
        sums = tl.reduce((a, b), None, add_pairs)
    else:
        sums = tl.reduce((a, b), 1, add_pairs, keep_dims=True)
    return sums


@triton.jit
def load_pair(x_ptr, g_ptr, outer, i, row_ok, first, n_cols, x_steps, g_steps, outer_sizes,
              col_sizes,
              X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, ALIGN: tl.constexpr,
              EVEN: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
              EVICT: tl.constexpr):  # fmt: skip
    x_rows = row_pointers(x_ptr, outer, i, outer_sizes, x_steps, X_DENSE, ALIGN)
    g_rows = row_pointers(g_ptr, outer, i, outer_sizes, g_steps, G_DENSE, ALIGN)
    x = load_tiles(
        x_rows,
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
    g = load_tiles(
        g_rows,
        row_ok,
        first,
        n_cols,
        col_sizes,
        g_steps,
        G_DENSE,
        ALIGN,
        EVEN,
        BLOCK_N,
        CHUNKS,
        EVICT,
    )
    return x, g


@triton.jit
def add_tiles(sum_g, sum_gx, x, g, mean, CHUNKS: tl.constexpr):
    """Lane by lane, sum(g) and sum(g * (x - mean)). Masked elements have g = 0."""
    for c in tl.static_range(CHUNKS):
        gc = g[c].to(tl.float32)
        sum_g += gc
        sum_gx = tl.fma(gc, x[c].to(tl.float32) - mean, sum_gx)
    return sum_g, sum_gx


@triton.jit
def write_gradients(d_ptr, x, g, outer, i, row_ok, first, n_cols, mean, scale, shift, slope,
                    d_steps,
                    outer_sizes, col_sizes, TRAINING: tl.constexpr, D_DENSE: tl.constexpr,
                    PACKED: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
                    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
                    STORE_CACHE: tl.constexpr):  # fmt: skip
    """grad_input = scale * g - shift - slope * (x - mean)."""
    rows = row_pointers(d_ptr, outer, i, outer_sizes, d_steps, D_DENSE, ALIGN)
    for c in tl.static_range(CHUNKS):
        d = read_again(g[c], scale, PACKED) * scale
        if TRAINING:
            d = d - shift - slope * (read_again(x[c], scale, PACKED) - mean)
        store_tile(
            rows, d, row_ok, first + c * BLOCK_N, n_cols, col_sizes, d_steps,
            D_DENSE, ALIGN, EVEN, BLOCK_N, STORE_CACHE,
        )  # fmt: skip


@triton.jit
def store_parameters(gw_ptr, gb_ptr, sum_g, sum_gh, channel, ok, CHANNEL: tl.constexpr):
    if gw_ptr is not None:
        store_channel(gw_ptr, channel, 1, sum_gh, ok, CHANNEL)
    if gb_ptr is not None:
        store_channel(gb_ptr, channel, 1, sum_g, ok, CHANNEL)


@triton.jit
def resident_backward_kernel(
    x_ptr, g_ptr, w_ptr, mean_ptr, rstd_ptr, d_ptr, gw_ptr, gb_ptr,  # None where absent
    x_steps, g_steps, d_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, channels,
    per_group, strides, count, TRAINING: tl.constexpr,
    X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, D_DENSE: tl.constexpr,
    POOL: tl.constexpr, SEGMENT: tl.constexpr, CHANNEL: tl.constexpr, ONE_OUTER: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, ALIGN_I: tl.constexpr,
    ALIGN_J: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: outer * row_blocks programs."""
    n_cols = j_units * ALIGN_J
    outer, first_row = place(tl.program_id(0), row_blocks, ONE_OUTER, ROWS)
    i = first_row + tl.arange(0, BLOCK_M)[:, None]
    row_ok = i < i_units * ALIGN_I
    x, g = load_pair(
        x_ptr, g_ptr, outer, i, row_ok, 0, n_cols, x_steps, g_steps, outer_sizes, col_sizes,
        X_DENSE, G_DENSE, ALIGN, EVEN, BLOCK_N, CHUNKS, EVICT,
    )  # fmt: skip
    channel = channel_of(outer, i, channels, per_group, CHANNEL)
    mean = load_channel(mean_ptr, channel, strides[1], row_ok, CHANNEL)
    rstd = load_channel(rstd_ptr, channel, strides[2], row_ok, CHANNEL)
    w = load_optional(w_ptr, channel, strides[0], row_ok, CHANNEL)
    zeros = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    lanes_g, lanes_gx = add_tiles(zeros, zeros, x, g, mean, CHUNKS)
    sum_g, sum_gx = add_up(lanes_g, lanes_gx, POOL)
    scale = rstd
    if w is not None:
        scale = rstd * w
    if d_ptr is not None:
        write_gradients(
            d_ptr, x, g, outer, i, row_ok, 0, n_cols, mean, scale,
            scale * sum_g / count, scale * sum_gx * rstd * rstd / count, d_steps, outer_sizes,
            col_sizes, TRAINING, D_DENSE, PACKED, ALIGN, EVEN, BLOCK_N, CHUNKS, STORE_CACHE,
        )  # fmt: skip
    store_parameters(gw_ptr, gb_ptr, sum_g, sum_gx * rstd, channel, row_ok, CHANNEL)


@triton.jit
def slice_sums(x_ptr, g_ptr, mean_ptr, ws_ptr, outer, first_row, part, slices, items, sets,
               x_steps, g_steps, outer_sizes, col_sizes, n_rows, n_cols, channels, per_group,
               strides,
               X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, POOL: tl.constexpr,
               CHANNEL: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
               BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
               EVICT: tl.constexpr):  # fmt: skip
    """Write sum(g) and sum(g * (x - mean)) of slice `part` of a channel to the workspace."""
    local = tl.arange(0, BLOCK_M)[:, None]
    i = first_row + local
    channel = channel_of(outer, i, channels, per_group, CHANNEL)
    mean = load_channel(mean_ptr, channel, strides[1], i < n_rows, CHANNEL)
    sum_g = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    sum_gx = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    start, end = slice_items(items, part, slices)
    for item in tl.range(start, end):
        i, first = item_place(item, first_row, n_cols, POOL, BLOCK_M, BLOCK_N * CHUNKS)
        x, g = load_pair(
            x_ptr, g_ptr, outer, i, i < n_rows, first, n_cols, x_steps, g_steps, outer_sizes,
            col_sizes,
            X_DENSE, G_DENSE, ALIGN, EVEN, BLOCK_N, CHUNKS, EVICT,
        )  # fmt: skip
        sum_g, sum_gx = add_tiles(sum_g, sum_gx, x, g, mean, CHUNKS)
    total_g, total_gx = add_up(sum_g, sum_gx, POOL)
    ptr, row_ok = workspace(ws_ptr, outer, first_row + local, local, slices, n_rows, POOL, ROWS)
    step = sets * tl.cast(slices, tl.int64)
    if POOL:
        tl.store(ptr + part, total_g)
        tl.store(ptr + step + part, total_gx)
    else:
        tl.store(ptr + part, total_g, mask=row_ok)
        tl.store(ptr + step + part, total_gx, mask=row_ok)


@triton.jit
def sums_kernel(
    x_ptr, g_ptr, mean_ptr, ws_ptr, x_steps, g_steps, outer_sizes, col_sizes, i_units, j_units,
    row_blocks, channels, per_group, strides, slices, items, sets,
    X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, POOL: tl.constexpr, CHANNEL: tl.constexpr,
    ONE_OUTER: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, ALIGN_I: tl.constexpr,
    ALIGN_J: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Grid: outer * row_blocks * slices programs."""
    outer, first_row = place(tl.program_id(0) // slices, row_blocks, ONE_OUTER, ROWS)
    slice_sums(
        x_ptr, g_ptr, mean_ptr, ws_ptr, outer, first_row, tl.program_id(0) % slices, slices, items,
        sets, x_steps, g_steps, outer_sizes, col_sizes, i_units * ALIGN_I, j_units * ALIGN_J,
        channels, per_group, strides, X_DENSE, G_DENSE, POOL, CHANNEL, EVEN, ALIGN, ROWS, BLOCK_M,
        BLOCK_N, CHUNKS, EVICT,
    )  # fmt: skip


@triton.jit
def gradient_slice(
    x_ptr, g_ptr, w_ptr, mean_ptr, rstd_ptr, d_ptr, gw_ptr, gb_ptr, ws_ptr,
    outer, first_row, part, slices, items, sets, x_steps, g_steps, d_steps, outer_sizes, col_sizes,
    n_rows, n_cols, channels, per_group, strides, count, TRAINING: tl.constexpr,
    SLICES: tl.constexpr,
    X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, D_DENSE: tl.constexpr,
    POOL: tl.constexpr, CHANNEL: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """grad_input of slice `part`, its last tile first; part 0 writes grad_weight and grad_bias."""
    local = tl.arange(0, BLOCK_M)[:, None]
    i = first_row + local
    channel = channel_of(outer, i, channels, per_group, CHANNEL)
    mean = load_channel(mean_ptr, channel, strides[1], i < n_rows, CHANNEL)
    rstd = load_channel(rstd_ptr, channel, strides[2], i < n_rows, CHANNEL)
    scale = rstd
    if w_ptr is not None:
        scale = rstd * load_channel(w_ptr, channel, strides[0], i < n_rows, CHANNEL)
    ptr, row_ok = workspace(ws_ptr, outer, i, local, slices, n_rows, POOL, ROWS)
    parts = tl.arange(0, SLICES)[None, :]
    mask = parts < slices
    if not POOL:
        mask = mask & row_ok
    # Past L1, which does not see what other multiprocessors write.
    parts_g = tl.load(ptr + parts, mask=mask, other=0.0, cache_modifier=".cg")
    ptr += sets * tl.cast(slices, tl.int64)
    parts_gx = tl.load(ptr + parts, mask=mask, other=0.0, cache_modifier=".cg")
    sum_g, sum_gx = add_up(parts_g, parts_gx, POOL)
    if part == 0:
        store_parameters(gw_ptr, gb_ptr, sum_g, sum_gx * rstd, channel, row_ok, CHANNEL)
    if d_ptr is not None:
        shift = scale * sum_g / count
        slope = scale * sum_gx * rstd * rstd / count
        start, end = slice_items(items, part, slices)
        for k in tl.range(start, end):
            item = end - 1 - (k - start)
            i, first = item_place(item, first_row, n_cols, POOL, BLOCK_M, BLOCK_N * CHUNKS)
            x, g = load_pair(
                x_ptr, g_ptr, outer, i, i < n_rows, first, n_cols, x_steps, g_steps, outer_sizes,
                col_sizes,
                X_DENSE, G_DENSE, ALIGN, EVEN, BLOCK_N, CHUNKS, EVICT,
            )  # fmt: skip
            write_gradients(
                d_ptr, x, g, outer, i, i < n_rows, first, n_cols, mean, scale, shift, slope,
                d_steps,
                outer_sizes, col_sizes, TRAINING, D_DENSE, False, ALIGN, EVEN, BLOCK_N, CHUNKS,
                STORE_CACHE,
            )  # fmt: skip


@triton.jit
def gradient_kernel(
    x_ptr, g_ptr, w_ptr, mean_ptr, rstd_ptr, d_ptr, gw_ptr, gb_ptr, ws_ptr,
    x_steps, g_steps, d_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, channels,
    per_group, strides, count, slices, items, sets,
    TRAINING: tl.constexpr, SLICES: tl.constexpr,
    X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, D_DENSE: tl.constexpr,
    POOL: tl.constexpr, SEGMENT: tl.constexpr, CHANNEL: tl.constexpr, ONE_OUTER: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, ALIGN_I: tl.constexpr,
    ALIGN_J: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: outer * row_blocks * slices programs, the last slice first, as in apply_kernel."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    outer, first_row = place(program // slices, row_blocks, ONE_OUTER, ROWS)
    gradient_slice(
        x_ptr, g_ptr, w_ptr, mean_ptr, rstd_ptr, d_ptr, gw_ptr, gb_ptr, ws_ptr,
        outer, first_row, program % slices, slices, items, sets, x_steps, g_steps, d_steps,
        outer_sizes, col_sizes, i_units * ALIGN_I, j_units * ALIGN_J, channels, per_group, strides,
        count, TRAINING, SLICES, X_DENSE, G_DENSE, D_DENSE, POOL, CHANNEL, EVEN, ALIGN, ROWS,
        BLOCK_M, BLOCK_N, CHUNKS, EVICT, STORE_CACHE,
    )  # fmt: skip
