"""What the convolution kernels share: where a tile lies, a tile's product, and its way out."""

import triton
import triton.language as tl


@triton.jit
def locate(pixel, outs):
    """Flat pixel of an output -> image, (od, oh, ow). Each by one division of `pixel`, so that the
    compiler sees for how many pixels in a row a coordinate stays the same.
    """
    ow = pixel % outs[2]
    oh = pixel // outs[2] % outs[1]
    od = pixel // (outs[2] * outs[1]) % outs[0]
    return pixel // (outs[2] * outs[1] * outs[0]), (od, oh, ow)


@triton.jit
def aligned(pixels, strides, UNIT: tl.constexpr):
    """pixels and strides of the output, known to be multiples of UNIT with pixels as neighbours, so
    that stores are as wide as they may be; UNIT 0: as they come.
    """
    if UNIT:
        pixels = pixels // UNIT * UNIT
        strides = (strides[0] // UNIT * UNIT, strides[1] // UNIT * UNIT, 1)
    return pixels, strides


@triton.jit
def first_inputs(at, STRIDE: tl.constexpr, PADDING: tl.constexpr):
    """Coordinates under the first tap; in the padding if negative."""
    return (
        at[0] * STRIDE[0] - PADDING[0],
        at[1] * STRIDE[1] - PADDING[1],
        at[2] * STRIDE[2] - PADDING[2],
    )


@triton.jit
def inside(d, h, w, sizes, mask, CHECK: tl.constexpr):
    """`mask` where the coordinates lie over the input. CHECK: the dims where they may not."""
    if CHECK[0]:
        mask = mask & (d >= 0) & (d < sizes[0])
    if CHECK[1]:
        mask = mask & (h >= 0) & (h < sizes[1])
    if CHECK[2]:
        mask = mask & (w >= 0) & (w < sizes[2])
    return mask


@triton.jit
def multiply(w, x, acc, F32: tl.constexpr, PRECISION: tl.constexpr):
    """acc + w @ x. F32: Triton's interpreter multiplies bfloat16 wrongly, so convert before."""
    if F32:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    return tl.dot(w, x, acc, input_precision=PRECISION)


@triton.jit
def combine(acc, ws_ptr, counters_ptr, tile, part, SPLIT: tl.constexpr):
    """Sum the SPLIT partial tiles of a tile, in the order of their parts: the program that comes
    last does. ws: [tiles, SPLIT, M, N] f32; counters: [tiles], 0 before and after. Returns the
    sum, and whether this program has it.
    """
    M: tl.constexpr = acc.shape[0]
    N: tl.constexpr = acc.shape[1]
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    first = ws_ptr + tile.to(tl.int64) * (SPLIT * M * N)
    tl.store(first + part * (M * N) + offs, acc)
    tl.debug_barrier()
    last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        acc = tl.zeros([M, N], tl.float32)
        for i in tl.static_range(SPLIT):
            acc += tl.load(first + i * (M * N) + offs, cache_modifier=".cg")
        tl.store(counters_ptr + tile, 0)
    return acc, last


@triton.jit
def store(acc, out_ptr, bias_ptr, image, channel, mask_c, pixel, mask_p, strides, stride_b):
    """Add the bias of each row's channel and write the tile. pixel: within its image; strides: of
    the output over images, channels and pixels.
    """
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel * stride_b, mask=mask_c, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    ptrs = out_ptr + (channel * strides[1])[:, None]
    ptrs += (image * strides[0] + pixel * strides[2])[None, :]
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_c[:, None] & mask_p[None, :])
