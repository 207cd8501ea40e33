"""Of mhc_pre's backward: from a row's sums to the coefficients of its gradients.

A row's sums, S floats: H = x @ phi (M), sum(x^2), D[j, i] = x_j . grad_x_res_i (N * N, i
innermost), x_j . grad_x_layer (N). Its coefficients, K floats: res (N * N), pre (N), dH (M), dz
(M), and the factor of x in grad_x. M = N * N + 2 * N; z: the logits, dz and dH the gradients of z
and H.
"""

import triton
import triton.language as tl


@triton.jit
def add_splits(
    parts_ptr, to_ptr, first, B,
    SPLITS: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """to[r] = the sum over the splits of parts[split, first + r], r < R."""
    split = tl.arange(0, CHUNK)[:, None, None]
    row = tl.arange(0, R)[None, :, None]
    item = tl.arange(0, SP)[None, None, :]
    mask = (first + row < B) & (item < S)
    total = tl.full([CHUNK, R, SP], 0.0, tl.float32)
    for start in tl.range(0, SPLITS, CHUNK):
        at = ((start + split).to(tl.int64) * B + first + row) * S + item
        total += tl.load(parts_ptr + at, mask=mask & (start + split < SPLITS), other=0.0)
    found = tl.sum(total, axis=0)
    row = tl.arange(0, R)[:, None]
    item = tl.arange(0, SP)[None, :]
    tl.store(to_ptr + row * S + item, found, mask=item < S)
    tl.debug_barrier()  # others of the program's threads read it


@triton.jit
def sinkhorn(m, valid, rounds_ptr, repeat, eps, NP: tl.constexpr, R: tl.constexpr):
    """What the matrices are divided by in each step goes to rounds[step, r, NP]."""
    at = tl.arange(0, R)[:, None] * NP + tl.arange(0, NP)[None, :]
    for step in tl.range(0, repeat):
        by_row = tl.sum(m, axis=2) + eps
        m = tl.where(valid, m / by_row[:, :, None], 0.0)
        by_column = tl.sum(m, axis=1) + eps
        m = tl.where(valid, m / by_column[:, None, :], 0.0)
        tl.store(rounds_ptr + 2 * step * R * NP + at, by_row)
        tl.store(rounds_ptr + (2 * step + 1) * R * NP + at, by_column)
    return m


@triton.jit
def sinkhorn_back(m, g, valid, rounds_ptr, repeat, NP: tl.constexpr, R: tl.constexpr):
    """From the result and its gradient to the first matrix and its gradient, step by step: with
    y = m / s and s = sum(m) + eps, the gradient of m is (g - sum(g y)) / s, and m = y s.

    A sum of products has to take them from tl.fma: a plain product is fused into the sum's first
    exchange, so that lanes which hold one element twice round it in two ways.
    """
    at = tl.arange(0, R)[:, None] * NP + tl.arange(0, NP)[None, :]
    for i in tl.range(0, repeat):
        step = repeat - 1 - i
        by_column = tl.load(rounds_ptr + (2 * step + 1) * R * NP + at)[:, None, :]
        by_row = tl.load(rounds_ptr + 2 * step * R * NP + at)[:, :, None]
        g = tl.where(valid, (g - tl.sum(tl.fma(g, m, 0.0), axis=1)[:, None, :]) / by_column, 0.0)
        m = tl.where(valid, m * by_column, 0.0)
        g = tl.where(valid, (g - tl.sum(tl.fma(g, m, 0.0), axis=2)[:, :, None]) / by_row, 0.0)
        m = tl.where(valid, m * by_row, 0.0)
    return m, g


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def coefficients(
    sums_ptr, coef_ptr, rounds_ptr, b_ptr, g_post_ptr, first, B, stride_b, stride_gb, stride_gn,
    alpha_pre, alpha_post, alpha_res, repeat, eps, width,
    N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Of rows first + r, r < R, from sums[r] to coef[r]. Rows beyond B give zeros."""
    M: tl.constexpr = N * N + 2 * N
    S: tl.constexpr = M + 1 + N * N + N
    K: tl.constexpr = N * N + N + 2 * M + 1
    DH: tl.constexpr = N * N + N
    r1 = tl.arange(0, R)
    r2 = tl.arange(0, R)[:, None]
    r3 = tl.arange(0, R)[:, None, None]
    n = tl.arange(0, NP)[None, :]
    i = tl.arange(0, NP)[None, :, None]
    j = tl.arange(0, NP)[None, None, :]
    valid = (i < N) & (j < N) & (r3 < R)
    inside = (n < N) & (r2 < R)
    square = tl.load(sums_ptr + r1 * S + M)
    rms = tl.sqrt(square / width)
    s = 1.0 / (rms + 1e-4)

    at = 2 * N + i * N + j
    h_res = tl.load(sums_ptr + r3 * S + at, mask=valid, other=0.0)
    bias = tl.load(b_ptr + at.to(tl.int64) * stride_b, mask=(i < N) & (j < N), other=0.0)
    z = tl.where(valid, alpha_res * h_res * s[:, None, None] + bias, float("-inf"))
    most = tl.max(z, axis=2)[:, :, None]
    is_most = valid & (z == most)
    m = sinkhorn(tl.where(valid, tl.exp(z - most), 0.0), valid, rounds_ptr, repeat, eps, NP, R)
    tl.store(coef_ptr + r3 * K + i * N + j, m, mask=valid)
    tl.debug_barrier()
    g = tl.load(sums_ptr + r3 * S + M + 1 + j * N + i, mask=valid, other=0.0)
    m, g = sinkhorn_back(m, g, valid, rounds_ptr, repeat, NP, R)
    dz = tl.fma(g, m, 0.0)
    # The gradient of the row's maximum is shared by those that are equal to it.
    ties = tl.sum(is_most.to(tl.float32), axis=2)[:, :, None]
    dz -= tl.where(is_most, tl.sum(dz, axis=2)[:, :, None] / ties, 0.0)
    dz = tl.where(valid, dz, 0.0)
    pull = alpha_res * tl.sum(tl.sum(tl.fma(h_res, dz, 0.0), axis=2), axis=1)
    tl.store(coef_ptr + r3 * K + DH + at, alpha_res * s[:, None, None] * dz, mask=valid)
    tl.store(coef_ptr + r3 * K + DH + M + at, dz, mask=valid)

    h = tl.load(sums_ptr + r2 * S + n, mask=inside, other=0.0)
    bias = tl.load(b_ptr + n.to(tl.int64) * stride_b, mask=n < N, other=0.0)
    z = alpha_pre * h * s[:, None] + bias
    g = tl.load(sums_ptr + r2 * S + M + 1 + N * N + n, mask=inside, other=0.0)
    d = tl.where(inside, g * sigmoid(z) * sigmoid(-z), 0.0)
    pull += alpha_pre * tl.sum(tl.fma(h, d, 0.0), axis=1)
    tl.store(coef_ptr + r2 * K + N * N + n, sigmoid(z), mask=inside)
    tl.store(coef_ptr + r2 * K + DH + n, alpha_pre * s[:, None] * d, mask=inside)
    tl.store(coef_ptr + r2 * K + DH + M + n, d, mask=inside)

    d = tl.full([R, NP], 0.0, tl.float32)
    if g_post_ptr is not None:
        h = tl.load(sums_ptr + r2 * S + N + n, mask=inside, other=0.0)
        at = (first + r2).to(tl.int64) * stride_gb + n.to(tl.int64) * stride_gn
        d = tl.load(g_post_ptr + at, mask=inside & (first + r2 < B), other=0.0).to(tl.float32)
        pull += alpha_post * tl.sum(tl.fma(h, d, 0.0), axis=1)
    tl.store(coef_ptr + r2 * K + DH + N + n, alpha_post * s[:, None] * d, mask=inside)
    tl.store(coef_ptr + r2 * K + DH + M + N + n, d, mask=inside)

    factor = tl.where(rms == 0, 0.0, -pull * s * s / (width * rms))
    tl.store(coef_ptr + r1 * K + DH + 2 * M, factor)
    tl.debug_barrier()


@triton.jit
def program_coefficients(
    parts_ptr, sums_ptr, coef_ptr, rounds_ptr, b_ptr, g_post_ptr, program, first, B,
    stride_b, stride_gb, stride_gn, alpha_pre, alpha_post, alpha_res, repeat, eps, width,
    SPLITS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, SP: tl.constexpr,
    R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of rows first + r, into the program's part of the workspace."""
    M: tl.constexpr = N * N + 2 * N
    S: tl.constexpr = M + 1 + N * N + N
    K: tl.constexpr = N * N + N + 2 * M + 1
    rows = program.to(tl.int64) * R
    add_splits(parts_ptr, sums_ptr + rows * S, first, B, SPLITS, S, SP, R, CHUNK)
    coefficients(
        sums_ptr + rows * S, coef_ptr + rows * K, rounds_ptr + rows * 2 * repeat * NP, b_ptr,
        g_post_ptr, first, B, stride_b, stride_gb, stride_gn,
        alpha_pre, alpha_post, alpha_res, repeat, eps, width, N, NP, R,
    )  # fmt: skip


@triton.jit
def mhc_pre_coefficients_kernel(
    g_post_ptr, b_ptr, parts_ptr, sums_ptr, coef_ptr, rounds_ptr, B,
    stride_b, stride_gb, stride_gn, alpha_pre, alpha_post, alpha_res, repeat, eps, width,
    SPLITS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, SP: tl.constexpr,
    R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(B, R)."""
    program = tl.program_id(0)
    program_coefficients(
        parts_ptr, sums_ptr, coef_ptr, rounds_ptr, b_ptr, g_post_ptr, program, program * R, B,
        stride_b, stride_gb, stride_gn, alpha_pre, alpha_post, alpha_res, repeat, eps, width,
        SPLITS, N, NP, SP, R, CHUNK,
    )  # fmt: skip
