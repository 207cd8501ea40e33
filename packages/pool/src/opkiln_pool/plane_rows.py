"""Pooling whole planes to one value each: global pools, and windows as large as the input.

out[p] = reduce over the N elements of plane p, which lie together in memory. A program reduces
BLOCK_M planes, each as a row of BLOCK_N >= N elements; neighbouring planes are one stretch of
memory, so that loads coalesce whatever N is.
"""

import triton
import triton.language as tl

from opkiln_pool.reducers import from_keys, from_order, identity, to_keys, to_order


@triton.jit(do_not_specialize=["planes"])
def plane_kernel(
    x_ptr, out_ptr, index_ptr, offset_ptr,  # the last two None where absent
    channels, stride_n, stride_c, planes, scale,  # strides in units of ALIGN
    N: tl.constexpr, ALIGN: tl.constexpr, REDUCE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(planes, BLOCK_M) programs."""
    plane = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = plane < planes
    n = plane
    if WIDE:
        n = n.to(tl.int64)
    base = n * stride_n
    if channels is not None:
        base = n // channels * stride_n + n % channels * stride_c
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    mask = mask_m[:, None] & (offs_n < N)
    ptrs = x_ptr + base[:, None] * ALIGN + offs_n
    x = tl.load(ptrs, mask=mask, other=identity(REDUCE), eviction_policy=EVICT)
    if REDUCE == "avg":
        best = tl.sum(x.to(tl.float32), 1) * scale
    elif REDUCE == "max":
        best = from_order(tl.max(to_order(x)[0], 1), x.dtype)
    else:
        best, at = from_keys(tl.max(to_keys(x, offs_n, mask), 1), x.dtype)
        if index_ptr is not None:
            tl.store(index_ptr + plane, at.to(tl.int64), mask=mask_m)
        if offset_ptr is not None:
            tl.store(offset_ptr + plane, at.to(offset_ptr.dtype.element_ty), mask=mask_m)
    tl.store(out_ptr + plane, best.to(out_ptr.dtype.element_ty), mask=mask_m)
