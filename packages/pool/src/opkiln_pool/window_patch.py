"""Pooling with fixed windows over rows that allow wide loads.

out[p, o] = reduce over taps t of x[p, o * STRIDE - PADDING + t * DILATION], p the plane (n, c).

A thread computes V neighbouring outputs of a row. Of every input row under them it loads VECTORS
aligned vectors of 16 bytes (8 where rows allow no more), and where at most two columns stick out at
an end, these alone. Columns live in registers as a tuple, so that each is loaded once for all V
windows (3x3, stride 2: 1.5 loads an output instead of 9), and rows are reduced before columns are.
"""

import triton
import triton.language as tl

from opkiln_pool.reducers import (
    combine,
    compute,
    explode,
    follow,
    follow_pairs,
    from_pair_keys,
    identity,
    implode,
    to_pair_keys,
)
from opkiln_pool.window_taps import divide, first_taps, store_found

PLACES = tl.constexpr(64)  # more than the columns of a row that a thread holds


@triton.jit
def load_row(row_ptrs, w0, row_mask, size_w, REDUCE: tl.constexpr, F32: tl.constexpr,
             CHECK_W: tl.constexpr, HEAD: tl.constexpr, FIRST: tl.constexpr,
             VECTORS: tl.constexpr, TAIL: tl.constexpr, VEC: tl.constexpr,
             EVICT: tl.constexpr):  # fmt: skip
    """What a row needs for the outputs of a thread: HEAD [BLOCK], VECTORS [BLOCK, VEC], TAIL.

    row_ptrs [BLOCK]: column w0 of the row, w0 a multiple of VEC. The first vector starts at column
    w0 + FIRST * VEC, the head just before it, the tail after the last.
    """
    other = identity(REDUCE)
    pieces = ()
    for i in tl.static_range(HEAD):
        column = FIRST * VEC - HEAD + i
        mask = row_mask & (w0 + column >= 0) if FIRST <= 0 else row_mask
        x = tl.load(row_ptrs + column, mask=mask, other=other, eviction_policy=EVICT)
        pieces = pieces + (compute(x, F32),)
    for i in tl.static_range(VECTORS):
        column = (FIRST + i) * VEC
        mask = row_mask
        if FIRST + i < 0:
            mask = mask & (w0 + column >= 0)
        if CHECK_W:
            mask = mask & (w0 + column < size_w)
        ptrs = (row_ptrs + column)[:, None] + tl.arange(0, VEC)[None, :]
        x = tl.load(ptrs, mask=mask[:, None], other=other, eviction_policy=EVICT)
        pieces = pieces + (compute(x, F32),)
    for i in tl.static_range(TAIL):
        column = (FIRST + VECTORS) * VEC + i
        mask = row_mask & (w0 + column < size_w) if CHECK_W else row_mask
        x = tl.load(row_ptrs + column, mask=mask, other=other, eviction_policy=EVICT)
        pieces = pieces + (compute(x, F32),)
    return pieces


