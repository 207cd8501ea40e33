"""Gradient of pools whose windows are whole planes: every plane has one value to give.

grad[p, i] = g[p] where i is the saved offset of plane p, for maxima; g[p] * scale, for averages. A
program writes BLOCK_M planes, COLUMNS elements of each at a time.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["planes"])
def spread_kernel(
    g_ptr, offset_ptr, out_ptr,  # offset_ptr None for averages
    channels, g_steps, offset_steps, planes, scale,  # steps over (n, c); channels None: c is 0
    N: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(planes, BLOCK_M) programs. N: elements of a plane. WIDE: 64-bit offsets."""
    plane = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = plane < planes
    if WIDE:
        plane = plane.to(tl.int64)
    n = plane
    c = plane * 0
    if channels is not None:
        c = n % channels
        n = n // channels
    g = tl.load(g_ptr + n * g_steps[0] + c * g_steps[1], mask=mask_m, other=0.0).to(tl.float32)
    if offset_ptr is not None:
        at = offset_ptr + n * offset_steps[0] + c * offset_steps[1]
        offset = tl.load(at, mask=mask_m, other=0).to(tl.int32)[:, None]
    else:
        g = g * scale
    value = g.to(out_ptr.dtype.element_ty)[:, None]
    rows = plane[:, None] * N
    for start in tl.static_range(0, N, COLUMNS):
        cols = start + tl.arange(0, COLUMNS)[None, :]
        if offset_ptr is not None:
            x = tl.where(offset == cols, value, 0.0)
        else:
            x = tl.broadcast_to(value, [BLOCK_M, COLUMNS])
        mask = mask_m[:, None] & (cols < N)
        tl.store(out_ptr + rows + cols, x, mask=mask, cache_modifier=CACHE)
