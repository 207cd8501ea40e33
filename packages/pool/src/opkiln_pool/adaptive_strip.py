"""Adaptive pooling of a plane strip by strip, for planes with dense rows.

out[p, i, j] = reduce over x[p, floor(i * H / OH) : ceil((i + 1) * H / OH), and so along w].

A program computes one row of outputs of one plane: it loads the input rows under it as whole rows,
reduces them to one row of W columns, then the columns of each window. Several rows of outputs a
program are no option: as a third dim of the tiles they gave wrong rows on an H200 (Triton 3.6).
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


@triton.jit
def strip_kernel(
    x_ptr, out_ptr, index_ptr, offset_ptr,  # the last two None where absent
    channels, stride_n, stride_c, stride_h,  # in units of ALIGN
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    EXTENT_H: tl.constexpr, EXTENT_W: tl.constexpr, ALIGN: tl.constexpr, REDUCE: tl.constexpr,
    F32: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_OW: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid: planes * OH programs. BLOCK_R: rows at a time. PAIRS: None, or 16-bit values, and
    whether by ASM.
    """
    plane = tl.program_id(0) // OH
    oh = tl.program_id(0) % OH
    n = plane
    if WIDE:
        n = n.to(tl.int64)
    base = n * stride_n
    if channels is not None:
        base = n // channels * stride_n + n % channels * stride_c
    h_start = oh * H // OH
    h_end = ((oh + 1) * H + OH - 1) // OH
    rows = tl.arange(0, BLOCK_R)[:, None]
    w = tl.arange(0, BLOCK_W)
    ptrs = x_ptr + (base + (h_start + rows) * stride_h) * ALIGN + w[None, :]
    total = None
    positions = None
    for start in tl.static_range(0, EXTENT_H, BLOCK_R):
        h = h_start + start + rows
        mask = (h < h_end) & (w < W)[None, :]
        x = tl.load(ptrs + start * stride_h * ALIGN, mask=mask, other=identity(REDUCE))
        position = h * W + w[None, :]
        total, positions = accumulate(total, positions, x, position, mask, REDUCE, F32, PAIRS)

    # program_id(1) is 0, which LLVM does not know: given ow's range it divides in packed 16 bits,
    # and ptxas 12.8 drops the constant of add.s16x2 (wrong windows on an H200).
    ow = tl.arange(0, BLOCK_OW) + tl.program_id(1)
    w_start = ow * W // OW
    w_end = ((ow + 1) * W + OW - 1) // OW
    inside = (w[None, :] >= w_start[:, None]) & (w[None, :] < w_end[:, None])
    places = n * (OH * OW) + oh * OW + ow
    mask_o = ow < OW
    if REDUCE == "avg":
        column = tl.sum(total, 0)
        area = (h_end - h_start) * (w_end - w_start)
        best = tl.sum(tl.where(inside, column[None, :], 0.0), 1) / area.to(tl.float32)
    elif REDUCE == "max":
        column = tl.max(to_order(total)[0], 0)
        best = from_order(tl.max(tl.where(inside, column[None, :], -(2**31)), 1), total.dtype)
    else:
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        least: tl.constexpr = -(2**31) if DTYPE.primitive_bitwidth == 16 else -(2**63)
        if PAIRS is not None:
            total = to_pair_keys(total, positions, PAIRS)
            total = tl.where(rows < h_end - h_start, total, least)
        keys = tl.where(inside, tl.max(total, 0)[None, :], least)
        if PAIRS is None:
            best, at = from_keys(tl.max(keys, 1), DTYPE)
        else:
            best, at = from_pair_keys(tl.max(keys, 1), DTYPE)
        if index_ptr is not None:
            tl.store(index_ptr + places, at.to(tl.int64), mask=mask_o)
        if offset_ptr is not None:
            offset = (at // W - h_start) * EXTENT_W + at % W - w_start
            tl.store(offset_ptr + places, offset.to(offset_ptr.dtype.element_ty), mask=mask_o)
    tl.store(out_ptr + places, best.to(out_ptr.dtype.element_ty), mask=mask_o)