@triton.jit
def columns_of(pieces, BLOCK: tl.constexpr, HEAD: tl.constexpr, VECTORS: tl.constexpr,
               TAIL: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    """The pieces of a row as one tuple of columns [BLOCK]."""
    columns = ()
    for i in tl.static_range(HEAD):
        columns = columns + (pieces[i],)
    for i in tl.static_range(VECTORS):
        columns = columns + explode(pieces[HEAD + i], BLOCK, VEC)
    for i in tl.static_range(TAIL):
        columns = columns + (pieces[HEAD + VECTORS + i],)
    return columns


@triton.jit
def merge(a, b, REDUCE: tl.constexpr, N: tl.constexpr):
    """Two rows of N pieces reduced to one."""
    pieces = ()
    for i in tl.static_range(N):
        pieces = pieces + (combine(a[i], b[i], REDUCE),)
    return pieces


@triton.jit
def reduce_columns(columns, REDUCE: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
                   DILATION: tl.constexpr, SKIP: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """V windows over columns that are reduced along every other dim. SKIP: columns before them."""
    outs = ()
    for v in tl.static_range(V):
        best = columns[SKIP + v * STRIDE]
        for k in tl.static_range(1, K):
            best = combine(best, columns[SKIP + v * STRIDE + k * DILATION], REDUCE)
        outs = outs + (best,)
    return outs


@triton.jit
def follow_row(bests, ats, columns, tap, K: tl.constexpr, STRIDE: tl.constexpr,
               DILATION: tl.constexpr, SKIP: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Argmax of V windows continued over one more row, whose first tap has number `tap`."""
    new_bests = ()
    new_ats = ()
    for v in tl.static_range(V):
        best = bests[v]
        at = ats[v]
        for k in tl.static_range(K):
            best, at = follow(best, at, columns[SKIP + v * STRIDE + k * DILATION], tap + k)
        new_bests = new_bests + (best,)
        new_ats = new_ats + (at,)
    return new_bests, new_ats


@triton.jit
def follow_pieces(bests, places, found, row: tl.constexpr, HEAD: tl.constexpr,
                  VECTORS: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr,
                  VEC: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Argmax of every column continued over row number `row`. places: row * PLACES + column."""
    new_bests = ()
    new_places = ()
    for i in tl.static_range(HEAD + VECTORS + TAIL):
        if i < HEAD:
            place = tl.full([BLOCK], row * PLACES + i, tl.int16)
        elif i < HEAD + VECTORS:
            lanes = tl.arange(0, VEC)[None, :] + (row * PLACES + HEAD + (i - HEAD) * VEC)
            place = tl.broadcast_to(lanes.to(tl.int16), [BLOCK, VEC])
        else:
            place = tl.full([BLOCK], row * PLACES + i + VECTORS * (VEC - 1), tl.int16)
        if row == 0:
            best = found[i]
        else:
            best, place = follow_pairs(bests[i], places[i], found[i], place, ASM)
        new_bests = new_bests + (best,)
        new_places = new_places + (place,)
    return new_bests, new_places


@triton.jit
def pieces_to_keys(bests, places, N: tl.constexpr, ASM: tl.constexpr):
    """Keys [int32] of columns whose maxima and places are known; the largest is the argmax."""
    keys = ()
    for i in tl.static_range(N):
        keys = keys + (to_pair_keys(bests[i], places[i], ASM),)
    return keys


@triton.jit
def argmax_columns(keys, firsts, DTYPE: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
                   DILATION: tl.constexpr, SKIP: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """Argmax of V windows over the keys of columns. firsts: the first tap over the input."""
    bests = ()
    ats = ()
    for v in tl.static_range(V):
        key = keys[SKIP + v * STRIDE]
        for k in tl.static_range(1, K):
            key = tl.maximum(key, keys[SKIP + v * STRIDE + k * DILATION])
        best, place = from_pair_keys(key, DTYPE)
        bests = bests + (best,)
        at = place // PLACES * K + (place % PLACES - (SKIP + v * STRIDE)) // DILATION
        nothing = best.to(tl.float32) == float("-inf")  # the padding may have won
        ats = ats + (tl.where(nothing, firsts[v], at),)
    return bests, ats


@triton.jit(do_not_specialize=["items"])
def patch_kernel(
    x_ptr, out_ptr, index_ptr, offset_ptr,  # the last two None where absent
    sizes, outs, channels, strides, items, scale,  # strides (n, c, d, h), in units of VEC
    SHAPE: tl.constexpr, REDUCE: tl.constexpr, F32: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, CHECK: tl.constexpr,
    CAN_MISS: tl.constexpr, DIVISOR: tl.constexpr, HEAD: tl.constexpr, FIRST: tl.constexpr,
    VECTORS: tl.constexpr, TAIL: tl.constexpr, EVEN: tl.constexpr, VEC: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, EVICT: tl.constexpr,
    CACHE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(items, BLOCK) programs; an item is V outputs of a row, fewer at the row's end.

    SHAPE: None, or (sizes, outs, strides) as constants. CHECK: for each dim, whether a tap may lie
    outside the input (along w: past its end). EVEN: V divides the row. WIDE: 64-bit offsets.
    """
    if SHAPE is not None:
        sizes = SHAPE[0]
        outs = SHAPE[1]
        strides = SHAPE[2]
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = item < items
    chunks = (outs[2] + V - 1) // V
    chunk = item % chunks
    row = item // chunks
    oh = row % outs[1]
    od = row // outs[1] % outs[0]
    n = row // (outs[1] * outs[0])
    c = n * 0
    if channels is not None:
        c = n % channels
        n = n // channels
    d0 = od * STRIDE[0] - PADDING[0]
    h0 = oh * STRIDE[1] - PADDING[1]
    w0 = chunk * (V * STRIDE[2])
    base = n * strides[0] + c * strides[1] + d0 * strides[2] + h0 * strides[3]
    x_ptrs = x_ptr + (base + chunk * (V * STRIDE[2] // VEC)) * VEC

    KD: tl.constexpr = KERNEL[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    SKIP: tl.constexpr = HEAD - FIRST * VEC - PADDING[2]
    PIECES: tl.constexpr = HEAD + VECTORS + TAIL
    DTYPE: tl.constexpr = tl.float32 if F32 else x_ptr.dtype.element_ty
    pieces = ()
    places = ()
    bests = ()
    ats = ()
    if REDUCE == "argmax":
        for v in tl.static_range(V):
            starts = (d0, h0, w0 + (v * STRIDE[2] - PADDING[2]))
            if PAIRS is None:
                bests = bests + (tl.full([BLOCK], float("-inf"), DTYPE),)
            ats = ats + (first_taps(starts, KERNEL, DILATION, PADDING).to(tl.int32),)
    for kd in tl.static_range(KD):
        for kh in tl.static_range(KH):
            row_mask = mask
            if CHECK[0]:
                d = d0 + kd * DILATION[0]
                row_mask = row_mask & (d >= 0) & (d < sizes[0])
            if CHECK[1]:
                h = h0 + kh * DILATION[1]
                row_mask = row_mask & (h >= 0) & (h < sizes[1])
            step = (kd * DILATION[0] * strides[2] + kh * DILATION[1] * strides[3]) * VEC
            found = load_row(x_ptrs + step, w0, row_mask, sizes[2], REDUCE, F32, CHECK[2], HEAD,
                             FIRST, VECTORS, TAIL, VEC, EVICT)  # fmt: skip
            if PAIRS is not None:
                pieces, places = follow_pieces(pieces, places, found, kd * KH + kh, HEAD,
                                               VECTORS, TAIL, BLOCK, VEC, PAIRS)  # fmt: skip
            elif REDUCE == "argmax":
                columns = columns_of(found, BLOCK, HEAD, VECTORS, TAIL, VEC)
                bests, ats = follow_row(bests, ats, columns, (kd * KH + kh) * KW, KW, STRIDE[2],
                                        DILATION[2], SKIP, V)  # fmt: skip
            elif kd + kh == 0:
                pieces = found
            else:
                pieces = merge(pieces, found, REDUCE, PIECES)
    if PAIRS is not None:
        pieces = pieces_to_keys(pieces, places, PIECES, PAIRS)
        keys = columns_of(pieces, BLOCK, HEAD, VECTORS, TAIL, VEC)
        bests, ats = argmax_columns(keys, ats, DTYPE, KW, STRIDE[2], DILATION[2], SKIP, V)
    elif REDUCE != "argmax":
        columns = columns_of(pieces, BLOCK, HEAD, VECTORS, TAIL, VEC)
        bests = reduce_columns(columns, REDUCE, KW, STRIDE[2], DILATION[2], SKIP, V)

    lanes = tl.arange(0, V)[None, :]
    if EVEN:
        places = item[:, None] * V + lanes
        mask = tl.broadcast_to(mask[:, None], [BLOCK, V])
    else:
        ow = chunk[:, None] * V + lanes
        places = row[:, None] * outs[2] + ow
        mask = mask[:, None] & (ow < outs[2])
    best = implode(bests, BLOCK, V)
    starts = (d0[:, None], h0[:, None], w0[:, None] + (lanes * STRIDE[2] - PADDING[2]))
    if REDUCE == "avg":
        best = divide(best, starts, starts, sizes, scale, KERNEL, PADDING, DIVISOR)
    out = best.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, out, mask=mask, cache_modifier=CACHE)
    if REDUCE == "argmax":
        store_found(index_ptr, offset_ptr, implode(ats, BLOCK, V), starts, sizes, places, mask,
                    KERNEL, DILATION, CAN_MISS, CACHE)  # fmt: skip
