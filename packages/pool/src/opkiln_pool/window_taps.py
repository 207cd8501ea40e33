"""Pooling tap by tap: the variant that serves every window, fixed or adaptive, and every layout.

out[n, c, o] = reduce over taps t of x[n, c, o * STRIDE - PADDING + t * DILATION]; an adaptive
window runs from floor(o * size / outs) to ceil((o + 1) * size / outs).

A program computes BLOCK x VEC outputs that lie together in memory: BLOCK neighbours along a row
whose loads overlap in L1, or for channels_last VEC channels of BLOCK places with 16-byte loads.
"""

import triton
import triton.language as tl

from opkiln_pool.reducers import combine, compute, counted, first_tap, follow, identity


@triton.jit
def window_start(o, size, out, STRIDE: tl.constexpr, PADDING: tl.constexpr, ADAPTIVE: tl.constexpr):
    """Where window `o` along one dim starts; in the padding if negative."""
    return o * size // out if ADAPTIVE else o * STRIDE - PADDING


@triton.jit
def window_end(o, size, out, ADAPTIVE: tl.constexpr):
    """Where the input ends for window `o`."""
    return ((o + 1) * size + out - 1) // out if ADAPTIVE else size


@triton.jit
def decode(item, outs, channels, CHANNELS_LAST: tl.constexpr):
    """Flat item -> n, c, (od, oh, ow). `channels` None: planes are evenly spaced, c is 0."""
    c = item * 0
    if CHANNELS_LAST:
        c = item % channels
        item = item // channels
    ow = item % outs[2]
    oh = item // outs[2] % outs[1]
    od = item // (outs[2] * outs[1]) % outs[0]
    n = item // (outs[2] * outs[1] * outs[0])
    if not CHANNELS_LAST and channels is not None:
        c = n % channels
        n = n // channels
    return n, c, (od, oh, ow)


