"""Pooling whole planes to one value each: global pools, and windows as large as the input.

out[p] = reduce over the N elements of plane p, which lie together in memory. A program reduces
BLOCK_M planes, COLUMNS elements of each at a time; neighbouring planes are one stretch of memory,
so that loads coalesce whatever N is. With fewer columns, a warp has several planes and a thread
more of its plane: fewer shuffles, and one address for all its loads.
"""

import triton
import triton.language as tl

from opkiln_pool.reducers import (
    accumulate,
    from_keys,
    from_order,
    from_pair_keys,
    identity,
    to_order,
    to_pair_keys,
)


@triton.jit(do_not_specialize=["planes"])
def plane_kernel(
    x_ptr, out_ptr, index_ptr, offset_ptr,  # the last two None where absent
    channels, stride_n, stride_c, planes, scale,  # strides in units of ALIGN
    N: tl.constexpr, ALIGN: tl.constexpr, REDUCE: tl.constexpr, F32: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr, EVICT: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(planes, BLOCK_M) programs. PAIRS: None, or 16-bit values, and whether by ASM."""
    plane = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = plane < planes
    n = plane
    if WIDE:
        n = n.to(tl.int64)
    base = n * stride_n
    if channels is not None:
        base = n // channels * stride_n + n % channels * stride_c
    columns = tl.arange(0, COLUMNS)[None, :]
    ptrs = x_ptr + base[:, None] * ALIGN + columns
    total = None
    places = None
    for start in tl.static_range(0, N, COLUMNS):
        offs_n = tl.broadcast_to(start + columns, [BLOCK_M, COLUMNS])
        mask = mask_m[:, None] & (offs_n < N)
        x = tl.load(ptrs + start, mask=mask, other=identity(REDUCE), eviction_policy=EVICT)
        # Masked elements are -inf, and behind all others.
        total, places = accumulate(total, places, x, offs_n, mask, REDUCE, F32, PAIRS)

    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if REDUCE == "avg":
        best = tl.sum(total, 1) * scale
    elif REDUCE == "max":
        best = from_order(tl.max(to_order(total)[0], 1), total.dtype)
    else:
        if PAIRS is None:
            best, at = from_keys(tl.max(total, 1), DTYPE)
        else:
            best, at = from_pair_keys(tl.max(to_pair_keys(total, places, PAIRS), 1), DTYPE)
        if index_ptr is not None:
            tl.store(index_ptr + plane, at.to(tl.int64), mask=mask_m)
        if offset_ptr is not None:
            tl.store(offset_ptr + plane, at.to(offset_ptr.dtype.element_ty), mask=mask_m)
    tl.store(out_ptr + plane, best.to(out_ptr.dtype.element_ty), mask=mask_m)
