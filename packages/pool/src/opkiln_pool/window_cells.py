"""Gradient of a pool with fixed windows, for outputs with dense rows or dense channels.

grad[p, i] = sum of g[p, o] over the windows o that hold i (o * STRIDE - PADDING + t * DILATION = i
for a tap t): for maxima those whose saved offset is t, for averages each divided by what it counts.

The input is cut into cells of STRIDE elements a dim. Element q * STRIDE + r of cell q is tap t of
window q + delta where t * DILATION = r + PADDING - delta * STRIDE: which taps these are does not
depend on q, so that constants hold them all. A thread computes V neighbouring cells: it loads every
window near them once, and stores whole vectors (3x3, stride 2: 10 loads for 16 elements). Where
channels are innermost, all of that for LANES channels at once, with loads and stores of LANES.
"""

import triton
import triton.language as tl

from opkiln_pool.reducers import counted, explode, implode, to_sums


@triton.jit
def load_column(row_ptrs, step, w0, row_mask, count_w, COLUMN: tl.constexpr, VECTOR: tl.constexpr,
                V: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Column w0 + COLUMN of a row of windows; of w0 all of its vector. step: to the next."""
    columns = ()
    if VECTOR and COLUMN == 0:
        ptrs = row_ptrs[:, None] + tl.arange(0, V)[None, :]
        mask = row_mask & (w0 < count_w)
        columns = explode(tl.load(ptrs, mask=mask[:, None], other=0), BLOCK, V)
    elif not VECTOR or COLUMN < 0 or COLUMN >= V:
        mask = row_mask & (w0 + COLUMN < count_w)
        if COLUMN < 0:
            mask = mask & (w0 + COLUMN >= 0)
        columns = (tl.load(row_ptrs + COLUMN * step, mask=mask, other=0),)
    return columns


@triton.jit
def load_windows(row_ptrs, step, w0, row_mask, count_w, FIRST: tl.constexpr, COLUMNS: tl.constexpr,
                 VECTOR: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Columns w0 + FIRST to w0 + FIRST + COLUMNS - 1 of a row of windows; 0 outside.

    row_ptrs: column w0, [BLOCK], as each column then is, or [BLOCK, LANES]. VECTOR: the V columns
    from w0 on are one vector, whole or outside.
    """
    columns = ()
    for k in tl.static_range(COLUMNS):
        columns = columns + load_column(
            row_ptrs, step, w0, row_mask, count_w, FIRST + k, VECTOR, V, BLOCK
        )
    return columns


@triton.jit
def shares(columns, od, oh, w0, sizes, FIRST: tl.constexpr, KERNEL: tl.constexpr,
           STRIDE: tl.constexpr, PADDING: tl.constexpr, DIVISOR: tl.constexpr):  # fmt: skip
    """Gradients of windows in f32, divided by what each counts; "scale": not divided yet."""
    found = ()
    if DIVISOR != "scale":
        INCLUDE: tl.constexpr = DIVISOR == "padded"
        count = counted(od * STRIDE[0] - PADDING[0], sizes[0], KERNEL[0], PADDING[0], INCLUDE)
        count *= counted(oh * STRIDE[1] - PADDING[1], sizes[1], KERNEL[1], PADDING[1], INCLUDE)
    for k in tl.static_range(len(columns)):
        g = columns[k].to(tl.float32)
        if DIVISOR != "scale":
            start = (w0 + (FIRST + k)) * STRIDE[2] - PADDING[2]
            here = count * counted(start, sizes[2], KERNEL[2], PADDING[2], INCLUDE)
            g = g / tl.where(here == 0, 1, here).to(tl.float32)  # 0 for windows that do not exist
        found = found + (g,)
    return found


@triton.jit
def add_row(total, g, offsets, TD: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
            R: tl.constexpr, CELL: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
            NEAR: tl.constexpr):  # fmt: skip
    """The sum of element R along w of a cell continued over one row of windows.

    TD, TH: its taps along d and h, -1 for none. TW: those of every window and element along w.
    """
    if TD >= 0 and TH >= 0:
        for k in tl.static_range(NEAR):
            if TW[k * STRIDE[2] + R] >= 0:
                x = g[CELL + k]
                if len(offsets) > 0:
                    tap = (TD * KERNEL[1] + TH) * KERNEL[2] + TW[k * STRIDE[2] + R]
                    x = tl.where(offsets[CELL + k] == tap, x, 0.0)
                total += x
    return total


@triton.jit
def add_windows(sums, g, offsets, ND: tl.constexpr, NH: tl.constexpr, TD: tl.constexpr,
                TH: tl.constexpr, TW: tl.constexpr, NEAR: tl.constexpr, KERNEL: tl.constexpr,
                STRIDE: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """The sums of V cells continued over windows ND along d, NH along h of those near a cell.

    offsets: () for averages.
    """
    ROW: tl.constexpr = V * STRIDE[2]
    new_sums = ()
    for e in tl.static_range(STRIDE[0] * STRIDE[1] * ROW):
        total = add_row(
            sums[e], g, offsets, TD[ND * STRIDE[0] + e // (STRIDE[1] * ROW)],
            TH[NH * STRIDE[1] + e // ROW % STRIDE[1]], TW, e % STRIDE[2],
            e % ROW // STRIDE[2], KERNEL, STRIDE, NEAR[2],
        )  # fmt: skip
        new_sums = new_sums + (total,)
    return new_sums


@triton.jit
def store_row(out_ptr, sums, row, chunk, mask, size_w, scale, START: tl.constexpr,
              DIVISOR: tl.constexpr, ROW: tl.constexpr, PIECE: tl.constexpr, EVEN: tl.constexpr,
              BLOCK: tl.constexpr, CACHE: tl.constexpr):  # fmt: skip
    """Store ROW elements of a row from sums[START] on, PIECE at a time; EVEN: these divide rows."""
    lanes = tl.arange(0, PIECE)[None, :]
    for i in tl.static_range(0, ROW, PIECE):
        piece = ()
        for j in tl.static_range(PIECE):
            piece = piece + (sums[START + i + j],)
        x = implode(piece, BLOCK, PIECE)
        if DIVISOR == "scale":
            x = x * scale
        w = chunk * ROW + i
        if EVEN:
            unit = row * (size_w // PIECE) + (chunk * (ROW // PIECE) + i // PIECE)
            places = unit[:, None] * PIECE + lanes
            here = tl.broadcast_to((mask & (w < size_w))[:, None], [BLOCK, PIECE])
        else:
            places = (row * size_w + w)[:, None] + lanes
            here = mask[:, None] & (w[:, None] + lanes < size_w)
        tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), mask=here, cache_modifier=CACHE)


@triton.jit
def store_channels(out_ptr, sums, row, channels, c, chunk, mask, size_w, scale,
                   START: tl.constexpr, DIVISOR: tl.constexpr, ROW: tl.constexpr,
                   LANES: tl.constexpr, CACHE: tl.constexpr):  # fmt: skip
    """Store ROW elements of a row from sums[START] on, LANES channels of each."""
    lanes = tl.arange(0, LANES)[None, :]
    for i in tl.static_range(ROW):
        x = sums[START + i]
        if DIVISOR == "scale":
            x = x * scale
        w = chunk * ROW + i
        places = ((row * size_w + w) * channels + c) * LANES + lanes
        here = tl.broadcast_to(mask & (w < size_w), x.shape)
        tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), mask=here, cache_modifier=CACHE)


@triton.jit
def decode_cells(item, sizes, channels, STRIDE: tl.constexpr, ROW: tl.constexpr,
                 CHANNELS_LAST: tl.constexpr):  # fmt: skip
    """Flat item -> plane of the output, n, c, cell (qd, qh), chunk of its row."""
    c = item * 0
    if CHANNELS_LAST:
        c = item % channels
        item = item // channels
    cells_d = (sizes[0] + STRIDE[0] - 1) // STRIDE[0]
    cells_h = (sizes[1] + STRIDE[1] - 1) // STRIDE[1]
    chunks = (sizes[2] + ROW - 1) // ROW
    chunk = item % chunks
    qh = item // chunks % cells_h
    qd = item // (chunks * cells_h) % cells_d
    plane = item // (chunks * cells_h * cells_d)
    n = plane
    if not CHANNELS_LAST and channels is not None:
        c = plane % channels
        n = plane // channels
    return plane, n, c, qd, qh, chunk


@triton.jit(do_not_specialize=["items"])
def cells_kernel(
    g_ptr, offset_ptr, out_ptr,  # offset_ptr None for averages
    sizes, outs, channels, g_strides, offset_strides, items, scale,
    SHAPE: tl.constexpr, TD: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    FIRST: tl.constexpr, NEAR: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, DIVISOR: tl.constexpr, VECTOR: tl.constexpr, V: tl.constexpr,
    PIECE: tl.constexpr, EVEN: tl.constexpr, CHANNELS_LAST: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(items, BLOCK) programs; an item is V cells along a row, fewer at its end, of LANES
    channels: 1 but for channels_last, where channels and strides are in units of LANES, c's is 1.

    SHAPE: None, or (sizes, outs, g_strides, offset_strides) as constants. Strides over (n, c, d, h,
    w), where VECTOR in units of V but w's, which is 1. channels None: planes are evenly spaced.
    TD, TH, TW: along each dim, for the NEAR windows q + FIRST, q + FIRST + 1, ..., for each element
    of cell q, the tap or -1. WIDE: 64-bit offsets.
    """
    if SHAPE is not None:
        sizes = SHAPE[0]
        outs = SHAPE[1]
        g_strides = SHAPE[2]
        offset_strides = SHAPE[3]
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if CHANNELS_LAST:
        item = item[:, None]
    mask = item < items
    ROW: tl.constexpr = V * STRIDE[2]
    plane, n, c, qd, qh, chunk = decode_cells(item, sizes, channels, STRIDE, ROW, CHANNELS_LAST)
    UNIT: tl.constexpr = V if VECTOR else LANES
    w0 = chunk * V
    along = chunk if VECTOR else w0  # in units
    g_ptrs = g_ptr + (n * g_strides[0] + c * g_strides[1] + along * g_strides[4]) * UNIT
    offset_base = n * offset_strides[0] + c * offset_strides[1] + along * offset_strides[4]
    if CHANNELS_LAST:
        g_ptrs += tl.arange(0, LANES)[None, :]

    NEAR_D: tl.constexpr = NEAR[0]
    NEAR_H: tl.constexpr = NEAR[1]
    COLUMNS: tl.constexpr = V + NEAR[2] - 1
    ROWS: tl.constexpr = STRIDE[0] * STRIDE[1]  # of elements in a cell
    sums = ()
    for _ in tl.static_range(ROWS * ROW):
        zero = tl.full([BLOCK, LANES] if CHANNELS_LAST else [BLOCK], 0.0, tl.float32)
        sums = sums + (to_sums(zero, out_ptr),)
    for i in tl.static_range(NEAR_D):
        for j in tl.static_range(NEAR_H):
            od = qd + (FIRST[0] + i)
            oh = qh + (FIRST[1] + j)
            row_mask = mask & (od >= 0) & (od < outs[0]) & (oh >= 0) & (oh < outs[1])
            at = (od * g_strides[2] + oh * g_strides[3]) * UNIT
            g = load_windows(g_ptrs + at, g_strides[4] * LANES, w0, row_mask, outs[2], FIRST[2],
                             COLUMNS, VECTOR, V, BLOCK)  # fmt: skip
            offsets = ()
            if offset_ptr is not None:
                at = offset_base + od * offset_strides[2] + oh * offset_strides[3]
                ptrs = offset_ptr + at * UNIT
                if CHANNELS_LAST:
                    ptrs += tl.arange(0, LANES)[None, :]
                offsets = load_windows(ptrs, offset_strides[4] * LANES, w0, row_mask, outs[2],
                                       FIRST[2], COLUMNS, VECTOR, V, BLOCK)  # fmt: skip
            g = shares(g, od, oh, w0, sizes, FIRST[2], KERNEL, STRIDE, PADDING, DIVISOR)
            sums = add_windows(sums, g, offsets, i, j, TD, TH, TW, NEAR, KERNEL,
                               STRIDE, V)  # fmt: skip

    for r in tl.static_range(ROWS):
        d = qd * STRIDE[0] + r // STRIDE[1]
        h = qh * STRIDE[1] + r % STRIDE[1]
        row = (plane * sizes[0] + d) * sizes[1] + h
        here = mask & (d < sizes[0]) & (h < sizes[1])
        if CHANNELS_LAST:
            store_channels(out_ptr, sums, row, channels, c, chunk, here, sizes[2], scale, r * ROW,
                           DIVISOR, ROW, LANES, CACHE)  # fmt: skip
        else:
            store_row(out_ptr, sums, row, chunk, here, sizes[2], scale, r * ROW, DIVISOR, ROW,
                      PIECE, EVEN, BLOCK, CACHE)  # fmt: skip
