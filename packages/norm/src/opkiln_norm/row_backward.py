"""Backward of the row norms. With h = (x - mean) * rstd (rms_norm: mean 0) and N columns:

a = g * gate * (w + offset)
grad_input = rstd * (a - mean_n(a) - h * mean_n(a * h)) + r; rms_norm: without mean_n(a)
grad_weight = sum(g * gate * h), grad_bias = sum(g * gate)
grad_gate = sum(g * ((w + offset) * h + b))

g, x, r (the gradient of a residual_out) and the adaptive norms' w, b, gate [M, N] f16, bf16 or f32
with any strides; else w [N] of any of these dtypes; mean, rstd [M] f32, or taken from x. The sums
run over the rows that share a row of w, b or gate; there are none where each row has its own.
Gradients that are absent are not computed.

row_backward_kernel   a program loops over rows of one group, with x and g in registers, so that
                      each is read once, and its sums beside them; it writes one row of sums
row_sums_kernel       what a row's gradient needs of the whole row, where no program holds one
column_sums_kernel    adds up the programs' rows of sums, in a fixed order
"""

import triton
import triton.language as tl

from opkiln_norm.row_backward_tiles import (
    DB,
    DQ,
    DW,
    DX,
    RSTD,
    B,
    G,
    Q,
    R,
    W,
    X,
    affine_scale,
    chunk_of,
    load_rows,
    load_statistics,
    pointers_of,
    pull_and_rstd,
    pull_means,
    row_statistics,
    times,
)
from opkiln_norm.row_tiles import read_again, store_columns, tile_mask


