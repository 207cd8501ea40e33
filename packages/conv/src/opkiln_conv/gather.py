"""Implicit GEMM that gathers the input element by element: every convolution, every layout.

out[n, o, p] = bias[o] + sum over k of w[o, k] * x[n, under tap k of p], with k over (channel, tap),
taps innermost, or with CHANNELS_INNER over (tap, channel). A program computes BLOCK_M channels of
a group x BLOCK_N pixels, and of its products the share of a part. Small images share tiles (EACH is
False): then nothing says that pixels are neighbours in memory where a row's pitch is odd.
"""

import triton
import triton.language as tl

from opkiln_conv.tiles import aligned, combine, first_inputs, inside, locate, multiply, store


@triton.jit
def split(k, of_group, KERNEL: tl.constexpr, DILATION: tl.constexpr, INNER: tl.constexpr):
    """Product number k -> channel, (kd, kh, kw) of the kernel, (d, h, w) from its first tap."""
    TAPS: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    if INNER:
        channel, tap = k % of_group, k // of_group
    else:
        channel, tap = k // TAPS, k % TAPS
    kd = tap // (KERNEL[1] * KERNEL[2])
    kh = tap // KERNEL[2] % KERNEL[1]
    kw = tap % KERNEL[2]
    return channel, (kd, kh, kw), (kd * DILATION[0], kh * DILATION[1], kw * DILATION[2])


@triton.jit
def load_w(w_ptrs, k, terms, mask_m, of_group, strides, W_DENSE: tl.constexpr,
           KERNEL: tl.constexpr, DILATION: tl.constexpr, INNER: tl.constexpr):  # fmt: skip
    """[M, K] weights of products k."""
    offs = k
    if not W_DENSE:
        channel, tap, _ = split(k, of_group, KERNEL, DILATION, INNER)
        offs = channel * strides[1]
        offs += tap[0] * strides[2] + tap[1] * strides[3] + tap[2] * strides[4]
    mask = mask_m[:, None] & (k < terms)[None, :]
    return tl.load(w_ptrs[:, None] + offs[None, :], mask=mask, other=0.0)


