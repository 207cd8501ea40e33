"""Row norms: LayerNorm and RMSNorm over rows of N elements.

layer_norm: y[m, n] = (x[m, n] - mean[m]) * rstd[m] * w[n] + b[n]   rstd = 1/sqrt(var_n(x) + eps)
rms_norm:   y[m, n] = x[m, n] * rstd[m] * w[n]                      rstd = 1/sqrt(mean_n(x^2) + eps)

x [M, N] f16, bf16 or f32 with any strides; y [M, N] contiguous, x's dtype; w, b [N] of any of these
dtypes, or absent; mean, rstd [M] f32, or absent. Statistics and affine are f32.

A program keeps the last CHUNKS blocks of BLOCK_N columns of BLOCK_M rows in registers, so that x is
read once. Longer rows have a head before these blocks (HEAD), which is read twice.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from opkiln_norm.row_plan import multiprocessors, plan_for


@triton.jit
def row_offsets(rows, inner_sizes, strides):
    """Offset of each row over the leading dims, outermost first, whose size is not needed."""
    offsets = rows.to(tl.int64) * 0
    for d in tl.static_range(len(inner_sizes), 0, -1):
        offsets += (rows % inner_sizes[d - 1]).to(tl.int64) * strides[d]
        rows = rows // inner_sizes[d - 1]
    return offsets + rows.to(tl.int64) * strides[0]


@triton.jit
def tile_mask(mask_m, cols, N, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mask [BLOCK_M, BLOCK_N] of the elements that exist; None where all of them do."""
    if not EVEN:
        mask = mask_m & (cols < N)
    elif BLOCK_M > 1:
        mask = tl.broadcast_to(mask_m, [BLOCK_M, BLOCK_N])
    else:
        mask = None
    return mask


@triton.jit
def load_columns(ptrs, cols, stride_n, mask, EVICT: tl.constexpr):
    """A tile in its own dtype, 0 outside the mask. `stride_n` None: dense, for 16-byte loads."""
    if stride_n is not None:
        cols = cols.to(tl.int64) * stride_n
    if mask is None:
        tile = tl.load(ptrs + cols, eviction_policy=EVICT)
    else:
        tile = tl.load(ptrs + cols, mask=mask, other=0.0, eviction_policy=EVICT)
    return tile


