"""Row norms over rows of N elements, one kernel.

layer_norm:          y[m, n] = (x[m, n] - mean[m]) * rstd[m] * w[n] + b[n]
rms_norm:            y[m, n] = x[m, n] * rstd[m] * w[n]
fused_add_*:         the same of s = x + r in f32; s is an output too
ada_layer_norm:      y[m, n] = (x[m, n] - mean[m]) * rstd[m] * (w[m, n] + offset) + b[m, n]
ada_layer_norm_zero: the same, times g[m, n]

rstd = 1/sqrt(var_n(x) + eps), for rms_norm 1/sqrt(mean_n(x^2) + eps).
x, r, and ada's w, b, g [M, N] f16, bf16 or f32 with any strides (0 where they broadcast); y, s
[M, N] contiguous, x's dtype, or in place over x and r; w, b [N] of any of these dtypes, or absent;
mean, rstd [M] f32, or absent. Statistics and affine are f32.

A program keeps the last CHUNKS blocks of BLOCK_N columns of BLOCK_M rows in registers, so that x is
read once. Longer rows have a head before these blocks (HEAD), which is read twice.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import triton
import triton.language as tl
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher

from opkiln_norm import row_cluster
from opkiln_norm.row_plan import multiprocessors, plan_for
from opkiln_norm.row_tiles import (
    head_moments,
    inside_row,
    load_affines,
    load_sum,
    modulate,
    output_rows,
    read_again,
    row_pointers,
    store_columns,
    tile_mask,
    write_head,
)


@triton.jit
def normalize_tile(
    tile, x_ptr, r_ptr, w_ptr, b_ptr, g_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, w, b,
    inner_sizes, x_strides, r_strides, w_strides, b_strides, g_strides,
    stride_xn, stride_rn, stride_wn, stride_bn, stride_gn, M, N, eps, offset,
    CENTER: tl.constexpr, HEAD: tl.constexpr, EVEN: tl.constexpr, PRELOAD: tl.constexpr,
    PACKED: tl.constexpr, ALIGN: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
    COLUMNS: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """Rows tile * BLOCK_M and following. `w`, `b`: tiles of an affine that was loaded before."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    mask_m = rows < M
    shift = None
    vector_start = None
    if SHIFT:
        row_start = rows.to(tl.int64) * N
        shift = (row_start % SHIFT).to(tl.int32)
        vector_start = row_start // SHIFT * SHIFT
    x_rows = row_pointers(x_ptr, rows, inner_sizes, x_strides, stride_xn, vector_start, ALIGN)
    r_rows = row_pointers(r_ptr, rows, inner_sizes, r_strides, stride_rn, vector_start, ALIGN)
    w_rows = row_pointers(w_ptr, rows, inner_sizes, w_strides, stride_wn, vector_start, ALIGN)
    b_rows = row_pointers(b_ptr, rows, inner_sizes, b_strides, stride_bn, vector_start, ALIGN)
    g_rows = row_pointers(g_ptr, rows, inner_sizes, g_strides, stride_gn, vector_start, ALIGN)
    y_rows = output_rows(y_ptr, rows, N, x_rows, vector_start)
    s_rows = output_rows(s_ptr, rows, N, r_rows, vector_start)
    stride_yn = None
    stride_sn = None
    if y_ptr is None:
        stride_yn = stride_xn
        stride_sn = stride_rn
    cols = tl.arange(0, BLOCK_N)[None, :]
    start = 0
    if HEAD:
        head_blocks = tl.cdiv(N, BLOCK_N) - CHUNKS
        if COLUMNS:  # the loops are unrolled, all loads of a pass under way at once
            head_blocks = (COLUMNS + BLOCK_N - 1) // BLOCK_N - CHUNKS
        start = head_blocks * BLOCK_N

    x = ()
    for c in tl.static_range(CHUNKS):
        cols_c = start + c * BLOCK_N + cols
        mask = tile_mask(mask_m, cols_c, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N)
        x = x + (load_sum(x_rows, r_rows, cols_c, stride_xn, stride_rn, mask, EVICT, SHIFT),)
    mask_w = None
    if w_strides is not None:
        mask_w = mask_m
    g = ()
    if PRELOAD and mask_w is not None:
        w, b, g = load_affines(
            w_rows, b_rows, g_rows, stride_wn, stride_bn, stride_gn,
            start, mask_w, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N, CHUNKS,
        )  # fmt: skip
    if r_ptr is not None:
        for c in tl.static_range(CHUNKS):
            cols_c = start + c * BLOCK_N + cols
            mask = tile_mask(mask_m, cols_c, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N)
            store_columns(s_rows, cols_c, stride_sn, x[c], mask, STORE_CACHE, SHIFT)

    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    moment = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    mean = tl.full([BLOCK_M, 1], 0.0, tl.float32)
    if HEAD:
        # What is read again should outlive in L2 what is not.
        KEEP: tl.constexpr = "evict_last" if EVICT != "" else ""
        head_mean, moment = head_moments(
            x_rows, r_rows, stride_xn, stride_rn, head_blocks, CENTER, BLOCK_N, STAGES, KEEP
        )
        total = head_mean * head_blocks
    if CENTER:
        for c in tl.static_range(CHUNKS):
            total += x[c].to(tl.float32)
        mean = tl.sum(total, axis=1, keep_dims=True) / N
        if HEAD:
            moment += head_blocks * (head_mean - mean) * (head_mean - mean)
    for c in tl.static_range(CHUNKS):
        centred = read_again(x[c], mean, PACKED and CENTER) - mean
        if CENTER and not EVEN:
            centred = tl.where(inside_row(start + c * BLOCK_N + cols, shift, N), centred, 0.0)
        moment += centred * centred
    rstd = tl.rsqrt(tl.sum(moment, axis=1, keep_dims=True) / N + eps)

    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=mask_m)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=mask_m)
    if not (PRELOAD or SHIFT):
        w, b, g = load_affines(
            w_rows, b_rows, g_rows, stride_wn, stride_bn, stride_gn,
            start, mask_w, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N, CHUNKS,
        )  # fmt: skip
    for c in tl.static_range(CHUNKS):
        if SHIFT:  # an [N] weight is read by elements: 8 registers a vector, so for one chunk only
            w, b, g = load_affines(
                w_rows, b_rows, g_rows, stride_wn, stride_bn, stride_gn,
                c * BLOCK_N, mask_w, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N, 1,
            )  # fmt: skip
        wc = w[0 if SHIFT else c] if w_ptr is not None else None
        bc = b[0 if SHIFT else c] if b_ptr is not None else None
        gc = g[0 if SHIFT else c] if g_ptr is not None else None
        cols_c = start + c * BLOCK_N + cols
        mask = tile_mask(mask_m, cols_c, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N)
        y = modulate(read_again(x[c], rstd, PACKED), mean, rstd, wc, bc, gc, offset)
        store_columns(y_rows, cols_c, stride_yn, y, mask, STORE_CACHE, SHIFT)
    if HEAD:
        write_head(
            x_rows, r_rows, w_rows, b_rows, g_rows, y_rows, s_rows,
            stride_xn, stride_rn, stride_wn, stride_bn, stride_gn, stride_yn, stride_sn,
            head_blocks, mean, rstd, offset, BLOCK_N, STAGES, EVICT, STORE_CACHE, FORWARD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "n_units"])
