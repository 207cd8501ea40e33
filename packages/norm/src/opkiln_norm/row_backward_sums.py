"""Sums that no program of row_backward_kernel has: over wide rows, and over the programs' rows."""

import triton
import triton.language as tl

from opkiln_norm.row_backward_tiles import (
    G,
    Q,
    W,
    X,
    add_pull,
    chunk_of,
    load_rows,
    load_statistics,
    row_totals,
)
from opkiln_norm.row_tiles import inside_row


@triton.jit(do_not_specialize=["M", "n_units"])
def row_sums_kernel(
    g_ptr, x_ptr, w_ptr, q_ptr, mean_ptr, rstd_ptr, sums_ptr,
    inner_sizes, strides, columns, M, n_units, eps, offset,
    CENTER: tl.constexpr, ALIGN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write mean_n(a), mean_n(a * h), mean and rstd of every row, [4, M]. Grid: M programs."""
    tensors = (g_ptr, x_ptr, None, w_ptr, None, q_ptr, mean_ptr, rstd_ptr)
    layout = (inner_sizes, strides, columns)
    N = n_units * ALIGN
    blocks = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) + tl.arange(0, 1)[:, None]
    mask_m = row < M
    mean = tl.full([1, 1], 0.0, tl.float32)
    if rstd_ptr is not None:
        mean, rstd = load_statistics(tensors, row, mask_m, layout, CENTER)
    elif CENTER:
        total = tl.full([1, BLOCK_N], 0.0, tl.float32)
        for i in tl.range(0, blocks):
            x = load_rows(
                tensors, X, row, mask_m, layout, i * BLOCK_N, N, ALIGN, False, 1, BLOCK_N, 1
            )
            total += x[0].to(tl.float32)
        mean = tl.sum(total, axis=1, keep_dims=True) / N
    sum_a = tl.full([1, BLOCK_N], 0.0, tl.float32)
    sum_ax = tl.full([1, BLOCK_N], 0.0, tl.float32)
    moment = tl.full([1, BLOCK_N], 0.0, tl.float32)
    for i in tl.range(0, blocks):
        start = i * BLOCK_N
        x = load_rows(tensors, X, row, mask_m, layout, start, N, ALIGN, False, 1, BLOCK_N, 1)
        g = load_rows(tensors, G, row, mask_m, layout, start, N, ALIGN, False, 1, BLOCK_N, 1)
        w = load_rows(tensors, W, row, mask_m, layout, start, N, ALIGN, False, 1, BLOCK_N, 1)
        q = load_rows(tensors, Q, row, mask_m, layout, start, N, ALIGN, False, 1, BLOCK_N, 1)
        sum_a, sum_ax = add_pull(
            sum_a, sum_ax, g[0], x[0], chunk_of(w, 0), chunk_of(q, 0), mean, offset
        )
        if rstd_ptr is None:
            inside = inside_row(start + tl.arange(0, BLOCK_N)[None, :], None, N)
            centred = tl.where(inside, x[0].to(tl.float32) - mean, 0.0)
            moment = tl.fma(centred, centred, moment)
    if rstd_ptr is None:
        rstd = tl.rsqrt(tl.sum(moment, axis=1, keep_dims=True) / N + eps)
    total_a, total_ax = row_totals(sum_a, sum_ax)
    rows = M.to(tl.int64)
    tl.store(sums_ptr + row, total_a / N)
    tl.store(sums_ptr + rows + row, total_ax * rstd / N)
    tl.store(sums_ptr + 2 * rows + row, mean)
    tl.store(sums_ptr + 3 * rows + row, rstd)


@triton.jit
def add_parts(ws_ptr, out_ptr, row, rows, parts, cols, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Row `row` of the `rows` of a gradient, if it is one: the sum of `parts` rows of sums."""
    if (row >= 0) & (row < rows):
        ws_ptr += row.to(tl.int64) * parts * N
        lanes = tl.arange(0, ROWS)[:, None]
        total = tl.full([ROWS, COLS], 0.0, tl.float32)
        for i in tl.range(0, parts, ROWS):
            at = (i + lanes).to(tl.int64) * N + cols[None, :]
            mask = (i + lanes < parts) & (cols < N)[None, :]
            total += tl.load(ws_ptr + at, mask=mask, other=0.0)
        out = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row.to(tl.int64) * N + cols, out, mask=cols < N)


@triton.jit(do_not_specialize=["rows", "parts", "N"])
def column_sums_kernel(
    w_ptr, b_ptr, q_ptr, dw_ptr, db_ptr, dq_ptr, rows, parts, N,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(N, COLS) for each of the `rows` of dw, db and dq. Pointers None where absent."""
    blocks = tl.cdiv(N, COLS)
    cols = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    row = tl.program_id(0) // blocks
    if dw_ptr is not None:
        add_parts(w_ptr, dw_ptr, row, rows[0], parts[0], cols, N, ROWS, COLS)
    row -= rows[0]
    if db_ptr is not None:
        add_parts(b_ptr, db_ptr, row, rows[1], parts[1], cols, N, ROWS, COLS)
    row -= rows[1]
    if dq_ptr is not None:
        add_parts(q_ptr, dq_ptr, row, rows[2], parts[2], cols, N, ROWS, COLS)
