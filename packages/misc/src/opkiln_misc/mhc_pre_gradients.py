"""Of mhc_pre's backward: the two passes over the data, and the sum over groups of rows.

A tile of R rows and BLOCK_C columns of every stream is read at once: x and grad_x_res [B, N * C],
grad_x_layer [B, C], phi [N * C, M]. Products with phi run on the tensor cores, in three parts of
TF32 (PRECISION) that together keep f32; sums of what they leave over are f32.
"""

import triton
import triton.language as tl

from opkiln_misc.mhc_pre_gates import program_coefficients


@triton.jit
def load_tile(ptr, rows, cols, mask, stride_b, stride_c):
    """[R, BLOCK_C] as f32, zeros outside."""
    at = rows[:, None] * stride_b + cols.to(tl.int64)[None, :] * stride_c
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_streams(
    ptr, rows, cols, mask, C, stride_b, stride_c, first, COUNT: tl.constexpr
):  # fmt: skip
    """The same columns of streams first, first + 1, ..."""
    tiles = ()
    for i in tl.static_range(COUNT):
        at = (first + i) * C + cols
        tiles = tiles + (load_tile(ptr, rows, at, mask, stride_b, stride_c),)
    return tiles


@triton.jit
def load_phi(
    ptr, k, mask_k, m, units_k, stride_m, ALIGN: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Rows k of phi, units_k * ALIGN apart, and columns m."""
    at = k.to(tl.int64)[:, None] * (units_k * ALIGN) + m.to(tl.int64)[None, :] * stride_m
    return tl.load(ptr + at, mask=mask_k[:, None] & (m < M)[None, :], other=0.0)


@triton.jit
def mhc_pre_sums_kernel(
    g_res_ptr, g_layer_ptr, phi_ptr, x_ptr, parts_ptr, B, C, share,
    stride_rb, stride_rc, stride_lb, stride_lc, units_pk, stride_pm, stride_xb, stride_xk,
    ALIGN: tl.constexpr, N: tl.constexpr, MP: tl.constexpr, R: tl.constexpr,
    BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts[split, b] = the sums of row b (see mhc_pre_gates) over `share` columns of each stream.

    Grid (cdiv(B, R), splits). share: a multiple of BLOCK_C.
    """
    M: tl.constexpr = N * N + 2 * N
    S: tl.constexpr = M + 1 + N * N + N
    rows = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    mask_b = rows < B
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, C)
    m = tl.arange(0, MP)
    h = tl.full([R, MP], 0.0, tl.float32)
    square = tl.full([R, BLOCK_C], 0.0, tl.float32)
    sums = ()  # D, then those with grad_x_layer
    for _ in tl.static_range(N * N + N):
        sums = sums + (tl.full([R], 0.0, tl.float32),)
    for start in tl.range(begin, end, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C)
        mask_c = cols < end
        mask = mask_b[:, None] & mask_c[None, :]
        xs = load_streams(x_ptr, rows, cols, mask, C, stride_xb, stride_xk, 0, N)
        gs = load_streams(g_res_ptr, rows, cols, mask, C, stride_rb, stride_rc, 0, N)
        g_layer = load_tile(g_layer_ptr, rows, cols, mask, stride_lb, stride_lc)
        added = ()
        for j in tl.static_range(N):
            phi = load_phi(phi_ptr, j * C + cols, mask_c, m, units_pk, stride_pm, ALIGN, M)
            h = tl.dot(xs[j], phi, h, input_precision=PRECISION)
            square += xs[j] * xs[j]
            for i in tl.static_range(N):
                added = added + (sums[j * N + i] + tl.sum(xs[j] * gs[i], axis=1),)
        for j in tl.static_range(N):
            added = added + (sums[N * N + j] + tl.sum(xs[j] * g_layer, axis=1),)
        sums = added
    parts_ptr += tl.program_id(1).to(tl.int64) * B * S
    at = rows[:, None] * S + m[None, :]
    tl.store(parts_ptr + at, h, mask=mask_b[:, None] & (m < M)[None, :])
    tl.store(parts_ptr + rows * S + M, tl.sum(square, axis=1), mask=mask_b)
    for k in tl.static_range(N * N + N):
        tl.store(parts_ptr + rows * S + M + 1 + k, sums[k], mask=mask_b)


