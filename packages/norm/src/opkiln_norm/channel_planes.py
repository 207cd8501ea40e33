"""GroupNorm and InstanceNorm, backward.

With h = (x - mean) * rstd, M values a group, and sums over a plane (n, c), over a group's planes:
grad_bias[c] = sum_n sum(g), grad_weight[c] = sum_n sum(g * h)
grad_input = rstd * (w * g - sum(w * g) / M - h * sum(w * g * h) / M)
grad_input = rstd * w * g where the statistics were given

g, x [N, C, *S] f16, bf16 or f32 with any strides; w [C]; mean, rstd [N, G] f32 contiguous; each
gradient or absent. A row of a tile is (part of) a plane; the planes' sums go to a workspace
[2, N * C, slices], and nothing is added atomically. An instance is a group of one plane.

planes_backward_kernel   a program holds one or several groups' g and x in registers
sums_kernel              (channel_backward) the sums of a slice of a plane
finish_kernel            grad_weight and grad_bias from the workspace; a group's two coefficients
planes_gradient_kernel   grad_input of a slice of a plane, from the coefficients
"""

import triton
import triton.language as tl

from opkiln_norm.channel_backward import add_tiles, add_up, load_pair, write_gradients
from opkiln_norm.channel_forward import load_optional
from opkiln_norm.channel_tile import (
    channel_of,
    item_place,
    load_channel,
    over_groups,
    place,
    slice_items,
)


@triton.jit
def over_planes(a, b, w, i, per_group, POOL: tl.constexpr, SEGMENT: tl.constexpr):
    """Both sums of planes [BLOCK_M, 1], weighted, over the planes of a group."""
    if w is not None:
        a = tl.fma(w, a, 0.0)  # see over_set
        b = tl.fma(w, b, 0.0)
    if POOL:
        a, b = add_up(a, b, True)
    elif SEGMENT:
        a = over_groups(a, i, per_group)
        b = over_groups(b, i, per_group)
    return a, b


@triton.jit
def load_statistic(ptr, outer, i, ok, n_rows, per_group, POOL: tl.constexpr):
    """A group's statistic: planes and groups are numbered in the order of [N, C] and [N, G]."""
    if POOL:
        value = tl.load(ptr + outer)
    else:
        plane = outer.to(tl.int64) * n_rows + i
        value = tl.load(ptr + plane // per_group, mask=ok, other=0.0)
    return value.to(tl.float32)


@triton.jit
def planes_backward_kernel(
    x_ptr, g_ptr, w_ptr, mean_ptr, rstd_ptr, d_ptr, ws_ptr,  # None where absent
    x_steps, g_steps, d_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, channels,
    per_group, w_stride, sets, count, TRAINING: tl.constexpr,
    X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, D_DENSE: tl.constexpr,
    POOL: tl.constexpr, SEGMENT: tl.constexpr, CHANNEL: tl.constexpr, ONE_OUTER: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, ALIGN_I: tl.constexpr,
    ALIGN_J: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: outer * row_blocks programs."""
    n_rows = i_units * ALIGN_I
    n_cols = j_units * ALIGN_J
    outer, first_row = place(tl.program_id(0), row_blocks, ONE_OUTER, ROWS)
    local = tl.arange(0, BLOCK_M)[:, None]
    i = first_row + local
    row_ok = (i < n_rows) & (local < ROWS)
    x, g = load_pair(
        x_ptr, g_ptr, outer, i, row_ok, 0, n_cols, x_steps, g_steps, outer_sizes, col_sizes,
        X_DENSE, G_DENSE, ALIGN, EVEN, BLOCK_N, CHUNKS, EVICT,
    )  # fmt: skip
    channel = channel_of(outer, i, channels, per_group, CHANNEL)
    w = load_optional(w_ptr, channel, w_stride, row_ok, CHANNEL)
    mean = load_statistic(mean_ptr, outer, i, row_ok, n_rows, per_group, POOL)
    rstd = load_statistic(rstd_ptr, outer, i, row_ok, n_rows, per_group, POOL)
    zeros = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    lanes_g, lanes_gx = add_tiles(zeros, zeros, x, g, mean, CHUNKS)
    sum_g, sum_gx = add_up(lanes_g, lanes_gx, False)
    if ws_ptr is not None:
        ptr = ws_ptr + outer.to(tl.int64) * n_rows + i
        tl.store(ptr, sum_g, mask=row_ok)
        tl.store(ptr + sets, sum_gx, mask=row_ok)
    if d_ptr is not None:
        scale = rstd
        if w is not None:
            scale = rstd * w
        sum_g, sum_gx = over_planes(sum_g, sum_gx, w, i, per_group, POOL, SEGMENT)
        write_gradients(
            d_ptr, x, g, outer, i, row_ok, 0, n_cols, mean, scale, sum_g * rstd / count,
            sum_gx * rstd * rstd * rstd / count, d_steps, outer_sizes, col_sizes, TRAINING,
            D_DENSE, PACKED, ALIGN, EVEN, BLOCK_N, CHUNKS, STORE_CACHE,
        )  # fmt: skip


@triton.jit
def group_coefficients(ws_ptr, w_ptr, rstd_ptr, group, groups, n_groups, per_group, w_stride,
                       slices, sets, count, BLOCK: tl.constexpr):  # fmt: skip
    """What a group's gradients are shifted by, and their slope along x - mean, behind the sums."""
    total_g = tl.full([1, BLOCK], 0.0, tl.float32)
    total_gx = tl.full([1, BLOCK], 0.0, tl.float32)
    size = per_group * slices
    step = sets * tl.cast(slices, tl.int64)
    first = ws_ptr + group.to(tl.int64) * size
    for start in tl.range(0, size, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        ok = k < size
        sum_g = tl.load(first + k, mask=ok, other=0.0)
        sum_gx = tl.load(first + step + k, mask=ok, other=0.0)
        if w_ptr is not None:
            w = load_channel(w_ptr, group % n_groups * per_group + k // slices, w_stride, ok, "row")
            total_g = tl.fma(w, sum_g, total_g)
            total_gx = tl.fma(w, sum_gx, total_gx)
        else:
            total_g += sum_g
            total_gx += sum_gx
    sum_g, sum_gx = add_up(total_g, total_gx, True)
    rstd = tl.load(rstd_ptr + group).to(tl.float32)
    found = ws_ptr + 2 * step + group
    tl.store(found, sum_g * rstd / count)
    tl.store(found + groups, sum_gx * rstd * rstd * rstd / count)


@triton.jit
def finish_kernel(
    ws_ptr, w_ptr, rstd_ptr, gw_ptr, gb_ptr, coefficients, groups, n_groups, per_group, channels,
    w_stride, slices, sets, count, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: `coefficients` programs, one a group or none; and one for each BLOCK_C channels where a
    parameter has a gradient. groups: N * n_groups.
    """
    if tl.program_id(0) < coefficients:
        group_coefficients(
            ws_ptr, w_ptr, rstd_ptr, tl.program_id(0), groups, n_groups, per_group, w_stride,
            slices, sets, count, BLOCK,
        )  # fmt: skip
    else:
        c = (tl.program_id(0) - coefficients) * BLOCK_C + tl.arange(0, BLOCK_C)[:, None]
        total_g = tl.full([BLOCK_C, ROWS], 0.0, tl.float32)
        total_gh = tl.full([BLOCK_C, ROWS], 0.0, tl.float32)
        step = sets * tl.cast(slices, tl.int64)
        parts = sets // channels * slices
        for start in tl.range(0, parts, ROWS):
            t = start + tl.arange(0, ROWS)[None, :]
            sample = t // slices
            ok = (c < channels) & (t < parts)
            ptr = ws_ptr + (sample.to(tl.int64) * channels + c) * slices + t % slices
            rstd_ptrs = rstd_ptr + sample.to(tl.int64) * n_groups + c // per_group
            rstd = tl.load(rstd_ptrs, mask=ok, other=0.0).to(tl.float32)
            total_g += tl.load(ptr, mask=ok, other=0.0)
            total_gh = tl.fma(tl.load(ptr + step, mask=ok, other=0.0), rstd, total_gh)
        sum_g, sum_gh = add_up(total_g, total_gh, False)
        if gw_ptr is not None:
            tl.store(gw_ptr + c, sum_gh.to(gw_ptr.dtype.element_ty), mask=c < channels)
        if gb_ptr is not None:
            tl.store(gb_ptr + c, sum_g.to(gb_ptr.dtype.element_ty), mask=c < channels)


@triton.jit
def planes_gradient_kernel(
    x_ptr, g_ptr, w_ptr, mean_ptr, rstd_ptr, d_ptr, ws_ptr,
    x_steps, g_steps, d_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, channels,
    per_group, w_stride, slices, items, sets, TRAINING: tl.constexpr,
    X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, D_DENSE: tl.constexpr,
    POOL: tl.constexpr, SEGMENT: tl.constexpr, CHANNEL: tl.constexpr, ONE_OUTER: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, ALIGN_I: tl.constexpr,
    ALIGN_J: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: outer * row_blocks * slices programs, the last slice first, as in apply_kernel."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    outer, first_row = place(program // slices, row_blocks, ONE_OUTER, ROWS)
    n_rows = i_units * ALIGN_I
    n_cols = j_units * ALIGN_J
    i = first_row + tl.arange(0, BLOCK_M)[:, None]
    row_ok = i < n_rows
    mean = load_statistic(mean_ptr, outer, i, row_ok, n_rows, per_group, False)
    rstd = load_statistic(rstd_ptr, outer, i, row_ok, n_rows, per_group, False)
    scale = rstd
    if w_ptr is not None:
        channel = channel_of(outer, i, channels, per_group, "row")
        scale = rstd * load_channel(w_ptr, channel, w_stride, row_ok, "row")
    shift = 0.0
    slope = 0.0
    if TRAINING:
        found = ws_ptr + 2 * sets * tl.cast(slices, tl.int64)
        shift = load_statistic(found, outer, i, row_ok, n_rows, per_group, False)
        found += sets // per_group
        slope = load_statistic(found, outer, i, row_ok, n_rows, per_group, False)
    start, end = slice_items(items, program % slices, slices)
    for k in tl.range(start, end):
        item = end - 1 - (k - start)
        i, first = item_place(item, first_row, n_cols, False, BLOCK_M, BLOCK_N * CHUNKS)
        x, g = load_pair(
            x_ptr, g_ptr, outer, i, row_ok, first, n_cols, x_steps, g_steps, outer_sizes,
            col_sizes, X_DENSE, G_DENSE, ALIGN, EVEN, BLOCK_N, CHUNKS, EVICT,
        )  # fmt: skip
        write_gradients(
            d_ptr, x, g, outer, i, row_ok, first, n_cols, mean, scale, shift, slope, d_steps,
            outer_sizes, col_sizes, TRAINING, D_DENSE, False, ALIGN, EVEN, BLOCK_N, CHUNKS,
            STORE_CACHE,
        )  # fmt: skip
