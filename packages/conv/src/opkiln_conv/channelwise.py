"""Convolution whose groups hold one input channel (depthwise): taps in turn, no matrix units.

out[n, o, p] = bias[o] + sum over taps of w[o, tap] * x[n, o // MULTIPLIER, under the tap of p]. A
program computes BLOCK_M channels x BLOCK_N pixels, which may lie in two images.
"""

import triton
import triton.language as tl

from opkiln_conv.tiles import first_inputs, inside, locate, store


@triton.jit
def visit(tap, x_ptrs, w_ptrs, first, sizes, x_strides, w_strides, mask_m, mask_n,
          KERNEL: tl.constexpr, DILATION: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """The products of tap number `tap`."""
    kd = tap // (KERNEL[1] * KERNEL[2])
    kh = tap // KERNEL[2] % KERNEL[1]
    kw = tap % KERNEL[2]
    d, h, w = kd * DILATION[0], kh * DILATION[1], kw * DILATION[2]
    mask = inside(first[0] + d, first[1] + h, first[2] + w, sizes, mask_n, CHECK)
    shift = d * x_strides[2] + h * x_strides[3] + w * x_strides[4]
    x = tl.load(x_ptrs + shift, mask=mask_m[:, None] & mask[None, :], other=0.0)
    tap_offs = kd * w_strides[2] + kh * w_strides[3] + kw * w_strides[4]
    weight = tl.load(w_ptrs + tap_offs, mask=mask_m, other=0.0)
    return weight.to(tl.float32)[:, None] * x.to(tl.float32)


@triton.jit
def channelwise_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr,
    dims, sizes, outs, x_strides, w_strides, out_strides, stride_b, images,
    SHAPE: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, CHECK: tl.constexpr, UNROLL: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (pixel tiles * channel tiles). dims: (outputs of an input channel, output channels).
    SHAPE: the six tuples, where compiled in.
    """
    if SHAPE is not None:
        dims, sizes, outs = SHAPE[0], SHAPE[1], SHAPE[2]
        x_strides, w_strides, out_strides = SHAPE[3], SHAPE[4], SHAPE[5]
    TAPS: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    pixels = images * (outs[0] * outs[1] * outs[2])
    tiles_n = tl.cdiv(pixels, BLOCK_N)
    channel = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    pixel = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = channel < dims[1], pixel < pixels
    n, at = locate(pixel, outs)
    first = first_inputs(at, STRIDE, PADDING)
    if WIDE:
        n, channel = n.to(tl.int64), channel.to(tl.int64)
    x_offs = n * x_strides[0] + first[0] * x_strides[2] + first[1] * x_strides[3]
    x_offs += first[2] * x_strides[4]
    x_ptrs = x_ptr + (channel // dims[0] * x_strides[1])[:, None] + x_offs[None, :]
    w_ptrs = w_ptr + channel * w_strides[0]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if UNROLL:
        for tap in tl.static_range(TAPS):
            acc += visit(tap, x_ptrs, w_ptrs, first, sizes, x_strides, w_strides, mask_m, mask_n,
                         KERNEL, DILATION, CHECK)  # fmt: skip
    else:
        for tap in range(TAPS):
            acc += visit(tap, x_ptrs, w_ptrs, first, sizes, x_strides, w_strides, mask_m, mask_n,
                         KERNEL, DILATION, CHECK)  # fmt: skip
    pixel -= n * (outs[0] * outs[1] * outs[2])
    store(acc, out_ptr, bias_ptr, n, channel, mask_m, pixel, mask_n, out_strides, stride_b)