def row_norm_kernel(
    x_ptr, r_ptr, w_ptr, b_ptr, g_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr,  # None where absent
    inner_sizes, x_strides, r_strides, w_strides, b_strides, g_strides,  # strides in ALIGN units
    stride_xn, stride_rn, stride_wn, stride_bn, stride_gn, M, n_units, eps, offset,
    CENTER: tl.constexpr, HEAD: tl.constexpr, EVEN: tl.constexpr, PERSISTENT: tl.constexpr,
    PRELOAD: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
    COLUMNS: tl.constexpr, FORWARD: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(M, BLOCK_M) programs, or fewer if PERSISTENT. N = n_units * ALIGN.

    EVEN: the blocks cover N exactly. PRELOAD: the affine is loaded before the reduction instead of
    after it (an [N] one before x), so that their latencies overlap; an [N] one not with HEAD.
    y_ptr, s_ptr None: in place. SHIFT: elements of a vector of 16 bytes, where rows follow each
    other without a gap but do not start at vectors: a tile starts with the vector in which its row
    does, `shift` elements before the row. 0: columns start at the row. COLUMNS: N if it is compiled
    in, else 0. FORWARD: see `write_head`.
    """
    N = n_units * ALIGN
    if EVEN and not HEAD:
        N = CHUNKS * BLOCK_N
    if COLUMNS:
        N = COLUMNS
    w = ()
    b = ()
    if PRELOAD and w_strides is None:
        w, b, _ = load_affines(
            w_ptr, b_ptr, None, stride_wn, stride_bn, None,
            0, None, N, None, EVEN, 0, BLOCK_M, BLOCK_N, CHUNKS,
        )  # fmt: skip
    first = tl.program_id(0)
    if PERSISTENT:
        for tile in tl.range(first, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
            normalize_tile(
                tile, x_ptr, r_ptr, w_ptr, b_ptr, g_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, w, b,
                inner_sizes, x_strides, r_strides, w_strides, b_strides, g_strides,
                stride_xn, stride_rn, stride_wn, stride_bn, stride_gn, M, N, eps, offset,
                CENTER, HEAD, EVEN, PRELOAD, PACKED, ALIGN, SHIFT,
                BLOCK_M, BLOCK_N, CHUNKS, STAGES, EVICT, STORE_CACHE, COLUMNS, FORWARD,
            )  # fmt: skip
    else:
        normalize_tile(
            first, x_ptr, r_ptr, w_ptr, b_ptr, g_ptr, y_ptr, s_ptr, mean_ptr, rstd_ptr, w, b,
            inner_sizes, x_strides, r_strides, w_strides, b_strides, g_strides,
            stride_xn, stride_rn, stride_wn, stride_bn, stride_gn, M, N, eps, offset,
            CENTER, HEAD, EVEN, PRELOAD, PACKED, ALIGN, SHIFT,
            BLOCK_M, BLOCK_N, CHUNKS, STAGES, EVICT, STORE_CACHE, COLUMNS, FORWARD,
        )  # fmt: skip


OPERANDS = (("input",), ("residual",), ("weight", "scale"), ("bias", "shift"), ("gate",))
RESULTS = ("out", "residual_out", "mean", "rstd")


def prepare(call: Any) -> Callable[..., Any]:
    """Plan a row norm call once; the result allocates and launches."""
    clustered = row_cluster.prepare(call)
    if clustered is not None:
        return clustered
    plan = plan_for(call)
    spec, device = call.spec, call.device
    names = spec.tensor_names
    written = [o.name for o, present in zip(spec.outputs, call.present, strict=True) if present]
    # Positions among the tensors, the outputs and a None, which stands for those that are absent.
    everything = [*names, *written]
    groups = (*OPERANDS, *[(n,) for n in RESULTS])
    arrange = itemgetter(
        *[next((everything.index(n) for n in group if n in everything), -1) for group in groups]
    )
    grid = (plan.grid(multiprocessors(device)), 1, 1)
    fixed = (*plan.arguments(call.params), *plan.constexprs(call).values())
    run = launcher(row_norm_kernel, grid, plan.options, fixed)
    allocate = allocator(device, call.outputs)

    def launch(*tensors: torch.Tensor | None) -> Any:
        outputs = allocate()
        run(*arrange((*tensors, *outputs, None)))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch
