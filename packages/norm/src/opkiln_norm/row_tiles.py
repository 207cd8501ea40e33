"""Tiles of a row norm: addresses, loads and stores, the pass over a long row's head.

A tile is [BLOCK_M, BLOCK_N]. An operand has a pointer (None: absent), strides over the leading dims
(None: one row serves all), and a column stride (None: dense, for 16-byte accesses).
"""

import triton
import triton.language as tl


@triton.jit
def row_offsets(rows, inner_sizes, strides):
    """Offset of each row over the leading dims, outermost first, whose size is not needed.

    strides: 2 s + 3, from which Triton concludes nothing (RowPlan.arguments).
    """
    offsets = rows.to(tl.int64) * 0
    for d in tl.static_range(len(inner_sizes), 0, -1):
        offsets += (rows % inner_sizes[d - 1]).to(tl.int64) * ((strides[d] >> 1) - 1)
        rows = rows // inner_sizes[d - 1]
    return offsets + rows.to(tl.int64) * ((strides[0] >> 1) - 1)


@triton.jit
def row_pointers(ptr, rows, inner_sizes, strides, stride_n, vector_start, ALIGN: tl.constexpr):
    """Where an operand's rows start, or the vectors in which they do if `vector_start` is given.

    Strides of dense operands are in units of ALIGN.
    """
    if ptr is None:
        ptrs = None
    elif strides is None:
        ptrs = ptr
    elif vector_start is not None:
        ptrs = ptr + vector_start
    elif stride_n is None:
        ptrs = ptr + row_offsets(rows, inner_sizes, strides) * ALIGN
    else:
        ptrs = ptr + row_offsets(rows, inner_sizes, strides)
    return ptrs


@triton.jit
def output_rows(ptr, rows, N, input_rows, vector_start):
    """Where an output's rows start: over those of an input where `ptr` is None."""
    ptrs = input_rows
    if ptr is not None and vector_start is not None:
        ptrs = ptr + vector_start
    elif ptr is not None:
        ptrs = ptr + rows.to(tl.int64) * N
    return ptrs


@triton.jit
def inside_row(cols, shift, N):
    """Which columns of a tile are elements of the row; shift: see SHIFT of `row_norm_kernel`."""
    inside = cols < N
    if shift is not None:
        inside = (cols >= shift) & (cols < N + shift)
    return inside


