"""Adaptive pooling of a plane strip by strip, for planes with dense rows.

out[p, i, j] = reduce over x[p, floor(i * H / OH) : ceil((i + 1) * H / OH), and so along w].

A program computes BLOCK_H rows of outputs of one plane: it loads the EXTENT_H (or fewer) input rows
under each as whole rows, reduces them to one row of W columns, then the columns of each window.
"""

import triton
import triton.language as tl

from opkiln_pool.reducers import from_keys, from_order, identity, to_keys, to_order


@triton.jit
def strip_kernel(
    x_ptr, out_ptr, index_ptr, offset_ptr,  # the last two None where absent
    channels, stride_n, stride_c, stride_h,  # in units of ALIGN
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    EXTENT_W: tl.constexpr, ALIGN: tl.constexpr, REDUCE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_OW: tl.constexpr,
):  # fmt: skip
    """Grid: planes * cdiv(OH, BLOCK_H) programs. BLOCK_R: at least the rows of a window."""
    strips: tl.constexpr = (OH + BLOCK_H - 1) // BLOCK_H
    plane = tl.program_id(0) // strips
    oh = tl.program_id(0) % strips * BLOCK_H + tl.arange(0, BLOCK_H)
    n = plane
    if WIDE:
        n = n.to(tl.int64)
    base = n * stride_n
    if channels is not None:
        base = n // channels * stride_n + n % channels * stride_c
    h_start = oh * H // OH
    h_end = ((oh + 1) * H + OH - 1) // OH
    h = h_start[:, None] + tl.arange(0, BLOCK_R)[None, :]
    w = tl.arange(0, BLOCK_W)
    mask_h = (h < h_end[:, None]) & (oh < OH)[:, None]
    mask = mask_h[:, :, None] & (w < W)[None, None, :]
    ptrs = x_ptr + (base + h * stride_h)[:, :, None] * ALIGN + w[None, None, :]
    x = tl.load(ptrs, mask=mask, other=identity(REDUCE))

    ow = tl.arange(0, BLOCK_OW)
    w_start = ow * W // OW
    w_end = ((ow + 1) * W + OW - 1) // OW
    inside = (w[None, :] >= w_start[:, None]) & (w[None, :] < w_end[:, None])
    places = n * (OH * OW) + (oh[:, None] * OW + ow[None, :])
    mask_o = (oh < OH)[:, None] & (ow < OW)[None, :]
    if REDUCE == "avg":
        column = tl.sum(x.to(tl.float32), 1)
        area = (h_end - h_start)[:, None] * (w_end - w_start)[None, :]
        best = tl.sum(tl.where(inside[None, :, :], column[:, None, :], 0.0), 2) / area.to(
            tl.float32
        )
    elif REDUCE == "max":
        column = tl.max(to_order(x)[0], 1)
        best = tl.max(tl.where(inside[None, :, :], column[:, None, :], -(2**31)), 2)
        best = from_order(best, x.dtype)
    else:
        keys = to_keys(x, h[:, :, None] * W + w[None, None, :], mask)
        least: tl.constexpr = -(2**31) if x.dtype.primitive_bitwidth == 16 else -(2**63)
        keys = tl.where(inside[None, :, :], tl.max(keys, 1)[:, None, :], least)
        best, at = from_keys(tl.max(keys, 2), x.dtype)
        if index_ptr is not None:
            tl.store(index_ptr + places, at.to(tl.int64), mask=mask_o)
        if offset_ptr is not None:
            offset = (at // W - h_start[:, None]) * EXTENT_W + at % W - w_start[None, :]
            tl.store(offset_ptr + places, offset.to(offset_ptr.dtype.element_ty), mask=mask_o)
    tl.store(out_ptr + places, best.to(out_ptr.dtype.element_ty), mask=mask_o)