@triton.jit
def load_x(x_ptrs, at, k, terms, mask_n, of_group, sizes, strides, CHECK: tl.constexpr,
           KERNEL: tl.constexpr, DILATION: tl.constexpr, INNER: tl.constexpr,
           OPAQUE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """[K, N] inputs of products k of the pixels whose first tap is `at`."""
    if OPAQUE:
        k += tl.program_id(1)  # 0, which the compiler does not know
    channel, _, tap = split(k, of_group, KERNEL, DILATION, INNER)
    if WIDE:
        channel = channel.to(tl.int64)
    offs = channel * strides[1] + tap[0] * strides[2] + tap[1] * strides[3] + tap[2] * strides[4]
    mask = mask_n[None, :] & (k < terms)[:, None]
    d = at[0][None, :] + tap[0][:, None]
    h = at[1][None, :] + tap[1][:, None]
    w = at[2][None, :] + tap[2][:, None]
    mask = inside(d, h, w, sizes, mask, CHECK)
    return tl.load(x_ptrs[None, :] + offs[:, None], mask=mask, other=0.0)


@triton.jit
def gather_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, ws_ptr, counters_ptr,
    dims, sizes, outs, x_strides, w_strides, out_strides, stride_b, images,
    SHAPE: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    DILATION: tl.constexpr, CHECK: tl.constexpr, INNER: tl.constexpr, W_DENSE: tl.constexpr,
    WIDE: tl.constexpr, F32: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    AHEAD: tl.constexpr, UNIT: tl.constexpr, EACH: tl.constexpr, FLAT: tl.constexpr,
    OPAQUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (pixel tiles * groups * channel tiles * SPLIT). dims: (of_group, group_outs). SHAPE: the
    six tuples, where compiled in. AHEAD: load a step's operands during the step before. UNIT: see
    aligned. EACH: tiles lie in one image. FLAT: outputs have one dim. OPAQUE: see tilings.
    """
    if SHAPE is not None:
        dims, sizes, outs = SHAPE[0], SHAPE[1], SHAPE[2]
        x_strides, w_strides, out_strides = SHAPE[3], SHAPE[4], SHAPE[5]
    of_group, group_outs = dims[0], dims[1]
    terms = of_group * (KERNEL[0] * KERNEL[1] * KERNEL[2])
    tiles_m = tl.cdiv(group_outs, BLOCK_M)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    pixels, out_strides = aligned(outs[0] * outs[1] * outs[2], out_strides, UNIT)
    if EACH:
        tiles_n = tl.cdiv(pixels, BLOCK_N) * images
    else:
        # A product, so that the compiler knows what it is divisible by whatever the batch.
        pixels = images * pixels
        tiles_n = tl.cdiv(pixels, BLOCK_N)
    group = tile // (tiles_m * tiles_n)
    offs_m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tile // tiles_m % tiles_n
    if EACH:
        n = block // tl.cdiv(pixels, BLOCK_N)
        pixel = block % tl.cdiv(pixels, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
        if FLAT:
            at = (pixel * 0, pixel * 0, pixel)
        else:
            _, at = locate(pixel, outs)
    else:
        pixel = block * BLOCK_N + tl.arange(0, BLOCK_N)
        n, at = locate(pixel, outs)
    mask_m, mask_n = offs_m < group_outs, pixel < pixels
    first = first_inputs(at, STRIDE, PADDING)
    channel = group * group_outs + offs_m
    if WIDE:
        n, channel, group = n.to(tl.int64), channel.to(tl.int64), group.to(tl.int64)
    x_offs = n * x_strides[0] + first[0] * x_strides[2] + first[1] * x_strides[3]
    x_ptrs = x_ptr + group * of_group * x_strides[1] + x_offs + first[2] * x_strides[4]
    w_ptrs = w_ptr + channel * w_strides[0]

    steps = tl.cdiv(terms, BLOCK_K)
    begin, end = steps * part // SPLIT, steps * (part + 1) // SPLIT
    k = begin * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if AHEAD:
        w = load_w(w_ptrs, k, terms, mask_m, of_group, w_strides, W_DENSE, KERNEL, DILATION, INNER)
        x = load_x(x_ptrs, first, k, terms, mask_n, of_group, sizes, x_strides, CHECK, KERNEL,
                   DILATION, INNER, OPAQUE, WIDE)  # fmt: skip
        for _ in tl.range(begin, end, num_stages=1):
            k += BLOCK_K
            next_w = load_w(w_ptrs, k, terms, mask_m, of_group, w_strides, W_DENSE, KERNEL,
                            DILATION, INNER)  # fmt: skip
            next_x = load_x(x_ptrs, first, k, terms, mask_n, of_group, sizes, x_strides, CHECK,
                            KERNEL, DILATION, INNER, OPAQUE, WIDE)  # fmt: skip
            acc = multiply(w, x, acc, F32, PRECISION)
            w, x = next_w, next_x
    else:
        for _ in range(begin, end):
            w = load_w(w_ptrs, k, terms, mask_m, of_group, w_strides, W_DENSE, KERNEL, DILATION,
                       INNER)  # fmt: skip
            x = load_x(x_ptrs, first, k, terms, mask_n, of_group, sizes, x_strides, CHECK, KERNEL,
                       DILATION, INNER, OPAQUE, WIDE)  # fmt: skip
            acc = multiply(w, x, acc, F32, PRECISION)
            k += BLOCK_K

    if not EACH:
        pixel -= n * (outs[0] * outs[1] * outs[2])
    if SPLIT == 1:
        store(acc, out_ptr, bias_ptr, n, channel, mask_m, pixel, mask_n, out_strides, stride_b)
    else:
        acc, last = combine(acc, ws_ptr, counters_ptr, tile, part, SPLIT)
        if last:
            store(acc, out_ptr, bias_ptr, n, channel, mask_m, pixel, mask_n, out_strides, stride_b)
