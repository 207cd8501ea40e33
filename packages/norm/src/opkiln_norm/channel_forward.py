"""Channel norms, forward: BatchNorm, GroupNorm and InstanceNorm.

y = (x - mean) * rstd * w[c] + b[c], rstd = 1 / sqrt(var + eps), mean and biased variance over a set

x [N, C, *S] f16, bf16 or f32 with any strides; y of x's dtype, contiguous or channels_last; w, b
and the running statistics [C] of any of these dtypes, or absent; mean, rstd f32, or absent. The
arithmetic is f32: the mean first, then the moment about it, or both by slices and merged exactly.

resident_kernel   a program holds one or several sets in registers: x is read once
moments_kernel    count, mean and moment of a slice of a set, to a workspace
apply_kernel      merges the slices (or takes given statistics) and normalizes a slice
stream_kernel     both passes in one persistent kernel, the second one set behind the first
"""

import triton
import triton.language as tl

from opkiln_norm.channel_tile import (
    channel_of,
    load_channel,
    load_tiles,
    over_set,
    place,
    row_pointers,
    store_channel,
    store_statistic,
    store_tile,
)
from opkiln_norm.row_tiles import read_again


@triton.jit
def load_optional(ptr, channel, stride, ok, CHANNEL: tl.constexpr):
    value = None
    if ptr is not None:
        value = load_channel(ptr, channel, stride, ok, CHANNEL)
    return value


@triton.jit
def move_running(ptr, old, channel, stride, new, momentum, ok, CHANNEL: tl.constexpr):
    """Take `momentum` of the new value into a running statistic."""
    store_channel(ptr, channel, stride, (1 - momentum) * old + momentum * new, ok, CHANNEL)


@triton.jit
def write_tiles(x, y_rows, row_ok, first, n_cols, mean, rstd, w, b, col_sizes, y_steps,
                Y_DENSE: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr,
                EVEN: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
                STORE_CACHE: tl.constexpr):  # fmt: skip
    """Normalize and store the tiles x."""
    scale = rstd
    if w is not None:
        scale = rstd * w
    for c in tl.static_range(CHUNKS):
        y = (read_again(x[c], rstd, PACKED) - mean) * scale
        if b is not None:
            y += b
        store_tile(
            y_rows, y, row_ok, first + c * BLOCK_N, n_cols, col_sizes, y_steps,
            Y_DENSE, ALIGN, EVEN, BLOCK_N, STORE_CACHE,
        )  # fmt: skip


@triton.jit
def save_statistics(mean_ptr, rstd_ptr, moment_ptr, mean, rstd, moment, outer, i, row_ok,
                    stat, per_group, POOL: tl.constexpr,
                    SEGMENT: tl.constexpr):  # fmt: skip
    """Store those that have a pointer."""
    if mean_ptr is not None:
        store_statistic(mean_ptr, mean, outer, i, row_ok, stat, per_group, POOL, SEGMENT)
    if rstd_ptr is not None:
        store_statistic(rstd_ptr, rstd, outer, i, row_ok, stat, per_group, POOL, SEGMENT)
    if moment_ptr is not None:
        store_statistic(moment_ptr, moment, outer, i, row_ok, stat, per_group, POOL, SEGMENT)


@triton.jit
def resident_kernel(
    x_ptr, rm_ptr, rv_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, moment_ptr,  # None: absent
    x_steps, y_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, channels, per_group,
    stat, strides, count, eps, momentum,
    AVERAGED: tl.constexpr, X_DENSE: tl.constexpr, Y_DENSE: tl.constexpr,
    POOL: tl.constexpr, SEGMENT: tl.constexpr, CHANNEL: tl.constexpr, ONE_OUTER: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, ALIGN_I: tl.constexpr,
    ALIGN_J: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: outer * row_blocks programs. rm_ptr, rv_ptr: running statistics to update, or None;
    AVERAGED: with the average over the rows, the instances of one channel.
    """
    n_rows = i_units * ALIGN_I
    n_cols = j_units * ALIGN_J
    outer, first_row = place(tl.program_id(0), row_blocks, ONE_OUTER, ROWS)
    local = tl.arange(0, BLOCK_M)[:, None]
    i = first_row + local
    row_ok = (i < n_rows) & (local < ROWS)
    x_rows = row_pointers(x_ptr, outer, i, outer_sizes, x_steps, X_DENSE, ALIGN)
    x = load_tiles(
        x_rows, row_ok, 0, n_cols, col_sizes, x_steps, X_DENSE, ALIGN, EVEN, BLOCK_N, CHUNKS, EVICT
    )
    channel = channel_of(outer, i, channels, per_group, CHANNEL)
    w = load_optional(w_ptr, channel, strides[2], row_ok, CHANNEL)
    b = load_optional(b_ptr, channel, strides[3], row_ok, CHANNEL)
    old_mean = load_optional(rm_ptr, channel, strides[0], row_ok, CHANNEL)
    old_var = load_optional(rv_ptr, channel, strides[1], row_ok, CHANNEL)

    total = x[0].to(tl.float32)
    for c in tl.static_range(1, CHUNKS):
        total += x[c].to(tl.float32)
    mean = over_set(total, i, per_group, POOL, SEGMENT) / count
    moment = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for c in tl.static_range(CHUNKS):
        centred = read_again(x[c], mean, PACKED) - mean
        if not EVEN:
            j = c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            centred = tl.where(row_ok & (j < n_cols), centred, 0.0)
        moment = tl.fma(centred, centred, moment)
    moment = over_set(moment, i, per_group, POOL, SEGMENT)
    rstd = tl.rsqrt(moment / count + eps)

    y_rows = row_pointers(y_ptr, outer, i, outer_sizes, y_steps, Y_DENSE, ALIGN)
    write_tiles(
        x, y_rows, row_ok, 0, n_cols, mean, rstd, w, b, col_sizes, y_steps,
        Y_DENSE, PACKED, ALIGN, EVEN, BLOCK_N, CHUNKS, STORE_CACHE,
    )  # fmt: skip
    save_statistics(
        mean_ptr, rstd_ptr, moment_ptr, mean, rstd, moment, outer, i, row_ok, stat,
        per_group, POOL, SEGMENT,
    )  # fmt: skip
    if rm_ptr is not None:
        var = moment / (count - 1)
        if AVERAGED:
            mean = tl.sum(tl.where(row_ok, mean, 0.0)) / n_rows
            var = tl.sum(tl.where(row_ok, var, 0.0)) / n_rows
        move_running(rm_ptr, old_mean, channel, strides[0], mean, momentum, row_ok, CHANNEL)
        move_running(rv_ptr, old_var, channel, strides[1], var, momentum, row_ok, CHANNEL)