@triton.jit
def tile_mask(
    mask_m, cols, N, shift,
    EVEN: tl.constexpr, SHIFT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Mask [BLOCK_M, BLOCK_N] of the elements that exist; None where all of them do.

    With SHIFT two masks: of the vectors that lie in the row, and of the elements in others.
    """
    if SHIFT:
        vector = cols // SHIFT
        whole = (vector * SHIFT >= shift) & (vector < (N + shift) // SHIFT)
        mask = (mask_m & whole, mask_m & inside_row(cols, shift, N) & (whole == 0))
    elif not EVEN:
        mask = mask_m & (cols < N)
    elif BLOCK_M > 1:
        mask = tl.broadcast_to(mask_m, [BLOCK_M, BLOCK_N])
    else:
        mask = None
    return mask


@triton.jit
def column_offsets(cols, stride_n):
    if stride_n is not None:
        cols = cols.to(tl.int64) * stride_n
    return cols


@triton.jit
def load_columns(ptrs, cols, stride_n, mask, EVICT: tl.constexpr, SHIFT: tl.constexpr = 0):
    """A tile in its own dtype, 0 outside the mask. With SHIFT the edges are loads of their own."""
    cols = column_offsets(cols, stride_n)
    if SHIFT:
        edges = tl.load(ptrs + cols, mask=mask[1], other=0.0, eviction_policy=EVICT)
        tile = tl.load(ptrs + cols, mask=mask[0], other=0.0, eviction_policy=EVICT)
        tile = tl.where(mask[1], edges, tile)
    elif mask is None:
        tile = tl.load(ptrs + cols, eviction_policy=EVICT)
    else:
        tile = tl.load(ptrs + cols, mask=mask, other=0.0, eviction_policy=EVICT)
    return tile


@triton.jit
def load_sum(
    x_rows, r_rows, cols, stride_xn, stride_rn, mask, EVICT: tl.constexpr, SHIFT: tl.constexpr = 0
):
    """What is normalized: x in its own dtype, or x + r in f32."""
    x = load_columns(x_rows, cols, stride_xn, mask, EVICT, SHIFT)
    if r_rows is not None:
        r = load_columns(r_rows, cols, stride_rn, mask, EVICT, SHIFT)
        x = x.to(tl.float32) + r.to(tl.float32)
    return x


@triton.jit
def load_affine(
    ptrs, stride_n, start, mask_m, N, shift, EVEN: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """CHUNKS tiles of a weight, bias or gate; () where it is absent. mask_m None: one row for all.

    Every row loads its own copy (from L1): in x's layout, without a pass through shared memory.
    """
    tiles = ()
    if ptrs is not None:
        for c in tl.static_range(CHUNKS):
            cols = start + c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            cols = tl.broadcast_to(cols, [BLOCK_M, BLOCK_N])
            if mask_m is not None:
                mask = tile_mask(mask_m, cols, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N)
                tile = load_columns(ptrs, cols, stride_n, mask, "", SHIFT)
            else:
                mask = None
                if not EVEN:
                    mask = inside_row(cols, shift, N)
                if SHIFT:
                    cols -= shift
                tile = load_columns(ptrs, cols, stride_n, mask, "")
            tiles = tiles + (tile,)
    return tiles


@triton.jit
def load_affines(
    w_rows, b_rows, g_rows, stride_wn, stride_bn, stride_gn,
    start, mask_m, N, shift, EVEN: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`load_affine` of weight, bias and gate."""
    w = load_affine(
        w_rows, stride_wn, start, mask_m, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N, CHUNKS
    )
    b = load_affine(
        b_rows, stride_bn, start, mask_m, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N, CHUNKS
    )
    g = load_affine(
        g_rows, stride_gn, start, mask_m, N, shift, EVEN, SHIFT, BLOCK_M, BLOCK_N, CHUNKS
    )
    return w, b, g


@triton.jit
def load_whole(ptrs, cols, stride_n, KEEP: tl.constexpr):
    """One full block of a weight, bias or gate; None where it is absent."""
    tile = None
    if ptrs is not None:
        tile = load_columns(ptrs, cols, stride_n, None, KEEP)
    return tile


@triton.jit
def store_columns(ptrs, cols, stride_n, tile, mask, CACHE: tl.constexpr, SHIFT: tl.constexpr = 0):
    ptrs = ptrs + column_offsets(cols, stride_n)
    tile = tile.to(ptrs.dtype.element_ty)
    if SHIFT:
        tl.store(ptrs, tile, mask=mask[0], cache_modifier=CACHE)
        tl.store(ptrs, tile, mask=mask[1], cache_modifier=CACHE)
    else:
        tl.store(ptrs, tile, mask=mask, cache_modifier=CACHE)


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
def modulate(x, mean, rstd, w, b, g, offset):
    """((x - mean) * rstd * (w + offset) + b) * g for one f32 tile; w, b, g, offset may be None."""
    y = (x - mean) * rstd
    if w is not None:
        w = w.to(tl.float32)
        if offset is not None:
            w += offset
        y = y * w
    if b is not None:
        y = y + b.to(tl.float32)
    if g is not None:
        y = y * g.to(tl.float32)
    return y


@triton.jit
def head_moments(
    x_row, r_row, stride_xn, stride_rn, blocks,
    CENTER: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Over the row's first `blocks`, for each column of a block: Welford mean and centred second
    moment. Without CENTER the mean stays 0 and the moment is the plain sum of squares.
    """
    mean = tl.full([1, BLOCK_N], 0.0, tl.float32)
    moment = tl.full([1, BLOCK_N], 0.0, tl.float32)
    for i in tl.range(0, blocks, num_stages=STAGES):
        cols = i * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        x = load_sum(x_row, r_row, cols, stride_xn, stride_rn, None, EVICT).to(tl.float32)
        if CENTER:
            delta = x - mean
            mean += delta * (1.0 / (i + 1))
            moment += delta * (x - mean)
        else:
            moment += x * x
    return mean, moment


@triton.jit
def write_head(
    x_row, r_row, w_row, b_row, g_row, y_row, s_row,
    stride_xn, stride_rn, stride_wn, stride_bn, stride_gn, stride_yn, stride_sn,
    blocks, mean, rstd, offset,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
    FORWARD: tl.constexpr,
):  # fmt: skip
    """The row's first `blocks`, last first: what was read last is the likeliest still in L2. Or if
    FORWARD first first.

    The sum is stored here and not in the first pass: in place it lies where r is read again.
    """
    KEEP: tl.constexpr = "evict_last" if FORWARD and EVICT != "" else ""  # all rows meet them
    for i in tl.range(0, blocks, num_stages=STAGES):
        j = blocks - 1 - i
        if FORWARD:
            j = i
        cols = j * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        x = load_sum(x_row, r_row, cols, stride_xn, stride_rn, None, EVICT).to(tl.float32)
        w = load_whole(w_row, cols, stride_wn, KEEP)
        b = load_whole(b_row, cols, stride_bn, KEEP)
        g = load_whole(g_row, cols, stride_gn, "")
        if s_row is not None:
            store_columns(s_row, cols, stride_sn, x, None, STORE_CACHE)
        y = modulate(x, mean, rstd, w, b, g, offset)
        store_columns(y_row, cols, stride_yn, y, None, STORE_CACHE)
