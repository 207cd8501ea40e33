"""Gradient of adaptive pooling band by band, for contiguous outputs.

grad[p, h, w] = sum of g[p, oh, ow] over the windows that hold (h, w): for maxima those whose saved
offset is its tap, for averages each divided by its area.

Band b holds the rows whose first window along h is b. A program writes one band of one plane: it
loads the few rows of windows that reach into it once, spread over the columns, and goes through the
band's rows, BLOCK_R at a time.
"""

import triton
import triton.language as tl

from opkiln_pool.reducers import to_sums


@triton.jit
def window_of(o, size: tl.constexpr, out: tl.constexpr):
    """First element and end of window o along one dim."""
    return o * size // out, ((o + 1) * size + out - 1) // out


@triton.jit
def add_row(totals, g_ptrs, offset_ptrs, g_step, offset_step, w, h, oh, H: tl.constexpr,
            W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, EXTENT_W: tl.constexpr,
            HOLDERS_W: tl.constexpr):  # fmt: skip
    """The sums of a band's rows continued over row oh of windows.

    totals: one for each of the tuple h of rows [BLOCK_R, 1]. g_ptrs, offset_ptrs: where the row of
    windows starts; offset_ptrs None for averages. w [1, BLOCK_W].
    """
    start_h, end_h = window_of(oh, H, OH)
    for j in tl.static_range(HOLDERS_W):
        ow = w * OW // W + j
        start_w, end_w = window_of(ow, W, OW)
        holds = (oh < OH) & (ow < OW) & (w >= start_w) & (w < end_w) & (w < W)
        g = tl.load(g_ptrs + ow * g_step, mask=holds, other=0.0).to(tl.float32)
        new_totals = ()
        if offset_ptrs is not None:
            offset = tl.load(offset_ptrs + ow * offset_step, mask=holds, other=0).to(tl.int32)
            row_of_tap = offset - (w - start_w)  # times EXTENT_W, if w is the tap's column
            for k in tl.static_range(len(totals)):
                won = row_of_tap == (h[k] - start_h) * EXTENT_W
                new_totals = new_totals + (totals[k] + tl.where(won, g, 0.0),)
        else:
            area = (end_h - start_h) * (end_w - start_w)
            share = g / tl.where(holds, area, 1).to(tl.float32)
            for k in tl.static_range(len(totals)):
                inside = (h[k] >= start_h) & (h[k] < end_h)
                new_totals = new_totals + (totals[k] + tl.where(inside, share, 0.0),)
        totals = new_totals
    return totals


@triton.jit
def bands_kernel(
    g_ptr, offset_ptr, out_ptr,  # offset_ptr None for averages
    channels, g_strides, offset_strides,  # over (n, c, h, w); channels None: c is 0
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    EXTENT_W: tl.constexpr, HOLDERS_H: tl.constexpr, HOLDERS_W: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, WIDE: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: planes * OH programs. HOLDERS: the most windows that hold an element. STEPS * BLOCK_R
    rows cover every band. EXTENT_W: columns of the widest window. WIDE: 64-bit offsets.
    """
    plane = tl.program_id(0) // OH
    band = tl.program_id(0) % OH
    if WIDE:
        plane = plane.to(tl.int64)
    n = plane
    c = plane * 0
    if channels is not None:
        c = n % channels
        n = n // channels
    first = (band * H + OH - 1) // OH
    end = ((band + 1) * H + OH - 1) // OH
    cols = tl.arange(0, BLOCK_W)[None, :]
    w = cols + tl.program_id(1)  # which is 0, and LLVM does not know it: see adaptive_strip
    h = ()
    totals = ()
    for k in tl.static_range(STEPS):
        h = h + (first + k * BLOCK_R + tl.arange(0, BLOCK_R)[:, None],)
        totals = totals + (to_sums(tl.full([BLOCK_R, BLOCK_W], 0.0, tl.float32), out_ptr),)
    g_ptrs = g_ptr + (n * g_strides[0] + c * g_strides[1] + band * g_strides[2])
    offset_ptrs = None
    if offset_ptr is not None:
        at = n * offset_strides[0] + c * offset_strides[1] + band * offset_strides[2]
        offset_ptrs = offset_ptr + at
    for i in tl.static_range(HOLDERS_H):
        row_of_offsets = None
        if offset_ptr is not None:
            row_of_offsets = offset_ptrs + i * offset_strides[2]
        totals = add_row(totals, g_ptrs + i * g_strides[2], row_of_offsets, g_strides[3],
                         offset_strides[3], w, h, band + i, H, W, OH, OW, EXTENT_W,
                         HOLDERS_W)  # fmt: skip
    for k in tl.static_range(STEPS):
        places = (plane * H + h[k]) * W + cols
        x = totals[k].to(out_ptr.dtype.element_ty)
        mask = (h[k] < end) & (cols < W)
        tl.store(out_ptr + places, x, mask=mask, cache_modifier=CACHE)