@triton.jit
def locate(at, starts, sizes, KERNEL: tl.constexpr, DILATION: tl.constexpr):
    """Position in the plane of tap `at`, and whether the tap lies over the input."""
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    # Unsigned: a division by a constant is two instructions instead of five.
    row = (at.to(tl.uint32) // KW).to(tl.int32)
    w = starts[2] + (at - row * KW) * DILATION[2]
    if KERNEL[0] == 1:
        d = starts[0]
        h = starts[1] + row * DILATION[1]
    else:
        slab = (row.to(tl.uint32) // KH).to(tl.int32)
        d = starts[0] + slab * DILATION[0]
        h = starts[1] + (row - slab * KH) * DILATION[1]
    return (d * sizes[1] + h) * sizes[2] + w, (d < sizes[0]) & (h < sizes[1]) & (w < sizes[2])


@triton.jit
def visit(tap, x_ptrs, starts, ends, steps, mask, KERNEL: tl.constexpr, DILATION: tl.constexpr,
          CHECK: tl.constexpr, ADAPTIVE: tl.constexpr, REDUCE: tl.constexpr,
          F32: tl.constexpr):  # fmt: skip
    """Tap number `tap` of every window of the block."""
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    td = tap // (KH * KW) * DILATION[0]
    th = tap // KW % KH * DILATION[1]
    tw = tap % KW * DILATION[2]
    if CHECK[0]:
        mask = mask & (starts[0] + td >= 0) & (starts[0] + td < ends[0])
    if CHECK[1]:
        mask = mask & (starts[1] + th >= 0) & (starts[1] + th < ends[1])
    if CHECK[2]:
        mask = mask & (starts[2] + tw >= 0) & (starts[2] + tw < ends[2])
    ptrs = x_ptrs + (td * steps[0] + th * steps[1] + tw * steps[2])
    return compute(tl.load(ptrs, mask=mask, other=identity(REDUCE)), F32)


@triton.jit
def divide(total, starts, ends, sizes, scale, KERNEL: tl.constexpr, PADDING: tl.constexpr,
           DIVISOR: tl.constexpr):  # fmt: skip
    """Averages of window totals. DIVISOR: "scale", or what to count: "padded", "inside", "all"."""
    if DIVISOR == "scale":
        mean = total * scale
    elif DIVISOR == "all":
        mean = total / ((ends[1] - starts[1]) * (ends[2] - starts[2])).to(tl.float32)
    else:
        INCLUDE: tl.constexpr = DIVISOR == "padded"
        count = counted(starts[0], sizes[0], KERNEL[0], PADDING[0], INCLUDE)
        count *= counted(starts[1], sizes[1], KERNEL[1], PADDING[1], INCLUDE)
        count *= counted(starts[2], sizes[2], KERNEL[2], PADDING[2], INCLUDE)
        mean = total / count.to(tl.float32)
    return mean


@triton.jit
def first_taps(starts, KERNEL: tl.constexpr, DILATION: tl.constexpr, PADDING: tl.constexpr):
    """Number of the first tap over the input: what torch starts the argmax from."""
    td = first_tap(starts[0], KERNEL[0], DILATION[0], PADDING[0])
    th = first_tap(starts[1], KERNEL[1], DILATION[1], PADDING[1])
    tw = first_tap(starts[2], KERNEL[2], DILATION[2], PADDING[2])
    return (td * KERNEL[1] + th) * KERNEL[2] + tw


@triton.jit
def store_found(index_ptr, offset_ptr, at, starts, sizes, places, mask, KERNEL: tl.constexpr,
                DILATION: tl.constexpr, CAN_MISS: tl.constexpr, CACHE: tl.constexpr):  # fmt: skip
    """Store flat indices and window offsets of the winning taps, where these are wanted.

    CAN_MISS: a window may step over the whole input; its offset is 0 and its index torch's.
    """
    position, over_input = locate(at, starts, sizes, KERNEL, DILATION)
    if index_ptr is not None:
        tl.store(index_ptr + places, position.to(tl.int64), mask=mask, cache_modifier=CACHE)
    if offset_ptr is not None:
        if CAN_MISS:
            at = tl.where(over_input, at, 0)
        offset = at.to(offset_ptr.dtype.element_ty)
        tl.store(offset_ptr + places, offset, mask=mask, cache_modifier=CACHE)


@triton.jit(do_not_specialize=["items"])
def taps_kernel(
    x_ptr, out_ptr, index_ptr, offset_ptr,  # the last two None where absent
    sizes, outs, channels, strides, items, scale,  # strides (n, c, d, h, w), in units of VEC
    SHAPE: tl.constexpr, REDUCE: tl.constexpr, F32: tl.constexpr, ADAPTIVE: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    CHECK: tl.constexpr, CAN_MISS: tl.constexpr, DIVISOR: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    WIDE: tl.constexpr, UNROLL: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(items, BLOCK) programs; items: outputs / VEC.

    SHAPE: None, or (sizes, outs, strides) as constants. CHECK: for each dim, whether a tap may lie
    outside the input. WIDE: 64-bit offsets. UNROLL: taps as straight code instead of a loop.
    VEC > 1: dense channels_last, all strides multiples.
    """
    if SHAPE is not None:
        sizes = SHAPE[0]
        outs = SHAPE[1]
        strides = SHAPE[2]
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    if WIDE:
        item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    lanes = tl.arange(0, VEC)[None, :]
    n, c, o = decode(item, outs, channels, CHANNELS_LAST)
    starts = (
        window_start(o[0], sizes[0], outs[0], STRIDE[0], PADDING[0], ADAPTIVE),
        window_start(o[1], sizes[1], outs[1], STRIDE[1], PADDING[1], ADAPTIVE),
        window_start(o[2], sizes[2], outs[2], STRIDE[2], PADDING[2], ADAPTIVE),
    )
    ends = (
        window_end(o[0], sizes[0], outs[0], ADAPTIVE),
        window_end(o[1], sizes[1], outs[1], ADAPTIVE),
        window_end(o[2], sizes[2], outs[2], ADAPTIVE),
    )
    base = n * strides[0] + c * strides[1]
    base += starts[0] * strides[2] + starts[1] * strides[3] + starts[2] * strides[4]
    x_ptrs = x_ptr + base * VEC + lanes
    steps = (strides[2] * VEC, strides[3] * VEC, strides[4] * VEC)
    mask = tl.broadcast_to(item < items, [BLOCK, VEC])

    DTYPE: tl.constexpr = tl.float32 if F32 else x_ptr.dtype.element_ty
    best = tl.full([BLOCK, VEC], identity(REDUCE), DTYPE)
    at = tl.full([BLOCK, VEC], 0, tl.int32)
    if REDUCE == "argmax" and not ADAPTIVE:
        at += first_taps(starts, KERNEL, DILATION, PADDING).to(tl.int32)
    TAPS: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    if UNROLL:
        for tap in tl.static_range(TAPS):
            x = visit(tap, x_ptrs, starts, ends, steps, mask, KERNEL, DILATION, CHECK, ADAPTIVE,
                      REDUCE, F32)  # fmt: skip
            if REDUCE == "argmax":
                best, at = follow(best, at, x, tap)
            else:
                best = combine(best, x, REDUCE)
    else:
        for tap in range(TAPS):
            x = visit(tap, x_ptrs, starts, ends, steps, mask, KERNEL, DILATION, CHECK, ADAPTIVE,
                      REDUCE, F32)  # fmt: skip
            if REDUCE == "argmax":
                best, at = follow(best, at, x, tap)
            else:
                best = combine(best, x, REDUCE)

    places = item * VEC + lanes
    if REDUCE == "avg":
        best = divide(best, starts, ends, sizes, scale, KERNEL, PADDING, DIVISOR)
    out = best.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, out, mask=mask, cache_modifier=CACHE)
    if REDUCE == "argmax":
        store_found(index_ptr, offset_ptr, at, starts, sizes, places, mask, KERNEL, DILATION,
                    CAN_MISS, CACHE)  # fmt: skip