@triton.jit
def add_or_store(
    total, tensors, K: tl.constexpr, rows, cols, value, mask, layout,
    OWN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """A gradient of w, b or gate: stored where each row has its own, else added to the sums."""
    if OWN:
        ptrs = pointers_of(tensors, K, rows, layout, ALIGN)
        store_columns(ptrs, cols, layout[2][K], value, mask, "")
    else:
        total += value
    return total


@triton.jit
def write_tile(
    tensors, rows, mask_m, start, g, x, r, w, b, q, mean, rstd, mean_a, mean_ah,
    sum_w, sum_b, sum_q, layout, N, offset, OWN: tl.constexpr, EVEN: tl.constexpr,
    PACKED: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile from what its rows' means are; mean_a None: not the input's."""
    new_w, new_b, new_q = (), (), ()
    last = rstd  # the last statistic that g and x went into
    if mean_ah is not None:
        last = mean_ah
    for c in tl.static_range(CHUNKS):
        cols = start + c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        mask = tile_mask(mask_m, cols, N, None, EVEN, 0, BLOCK_M, BLOCK_N)
        g_out = read_again(g[c], last, PACKED)
        h = (read_again(x[c], last, PACKED) - mean) * rstd
        scale = affine_scale(chunk_of(w, c), offset)
        g_norm = times(g_out, chunk_of(q, c))
        if mean_a is not None:
            d = rstd * (times(g_norm, scale) - mean_a - h * mean_ah)
            if len(r) > 0:
                d += r[c].to(tl.float32)
            ptrs = pointers_of(tensors, DX, rows, layout, ALIGN)
            store_columns(ptrs, cols, layout[2][DX], d, mask, "")
        if tensors[DW] is not None:
            total = chunk_of(sum_w, c)
            total = add_or_store(
                total, tensors, DW, rows, cols, g_norm * h, mask, layout, OWN[0], ALIGN
            )
            new_w = new_w + (total,)
        if tensors[DB] is not None:
            total = chunk_of(sum_b, c)
            total = add_or_store(
                total, tensors, DB, rows, cols, g_norm, mask, layout, OWN[1], ALIGN
            )
            new_b = new_b + (total,)
        if tensors[DQ] is not None:
            gated = times(h, scale)
            if len(b) > 0:
                gated += b[c].to(tl.float32)
            total = chunk_of(sum_q, c)
            total = add_or_store(
                total, tensors, DQ, rows, cols, g_out * gated, mask, layout, OWN[2], ALIGN
            )
            new_q = new_q + (total,)
    return new_w, new_b, new_q


@triton.jit
def load_modulation(
    tensors, w, b, q, rows, mask_m, layout, start, N, KEPT: tl.constexpr,
    ALIGN: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """w, b and gate of `rows`, or those KEPT from before."""
    if not KEPT[0]:
        w = load_rows(
            tensors, W, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    if not KEPT[1]:
        b = load_rows(
            tensors, B, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    if not KEPT[2]:
        q = load_rows(
            tensors, Q, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    return w, b, q


@triton.jit
def backward_tile(
    tensors, sums_ptr, rows, mask_m, start, w, b, q, sum_w, sum_b, sum_q, layout, M, N, eps, offset,
    CENTER: tl.constexpr, KEPT: tl.constexpr, OWN: tl.constexpr, EVEN: tl.constexpr,
    PACKED: tl.constexpr, AGAIN: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The gradients of `rows`; returns the sums."""
    # Without a mean to subtract, the statistic and the pull are sums of one pass.
    AT_ONCE: tl.constexpr = (
        tensors[RSTD] is None and sums_ptr is None and tensors[DX] is not None and not CENTER
    )
    x = load_rows(tensors, X, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS)
    if tensors[RSTD] is not None:
        mean, rstd = load_statistics(tensors, rows, mask_m, layout, CENTER)
    elif sums_ptr is not None:
        mean = tl.load(sums_ptr + 2 * M.to(tl.int64) + rows, mask=mask_m, other=0.0)
        rstd = tl.load(sums_ptr + 3 * M.to(tl.int64) + rows, mask=mask_m, other=0.0)
    elif AGAIN and not AT_ONCE:
        mean, rstd = row_statistics(x, mask_m, N, eps, CENTER, EVEN, BLOCK_M, BLOCK_N, CHUNKS)
        tl.debug_barrier()  # as below
        x = load_rows(
            tensors, X, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    g = load_rows(tensors, G, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS)
    r = ()
    if not AGAIN:
        r = load_rows(
            tensors, R, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    w, b, q = load_modulation(
        tensors, w, b, q, rows, mask_m, layout, start, N, KEPT, ALIGN, EVEN,
        BLOCK_M, BLOCK_N, CHUNKS,
    )  # fmt: skip
    if tensors[RSTD] is None and sums_ptr is None and not AGAIN and not AT_ONCE:
        mean, rstd = row_statistics(x, mask_m, N, eps, CENTER, EVEN, BLOCK_M, BLOCK_N, CHUNKS)
    mean_a, mean_ah = None, None
    if AT_ONCE:
        mean = 0.0
        rstd, mean_ah = pull_and_rstd(g, x, w, q, mask_m, offset, N, eps, BLOCK_M, BLOCK_N, CHUNKS)
        mean_a = 0.0
    elif tensors[DX] is not None:
        if sums_ptr is not None:
            mean_a = tl.load(sums_ptr + rows, mask=mask_m, other=0.0)
            mean_ah = tl.load(sums_ptr + M.to(tl.int64) + rows, mask=mask_m, other=0.0)
        else:
            mean_a, mean_ah = pull_means(
                g, x, w, q, mean, rstd, offset, N, BLOCK_M, BLOCK_N, CHUNKS
            )
        if not CENTER:
            mean_a = 0.0
    if AGAIN:
        tl.debug_barrier()  # without it the compiler would take the values that it has
        x = load_rows(
            tensors, X, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
        g = load_rows(
            tensors, G, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
        r = load_rows(
            tensors, R, rows, mask_m, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
        w, b, q = load_modulation(
            tensors, w, b, q, rows, mask_m, layout, start, N, KEPT, ALIGN, EVEN,
            BLOCK_M, BLOCK_N, CHUNKS,
        )  # fmt: skip
    return write_tile(
        tensors, rows, mask_m, start, g, x, r, w, b, q, mean, rstd, mean_a, mean_ah,
        sum_w, sum_b, sum_q, layout, N, offset, OWN, EVEN, PACKED, ALIGN,
        BLOCK_M, BLOCK_N, CHUNKS,
    )  # fmt: skip


@triton.jit
def no_sums(ptr, OWN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            CHUNKS: tl.constexpr):  # fmt: skip
    """What a gradient's sums start as: () where it is absent, a placeholder where rows store it."""
    sums = ()
    for _ in tl.static_range(CHUNKS):
        if ptr is not None and not OWN:
            sums = sums + (tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32),)
        elif ptr is not None:
            sums = sums + (tl.full([1, 1], 0.0, tl.float32),)
    return sums


@triton.jit
def store_sums(
    ptr, sums, part, start, N, OWN: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr
):
    """A program's sums, as row `part`."""
    if ptr is not None and not OWN:
        ptr += part.to(tl.int64) * N
        for c in tl.static_range(CHUNKS):
            cols = start + c * BLOCK_N + tl.arange(0, BLOCK_N)
            total = tl.sum(sums[c], axis=0)
            tl.store(ptr + cols, total.to(ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=["M", "group_rows", "slices", "n_units", "col_blocks"])
def row_backward_kernel(
    g_ptr, x_ptr, r_ptr, w_ptr, b_ptr, q_ptr, mean_ptr, rstd_ptr, sums_ptr,  # None where absent
    dx_ptr, dw_ptr, db_ptr, dq_ptr,
    inner_sizes, strides, columns, M, group_rows, slices, n_units, col_blocks, eps, offset,
    CENTER: tl.constexpr, KEPT: tl.constexpr, OWN: tl.constexpr, WIDE: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, AGAIN: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: groups * slices * col_blocks programs. N = n_units * ALIGN.

    strides, columns: of the 12 tensors in the order above; in units of ALIGN where dense. KEPT:
    which of w, b, q have one row for all of a program, to be kept in registers. OWN: for which each
    row has its own gradient; for others dw, db, dq are rows of N sums, one a program. WIDE: a
    program has one block of columns, and sums_ptr is what row_sums_kernel wrote. AGAIN: a row is
    read a second time, from L1, and not held in registers meanwhile.
    """
    tensors = (
        g_ptr, x_ptr, r_ptr, w_ptr, b_ptr, q_ptr, mean_ptr, rstd_ptr,
        dx_ptr, dw_ptr, db_ptr, dq_ptr,
    )  # fmt: skip
    layout = (inner_sizes, strides, columns)
    N = n_units * ALIGN
    start = 0
    part = tl.program_id(0)
    if WIDE:
        start = part % col_blocks * (BLOCK_N * CHUNKS)
        part = part // col_blocks
    elif EVEN:
        N = CHUNKS * BLOCK_N
    first = part // slices * group_rows
    row = first + tl.arange(0, 1)[:, None]
    w, b, q = (), (), ()
    if KEPT[0]:
        w = load_rows(
            tensors, W, row, None, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    if KEPT[1]:
        b = load_rows(
            tensors, B, row, None, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    if KEPT[2]:
        q = load_rows(
            tensors, Q, row, None, layout, start, N, ALIGN, EVEN, BLOCK_M, BLOCK_N, CHUNKS
        )
    sum_w = no_sums(dw_ptr, OWN[0], BLOCK_M, BLOCK_N, CHUNKS)
    sum_b = no_sums(db_ptr, OWN[1], BLOCK_M, BLOCK_N, CHUNKS)
    sum_q = no_sums(dq_ptr, OWN[2], BLOCK_M, BLOCK_N, CHUNKS)
    for tile in tl.range(part % slices, tl.cdiv(group_rows, BLOCK_M), slices, num_stages=STAGES):
        local = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        sum_w, sum_b, sum_q = backward_tile(
            tensors, sums_ptr, first + local, local < group_rows, start, w, b, q,
            sum_w, sum_b, sum_q, layout, M, N, eps, offset, CENTER, KEPT, OWN, EVEN, PACKED, AGAIN,
            ALIGN, BLOCK_M, BLOCK_N, CHUNKS,
        )  # fmt: skip
    store_sums(dw_ptr, sum_w, part, start, N, OWN[0], BLOCK_N, CHUNKS)
    store_sums(db_ptr, sum_b, part, start, N, OWN[1], BLOCK_N, CHUNKS)
    store_sums(dq_ptr, sum_q, part, start, N, OWN[2], BLOCK_N, CHUNKS)
