"""Parts of the row norms' backward: loads by place in a tuple of tensors, a row's means."""

import os

import triton
import triton.language as tl

from opkiln_norm.row_tiles import (
    inside_row,
    load_affine,
    row_offsets,
    row_pointers,
)

# The interpreter reduces a pair element by element, in Python.
ONE_BY_ONE = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Places in the kernels' tuples of tensors; R: the residual's gradient, Q: the gate.
G, X, R, W, B, Q, MEAN, RSTD, DX, DW, DB, DQ = (tl.constexpr(i) for i in range(12))


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def row_totals(a, b):
    """Both sums over the columns, in one reduction: one barrier less."""
    if ONE_BY_ONE:
        totals = (tl.sum(a, axis=1, keep_dims=True), tl.sum(b, axis=1, keep_dims=True))
    else:
        totals = tl.reduce((a, b), 1, add_pairs, keep_dims=True)
    return totals


@triton.jit
def chunk_of(tiles, c: tl.constexpr):
    """None where the tensor is absent."""
    chunk = None
    if len(tiles) > 0:
        chunk = tiles[c]
    return chunk


@triton.jit
def affine_scale(w, offset):
    """w + offset in f32, or None."""
    scale = None
    if w is not None:
        scale = w.to(tl.float32)
        if offset is not None:
            scale += offset
    return scale


@triton.jit
def times(a, factor):
    if factor is not None:
        a = a * factor.to(tl.float32)
    return a


@triton.jit
def pointers_of(tensors, K: tl.constexpr, rows, layout, ALIGN: tl.constexpr):
    return row_pointers(tensors[K], rows, layout[0], layout[1][K], layout[2][K], None, ALIGN)


@triton.jit
def load_rows(
    tensors, K: tl.constexpr, rows, mask_m, layout, start, N,
    ALIGN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """CHUNKS tiles of tensor K, () where it is absent. mask_m None: one row for all."""
    ptrs = pointers_of(tensors, K, rows, layout, ALIGN)
    return load_affine(
        ptrs, layout[2][K], start, mask_m, N, None, EVEN, 0, BLOCK_M, BLOCK_N, CHUNKS
    )


@triton.jit
def load_statistics(tensors, rows, mask_m, layout, CENTER: tl.constexpr):
    """Those that the forward saved."""
    at = row_offsets(rows, layout[0], layout[1][RSTD])
    rstd = tl.load(tensors[RSTD] + at, mask=mask_m, other=0.0)
    mean = tl.zeros_like(rstd)
    if CENTER:
        at = row_offsets(rows, layout[0], layout[1][MEAN])
        mean = tl.load(tensors[MEAN] + at, mask=mask_m, other=0.0)
    return mean, rstd


@triton.jit
def row_statistics(
    x, mask_m, N, eps, CENTER: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Mean (0 without CENTER) and rstd of the rows in x."""
    mean = tl.full([BLOCK_M, 1], 0.0, tl.float32)
    if CENTER:
        total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
        for c in tl.static_range(CHUNKS):
            total += x[c].to(tl.float32)
        mean = tl.sum(total, axis=1, keep_dims=True) / N
    moment = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for c in tl.static_range(CHUNKS):
        centred = x[c].to(tl.float32) - mean
        if CENTER and not EVEN:
            cols = c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            centred = tl.where(inside_row(cols, None, N), centred, 0.0)
        moment = tl.fma(centred, centred, moment)
    rstd = tl.rsqrt(tl.sum(moment, axis=1, keep_dims=True) / N + eps)
    return mean, tl.where(mask_m, rstd, 0.0)


@triton.jit
def add_pull(sum_a, sum_ax, g, x, w, q, mean, offset):
    """Lane by lane, sum(a) and sum(a * (x - mean)). Masked elements have g = 0."""
    a = times(times(g.to(tl.float32), q), affine_scale(w, offset))
    return sum_a + a, tl.fma(a, x.to(tl.float32) - mean, sum_ax)


@triton.jit
def pull_means(
    g, x, w, q, mean, rstd, offset, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """mean_n(a) and mean_n(a * h)."""
    sum_a = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    sum_ax = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for c in tl.static_range(CHUNKS):
        sum_a, sum_ax = add_pull(
            sum_a, sum_ax, g[c], x[c], chunk_of(w, c), chunk_of(q, c), mean, offset
        )
    total_a, total_ax = row_totals(sum_a, sum_ax)
    return total_a / N, total_ax * rstd / N


@triton.jit
def pull_and_rstd(
    g, x, w, q, mask_m, offset, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """rstd of rows that have no mean, and mean_n(a * h)."""
    sum_xx = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    sum_ax = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    for c in tl.static_range(CHUNKS):
        wide = x[c].to(tl.float32)
        a = times(times(g[c].to(tl.float32), chunk_of(q, c)), affine_scale(chunk_of(w, c), offset))
        sum_xx = tl.fma(wide, wide, sum_xx)
        sum_ax = tl.fma(a, wide, sum_ax)
    total_xx, total_ax = row_totals(sum_xx, sum_ax)
    rstd = tl.where(mask_m, tl.rsqrt(total_xx / N + eps), 0.0)
    return rstd, total_ax * rstd / N