@triton.jit
def load_dh(coef_ptr, rows, mask_b, m, K: tl.constexpr, M: tl.constexpr):
    """Columns m of dH of the rows; of dz, M floats further on."""
    at = coef_ptr + rows[:, None] * K + (K - 1 - 2 * M) + m[None, :]
    return tl.load(at, mask=mask_b[:, None] & (m < M)[None, :], other=0.0)


@triton.jit
def gradient_of_x(
    x, g_layer, gs, product, coef_ptr, rows, mask_b, j, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Of stream j: product = dH @ phi^T."""
    at = coef_ptr + rows * K
    factor = tl.load(at + K - 1, mask=mask_b, other=0.0)
    pre = tl.load(at + N * N + j, mask=mask_b, other=0.0)
    out = product + factor[:, None] * x + pre[:, None] * g_layer
    for i in tl.static_range(N):
        res = tl.load(at + i * N + j, mask=mask_b, other=0.0)
        out += res[:, None] * gs[i]
    return out


@triton.jit
def mhc_pre_gradients_kernel(
    g_res_ptr, g_layer_ptr, g_post_ptr, phi_ptr, x_ptr, b_ptr, d_x_ptr, d_phi_ptr, d_b_ptr,
    parts_ptr, sums_ptr, coef_ptr, rounds_ptr, B, C, group_rows,
    stride_rb, stride_rc, stride_lb, stride_lc, units_pk, stride_pm, stride_xb, stride_xk,
    stride_b, stride_gb, stride_gn, alpha_pre, alpha_post, alpha_res, repeat, eps, width,
    ALIGN: tl.constexpr, FOLD: tl.constexpr, SPLITS: tl.constexpr, N: tl.constexpr,
    OWN: tl.constexpr, NP: tl.constexpr, SP: tl.constexpr, MC: tl.constexpr,
    GATE_ROWS: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(C, BLOCK_C), groups, N / OWN): BLOCK_C columns of OWN streams, `group_rows` rows.

    d_x [B, N * C]; d_phi [groups, N * C, M] and d_b [groups, M]: the group's sums; None where not
    wanted. FOLD: the program computes the coefficients of all rows itself, in its own part of the
    workspace; else coef holds them.
    """
    M: tl.constexpr = N * N + 2 * N
    K: tl.constexpr = N * N + N + 2 * M + 1
    CHUNKS: tl.constexpr = (M + MC - 1) // MC
    if FOLD:
        program = tl.program_id(0)
        program_coefficients(
            parts_ptr, sums_ptr, coef_ptr, rounds_ptr, b_ptr, g_post_ptr, program, 0, B,
            stride_b, stride_gb, stride_gn, alpha_pre, alpha_post, alpha_res, repeat, eps, width,
            SPLITS, N, NP, SP, GATE_ROWS, CHUNK,
        )  # fmt: skip
        coef_ptr += program.to(tl.int64) * GATE_ROWS * K
    group = tl.program_id(1)
    first = tl.program_id(2) * OWN
    adds_b = (tl.program_id(0) == 0) & (first == 0)
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = cols < C
    m = tl.arange(0, MC)
    d_phi = ()
    d_b = ()
    for _ in tl.static_range(OWN * CHUNKS):
        d_phi = d_phi + (tl.full([BLOCK_C, MC], 0.0, tl.float32),)
    for _ in tl.static_range(CHUNKS):
        d_b = d_b + (tl.full([MC], 0.0, tl.float32),)
    end = tl.minimum((group + 1) * group_rows, B)
    # Wide phi held in registers from one tile of rows to the next would spill.
    for start in tl.range(group * group_rows, end, R, disable_licm=CHUNKS > 1):
        rows = (start + tl.arange(0, R)).to(tl.int64)
        mask_b = rows < end
        mask = mask_b[:, None] & mask_c[None, :]
        xs = load_streams(x_ptr, rows, cols, mask, C, stride_xb, stride_xk, first, OWN)
        dh = load_dh(coef_ptr, rows, mask_b, m, K, M)  # its first chunk; later ones when needed
        if d_b_ptr is not None:
            added = ()
            for c in tl.static_range(CHUNKS):
                dz = load_dh(coef_ptr + M, rows, mask_b & adds_b, c * MC + m, K, M)
                added = added + (d_b[c] + tl.sum(dz, axis=0),)
            d_b = added
        if d_x_ptr is not None:
            gs = load_streams(g_res_ptr, rows, cols, mask, C, stride_rb, stride_rc, 0, N)
            g_layer = load_tile(g_layer_ptr, rows, cols, mask, stride_lb, stride_lc)
            for i in tl.static_range(OWN):
                k = (first + i) * C + cols
                phi = load_phi(phi_ptr, k, mask_c, m, units_pk, stride_pm, ALIGN, M)
                product = tl.dot(dh, tl.trans(phi), input_precision=PRECISION)
                for c in tl.static_range(1, CHUNKS):
                    mc = c * MC + m
                    phi = load_phi(phi_ptr, k, mask_c, mc, units_pk, stride_pm, ALIGN, M)
                    more = load_dh(coef_ptr, rows, mask_b, mc, K, M)
                    product = tl.dot(more, tl.trans(phi), product, input_precision=PRECISION)
                d_x = gradient_of_x(
                    xs[i], g_layer, gs, product, coef_ptr, rows, mask_b, first + i, N, K
                )
                to = d_x_ptr + rows[:, None] * N * C + k[None, :]
                tl.store(to, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
        if d_phi_ptr is not None:
            added = ()
            for c in tl.static_range(CHUNKS):
                part = dh
                if c > 0:
                    part = load_dh(coef_ptr, rows, mask_b, c * MC + m, K, M)
                for i in tl.static_range(OWN):
                    total = d_phi[c * OWN + i]
                    total = tl.dot(tl.trans(xs[i]), part, total, input_precision=PRECISION)
                    added = added + (total,)
            d_phi = added
    for c in tl.static_range(CHUNKS):
        mask_m = c * MC + m < M
        if d_phi_ptr is not None:
            for i in tl.static_range(OWN):
                k = (group.to(tl.int64) * N + first + i) * C + cols
                to = d_phi_ptr + k[:, None] * M + c * MC + m[None, :]
                tl.store(to, d_phi[c * OWN + i], mask=mask_c[:, None] & mask_m[None, :])
        if d_b_ptr is not None:
            tl.store(d_b_ptr + group * M + c * MC + m, d_b[c], mask=mask_m & adds_b)


@triton.jit
def add_groups(from_ptr, to_ptr, block, count, groups, BLOCK: tl.constexpr):
    offs = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for _ in tl.range(0, groups):
        total += tl.load(from_ptr + offs, mask=offs < count, other=0.0)
        from_ptr += count
    tl.store(to_ptr + offs, total, mask=offs < count)


@triton.jit
def mhc_pre_groups_kernel(
    part_phi_ptr, part_b_ptr, d_phi_ptr, d_b_ptr, phi_count, b_count, groups, BLOCK: tl.constexpr
):
    """Add up d_phi and d_b over the groups. Grid: cdiv(phi_count, BLOCK) and, last, d_b's one."""
    block = tl.program_id(0)
    if d_phi_ptr is not None:
        blocks = tl.cdiv(phi_count, BLOCK)
        if block < blocks:
            add_groups(part_phi_ptr, d_phi_ptr, block, phi_count, groups, BLOCK)
        block -= blocks
    if d_b_ptr is not None and block == 0:
        add_groups(part_b_ptr, d_b_ptr, block, b_count, groups, BLOCK)
