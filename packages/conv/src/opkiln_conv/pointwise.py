"""1x1 convolution, contiguous: out[n, o, p] = bias[o] + sum over i of w[o, i] * x[n, i, p].

x and out keep their layout: x is read as [channel, pixel] tiles, pixels innermost. A program
computes BLOCK_M channels x BLOCK_N pixels of one image, and of the input channels a part.
"""

import triton
import triton.language as tl

from opkiln_conv.tiles import combine, multiply, store


@triton.jit
def pointwise_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, ws_ptr, counters_ptr,
    channels, channel_units, pixel_units, stride_b,
    SHAPE: tl.constexpr, ALIGN_C: tl.constexpr, ALIGN_P: tl.constexpr, WIDE: tl.constexpr,
    F32: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (images * pixel tiles * channel tiles * SPLIT). Input channels and pixels come in units
    of ALIGN_C and ALIGN_P. SHAPE: (channels, channel_units, pixel_units), where compiled in.
    EVEN_K: every part takes whole steps.
    """
    if SHAPE is not None:
        channels, channel_units, pixel_units = SHAPE[0], SHAPE[1], SHAPE[2]
    inputs, pixels = channel_units * ALIGN_C, pixel_units * ALIGN_P
    tiles_m, tiles_n = tl.cdiv(channels, BLOCK_M), tl.cdiv(pixels, BLOCK_N)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    image = tile // (tiles_m * tiles_n)
    offs_m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile // tiles_m % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < channels, offs_n < pixels
    steps = tl.cdiv(inputs, BLOCK_K)
    begin, end = steps * part // SPLIT, steps * (part + 1) // SPLIT
    offs_k = begin * BLOCK_K + tl.arange(0, BLOCK_K)
    if WIDE:
        image, offs_m, offs_k = image.to(tl.int64), offs_m.to(tl.int64), offs_k.to(tl.int64)
    x_ptrs = x_ptr + image * inputs * pixels + offs_k[:, None] * pixels + offs_n[None, :]
    w_ptrs = w_ptr + offs_m[:, None] * inputs + offs_k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(begin, end):
        mask_w, mask_x = mask_m[:, None], mask_n[None, :]
        if not EVEN_K:
            mask_w &= (offs_k < inputs)[None, :]
            mask_x &= (offs_k < inputs)[:, None]
            offs_k += BLOCK_K
        w = tl.load(w_ptrs, mask=mask_w, other=0.0)
        x = tl.load(x_ptrs, mask=mask_x, other=0.0)
        acc = multiply(w, x, acc, F32, PRECISION)
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K * pixels
    out_strides = (channels * pixels, pixels, 1)
    if SPLIT == 1:
        store(acc, out_ptr, bias_ptr, image, offs_m, mask_m, offs_n, mask_n, out_strides, stride_b)
    else:
        acc, last = combine(acc, ws_ptr, counters_ptr, tile, part, SPLIT)
        if last:
            store(
                acc, out_ptr, bias_ptr, image, offs_m, mask_m, offs_n, mask_n, out_strides, stride_b
            )