@triton.jit
def load_affine(ptr, stride_n, start, N, EVEN: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """CHUNKS tiles [BLOCK_M, BLOCK_N] of a weight or bias; () where it is absent.

    Every row loads its own copy (from L1): in x's layout, without a pass through shared memory.
    """
    tiles = ()
    if ptr is not None:
        for c in tl.static_range(CHUNKS):
            cols = start + c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            cols = tl.broadcast_to(cols, [BLOCK_M, BLOCK_N])
            mask = None if EVEN else cols < N
            tiles = tiles + (load_columns(ptr, cols, stride_n, mask, ""),)
    return tiles


@triton.jit
def read_again(x, statistic, PACKED: tl.constexpr):
    """x in f32. PACKED hides from the compiler that it has converted these 16-bit values before, so
    that it keeps no f32 copy across the reduction (LayerNorm 16384, 8 warps: 82 registers, not
    127). A bit is flipped only in a row whose statistic, hence result, is NaN.
    """
    if PACKED:
        flip = tl.where(statistic == statistic, 0, 1).to(tl.int16)
        x = (x.to(tl.int16, bitcast=True) ^ flip).to(x.dtype, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def head_moments(x_row, stride_xn, blocks, CENTER: tl.constexpr, BLOCK_N: tl.constexpr,
                 STAGES: tl.constexpr, EVICT: tl.constexpr):  # fmt: skip
    """Over the row's first `blocks`, for each column of a block: Welford mean and centred second
    moment. Without CENTER the mean stays 0 and the moment is the plain sum of squares.
    """
    mean = tl.full([1, BLOCK_N], 0.0, tl.float32)
    moment = tl.full([1, BLOCK_N], 0.0, tl.float32)
    for i in tl.range(0, blocks, num_stages=STAGES):
        cols = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        x = load_columns(x_row, cols, stride_xn, None, EVICT).to(tl.float32)
        if CENTER:
            delta = x - mean
            mean += delta * (1.0 / (i + 1))
            moment += delta * (x - mean)
        else:
            moment += x * x
    return mean, moment


@triton.jit
def write_tile(x, mean, rstd, w, b, y_ptrs, mask, STORE_CACHE: tl.constexpr):
    """Centre, scale, apply `w` and `b` (tiles or None) and store one f32 tile."""
    y = (x - mean) * rstd
    if w is not None:
        y = y * w.to(tl.float32)
    if b is not None:
        y = y + b.to(tl.float32)
    tl.store(y_ptrs, y.to(y_ptrs.dtype.element_ty), mask=mask, cache_modifier=STORE_CACHE)


@triton.jit
def write_head(
    x_row, y_row, w_ptr, b_ptr, stride_xn, stride_wn, stride_bn, blocks, mean, rstd,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """The row's first `blocks`, last first: what was read last is the likeliest still in L2."""
    for i in tl.range(0, blocks, num_stages=STAGES):
        cols = (blocks - 1 - i) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        x = load_columns(x_row, cols, stride_xn, None, EVICT).to(tl.float32)
        w = None
        b = None
        if w_ptr is not None:
            w = load_columns(w_ptr, cols, stride_wn, None, "")
        if b_ptr is not None:
            b = load_columns(b_ptr, cols, stride_bn, None, "")
        write_tile(x, mean, rstd, w, b, y_row + cols, None, STORE_CACHE)


@triton.jit
def normalize_tile(
    tile, x_ptr, y_ptr, mean_ptr, rstd_ptr, w_ptr, b_ptr, w, b,
    inner_sizes, x_strides, stride_xn, stride_wn, stride_bn, M, N, eps,
    CENTER: tl.constexpr, HEAD: tl.constexpr, EVEN: tl.constexpr, PRELOAD: tl.constexpr,
    PACKED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Rows tile * BLOCK_M and following. `w`, `b`: the affine tiles if PRELOAD, else ()."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    mask_m = rows < M
    x_rows = x_ptr + row_offsets(rows, inner_sizes, x_strides) * ALIGN
    y_rows = y_ptr + rows.to(tl.int64) * N
    cols = tl.arange(0, BLOCK_N)[None, :]
    start = 0
    if HEAD:
        head_blocks = tl.cdiv(N, BLOCK_N) - CHUNKS
        start = head_blocks * BLOCK_N

    x = ()
    for c in tl.static_range(CHUNKS):
        cols_c = start + c * BLOCK_N + cols
        mask = tile_mask(mask_m, cols_c, N, EVEN, BLOCK_M, BLOCK_N)
        x = x + (load_columns(x_rows, cols_c, stride_xn, mask, EVICT),)

    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    moment = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    mean = tl.full([BLOCK_M, 1], 0.0, tl.float32)
    if HEAD:
        # What is read again should outlive in L2 what is not.
        KEEP: tl.constexpr = "evict_last" if EVICT == "evict_first" else ""
        head_mean, moment = head_moments(
            x_rows, stride_xn, head_blocks, CENTER, BLOCK_N, STAGES, KEEP
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
            centred = tl.where(start + c * BLOCK_N + cols < N, centred, 0.0)
        moment += centred * centred
    rstd = tl.rsqrt(tl.sum(moment, axis=1, keep_dims=True) / N + eps)

    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=mask_m)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, rstd, mask=mask_m)
    if not PRELOAD:
        w = load_affine(w_ptr, stride_wn, start, N, EVEN, BLOCK_M, BLOCK_N, CHUNKS)
        b = load_affine(b_ptr, stride_bn, start, N, EVEN, BLOCK_M, BLOCK_N, CHUNKS)
    for c in tl.static_range(CHUNKS):
        wc = w[c] if w_ptr is not None else None
        bc = b[c] if b_ptr is not None else None
        cols_c = start + c * BLOCK_N + cols
        mask = tile_mask(mask_m, cols_c, N, EVEN, BLOCK_M, BLOCK_N)
        xc = read_again(x[c], rstd, PACKED)
        write_tile(xc, mean, rstd, wc, bc, y_rows + cols_c, mask, STORE_CACHE)
    if HEAD:
        write_head(
            x_rows, y_rows, w_ptr, b_ptr, stride_xn, stride_wn, stride_bn, head_blocks, mean, rstd,
            BLOCK_N, STAGES, EVICT, STORE_CACHE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "n_units"])
def row_norm_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr,  # tensors, None where absent
    inner_sizes, x_strides, stride_xn, stride_wn, stride_bn,  # x_strides in units of ALIGN
    M, n_units, eps,
    CENTER: tl.constexpr, HEAD: tl.constexpr, EVEN: tl.constexpr, PERSISTENT: tl.constexpr,
    PRELOAD: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    STAGES: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(M, BLOCK_M) programs, or fewer if PERSISTENT. N = n_units * ALIGN.

    EVEN: the blocks cover N exactly. PRELOAD: the affine is loaded before x instead of after the
    reduction, so that their latencies overlap; not with HEAD.
    """
    N = n_units * ALIGN
    if EVEN and not HEAD:
        N = CHUNKS * BLOCK_N
    w = ()
    b = ()
    if PRELOAD:
        w = load_affine(w_ptr, stride_wn, 0, N, EVEN, BLOCK_M, BLOCK_N, CHUNKS)
        b = load_affine(b_ptr, stride_bn, 0, N, EVEN, BLOCK_M, BLOCK_N, CHUNKS)
    first = tl.program_id(0)
    if PERSISTENT:
        for tile in tl.range(first, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
            normalize_tile(
                tile, x_ptr, y_ptr, mean_ptr, rstd_ptr, w_ptr, b_ptr, w, b,
                inner_sizes, x_strides, stride_xn, stride_wn, stride_bn, M, N, eps,
                CENTER, HEAD, EVEN, PRELOAD, PACKED, ALIGN,
                BLOCK_M, BLOCK_N, CHUNKS, STAGES, EVICT, STORE_CACHE,
            )  # fmt: skip
    else:
        normalize_tile(
            first, x_ptr, y_ptr, mean_ptr, rstd_ptr, w_ptr, b_ptr, w, b,
            inner_sizes, x_strides, stride_xn, stride_wn, stride_bn, M, N, eps,
            CENTER, HEAD, EVEN, PRELOAD, PACKED, ALIGN,
            BLOCK_M, BLOCK_N, CHUNKS, STAGES, EVICT, STORE_CACHE,
        )  # fmt: skip


def prepare(call: Any) -> Callable[..., Any]:
    """Plan an rms_norm or layer_norm call once; the result allocates and launches."""
    plan = plan_for(call)
    center = call.spec.name == "layer_norm"
    device = call.device
    metas = [(m.shape, m.stride, m.dtype) for m in call.outputs]
    grid = (plan.grid(multiprocessors(device)), 1, 1)
    fixed = (
        plan.inner_sizes, plan.x_strides, plan.stride_xn, plan.stride_wn, plan.stride_bn,
        plan.rows, plan.n // plan.align, call.params.eps, *plan.constexprs(center).values(),
    )  # fmt: skip
    options = {"num_warps": plan.tiling.num_warps}
    compiled: Callable[..., Any] | None = None

    def launch(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None = None) -> Any:
        nonlocal compiled
        outputs = [torch.empty_strided(s, t, dtype=d, device=device) for s, t, d in metas]
        mean = outputs[1] if center and len(outputs) > 1 else None
        rstd = outputs[-1] if len(outputs) > 1 else None
        if compiled is not None:
            compiled(x, w, b, outputs[0], mean, rstd, *fixed)
        else:
            kernel = row_norm_kernel[grid](x, w, b, outputs[0], mean, rstd, *fixed, **options)
            # What Triton looks at to choose a binary (dtypes, alignment, sizes) is fixed by the
            # plan, so later launches go straight to this one. The interpreter has none.
            compiled = kernel[grid] if kernel is not None else None
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch
