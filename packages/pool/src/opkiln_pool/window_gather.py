"""Gradient of a pool element by element: the variant that serves every window and layout.

grad[n, c, i] = sum of g[n, c, o] over the windows o that hold i: for maxima those whose saved
offset is i's tap, for averages each divided by what it counts. Fixed order, sums in f32, of
f32 gradients in f64.

A program computes BLOCK x VEC elements that lie together in memory: VEC neighbours along a row, or
for channels_last VEC channels of BLOCK places with 16-byte loads. Elements of one window load the
same gradient, which L1 serves.
"""

import triton
import triton.language as tl

from opkiln_pool.reducers import to_sums
from opkiln_pool.window_taps import decode, divide


@triton.jit
def first_holder(i, size, out, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
                 DILATION: tl.constexpr, ADAPTIVE: tl.constexpr):  # fmt: skip
    """The first window along one dim that may hold element i."""
    if ADAPTIVE:
        first = i * out // size
    else:  # a negative sum divides towards 0
        first = tl.maximum((i + (PADDING - (K - 1) * DILATION + STRIDE - 1)) // STRIDE, 0)
    return first


@triton.jit
def locate_in(i, o, size, out, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
              DILATION: tl.constexpr, ADAPTIVE: tl.constexpr):  # fmt: skip
    """Start and end of window o along one dim, the tap that element i is, whether it is one."""
    if ADAPTIVE:
        start = o * size // out
        end = ((o + 1) * size + out - 1) // out
        tap = i - start
        holds = (o < out) & (tap >= 0) & (i < end)
    else:
        start = o * STRIDE - PADDING
        end = start + K
        step = i - start
        tap = step // DILATION
        holds = (o < out) & (step >= 0) & (step <= (K - 1) * DILATION)
        if DILATION > 1:
            holds = holds & (step % DILATION == 0)
    return start, end, tap, holds


@triton.jit
def add_window(total, window, element, first, g_ptrs, offset_ptrs, sizes, outs, g_steps,
               offset_steps, mask, scale, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
               PADDING: tl.constexpr, DILATION: tl.constexpr, HOLDERS: tl.constexpr,
               DIVISOR: tl.constexpr, ADAPTIVE: tl.constexpr):  # fmt: skip
    """The sums continued over window number `window` of those that may hold an element."""
    od = first[0] + window // (HOLDERS[1] * HOLDERS[2])
    oh = first[1] + window // HOLDERS[2] % HOLDERS[1]
    ow = first[2] + window % HOLDERS[2]
    start_d, end_d, td, in_d = locate_in(element[0], od, sizes[0], outs[0], KERNEL[0], STRIDE[0],
                                         PADDING[0], DILATION[0], ADAPTIVE)  # fmt: skip
    start_h, end_h, th, in_h = locate_in(element[1], oh, sizes[1], outs[1], KERNEL[1], STRIDE[1],
                                         PADDING[1], DILATION[1], ADAPTIVE)  # fmt: skip
    start_w, end_w, tw, in_w = locate_in(element[2], ow, sizes[2], outs[2], KERNEL[2], STRIDE[2],
                                         PADDING[2], DILATION[2], ADAPTIVE)  # fmt: skip
    mask = mask & in_d & in_h & in_w
    ptrs = g_ptrs + (od * g_steps[0] + oh * g_steps[1] + ow * g_steps[2])
    g = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if offset_ptrs is not None:
        ptrs = offset_ptrs + (od * offset_steps[0] + oh * offset_steps[1] + ow * offset_steps[2])
        offset = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
        g = tl.where(offset == (td * KERNEL[1] + th) * KERNEL[2] + tw, g, 0.0)
    elif DIVISOR != "scale":
        starts = (start_d, start_h, start_w)
        g = divide(g, starts, (end_d, end_h, end_w), sizes, scale, KERNEL, PADDING, DIVISOR)
        g = tl.where(mask, g, 0.0)  # a window that does not exist may count 0
    return total + g


@triton.jit(do_not_specialize=["items"])
def gather_kernel(
    g_ptr, offset_ptr, out_ptr,  # offset_ptr None for averages
    sizes, outs, channels, g_strides, offset_strides, items, scale,
    SHAPE: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, HOLDERS: tl.constexpr, DIVISOR: tl.constexpr, ADAPTIVE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, VECTOR: tl.constexpr, UNROLL: tl.constexpr, VEC: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(items, BLOCK) programs; items: elements / VEC.

    SHAPE: None, or (sizes, outs, g_strides, offset_strides) as constants. Strides over (n, c, d, h,
    w). VECTOR: channels_last gradients and offsets whose channels are vectors; channels and strides
    are then in units of VEC, c's is 1. HOLDERS: for each dim, the most windows of an element.
    UNROLL: windows as straight code instead of a loop. WIDE: 64-bit offsets.
    """
    if SHAPE is not None:
        sizes = SHAPE[0]
        outs = SHAPE[1]
        g_strides = SHAPE[2]
        offset_strides = SHAPE[3]
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    if WIDE:
        item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    lanes = tl.arange(0, VEC)[None, :]
    if CHANNELS_LAST:
        n, c, element = decode(item, sizes, channels, True)
    else:
        n, c, element = decode(item, (sizes[0], sizes[1], sizes[2] // VEC), channels, False)
        element = (element[0], element[1], element[2] * VEC + lanes)
    if ADAPTIVE:
        # program_id(1) is 0, which LLVM does not know: given an element's range it divides in
        # packed 16 bits, and ptxas 12.8 drops the constant of add.s16x2 (see adaptive_strip).
        zero = tl.program_id(1)
        element = (element[0], element[1] + zero, element[2] + zero)
    UNIT: tl.constexpr = VEC if VECTOR else 1
    g_ptrs = g_ptr + (n * g_strides[0] + c * g_strides[1]) * UNIT
    offset_ptrs = None
    if offset_ptr is not None:
        offset_ptrs = offset_ptr + (n * offset_strides[0] + c * offset_strides[1]) * UNIT
    if VECTOR:
        g_ptrs += lanes
        if offset_ptr is not None:
            offset_ptrs += lanes
    g_steps = (g_strides[2] * UNIT, g_strides[3] * UNIT, g_strides[4] * UNIT)
    offset_steps = (offset_strides[2] * UNIT, offset_strides[3] * UNIT, offset_strides[4] * UNIT)
    first = (
        first_holder(element[0], sizes[0], outs[0], KERNEL[0], STRIDE[0], PADDING[0], DILATION[0],
                     ADAPTIVE),
        first_holder(element[1], sizes[1], outs[1], KERNEL[1], STRIDE[1], PADDING[1], DILATION[1],
                     ADAPTIVE),
        first_holder(element[2], sizes[2], outs[2], KERNEL[2], STRIDE[2], PADDING[2], DILATION[2],
                     ADAPTIVE),
    )  # fmt: skip
    mask = tl.broadcast_to(item < items, [BLOCK, VEC])
    total = to_sums(tl.full([BLOCK, VEC], 0.0, tl.float32), out_ptr)
    WINDOWS: tl.constexpr = HOLDERS[0] * HOLDERS[1] * HOLDERS[2]
    if UNROLL:
        for window in tl.static_range(WINDOWS):
            total = add_window(total, window, element, first, g_ptrs, offset_ptrs, sizes, outs,
                               g_steps, offset_steps, mask, scale, KERNEL, STRIDE, PADDING,
                               DILATION, HOLDERS, DIVISOR, ADAPTIVE)  # fmt: skip
    else:
        for window in range(WINDOWS):
            total = add_window(total, window, element, first, g_ptrs, offset_ptrs, sizes, outs,
                               g_steps, offset_steps, mask, scale, KERNEL, STRIDE, PADDING,
                               DILATION, HOLDERS, DIVISOR, ADAPTIVE)  # fmt: skip
    if DIVISOR == "scale":
        total = total * scale
    places = item * VEC + lanes
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask, cache_modifier=CACHE)
