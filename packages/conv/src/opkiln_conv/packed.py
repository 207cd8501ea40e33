"""Convolution in two kernels: operands packed with channels innermost, then a GEMM tap by tap.

pack_kernel     x [n, c, place] -> [n, place, CP], w [o, c, tap] -> [o, tap, CP]; c padded with 0
packed_kernel   out[n, o, p] = bias[o] + sum over taps, c of w[o, tap, c] * x[n, place of p, tap, c]

Then every load is a row of channels, 16 bytes a thread and copied asynchronously, which a tap shift
of one pixel does not allow. An operand that comes with channels innermost is not packed. Channel
pitches and strides are counted in units of ALIGN elements, so that rows are known to be aligned.
"""

import triton
import triton.language as tl

from opkiln_conv.tiles import aligned, combine, first_inputs, inside, locate, multiply, store


@triton.jit
def turn(from_ptr, to_ptr, c, channels, stride_c, item, items, pitch):
    """Copy a tile of from[c, item] to to[item, c], and zeros where c is past the channels."""
    mask = (item < items)[None, :] & (c < channels)[:, None]
    tile = tl.load(from_ptr + c[:, None] * stride_c + item[None, :], mask=mask, other=0.0)
    to_ptrs = to_ptr + item[:, None] * pitch + c[None, :]
    tl.store(to_ptrs, tl.trans(tile), mask=(item < items)[:, None] & (c < pitch)[None, :])


@triton.jit
def pack_kernel(
    x_ptr, w_ptr, xp_ptr, wp_ptr, images, channels, place_units, rows, pitch_units,
    ALIGN: tl.constexpr, ALIGN_P: tl.constexpr, TAPS: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid (channel blocks * (images * place blocks + row blocks)), a part of it where xp_ptr or
    wp_ptr is None. BLOCK_R output channels of w a program, all TAPS of each.
    """
    pitch, places = pitch_units * ALIGN, place_units * ALIGN_P
    blocks_c, blocks_p = tl.cdiv(pitch, BLOCK_C), tl.cdiv(places, BLOCK_P)
    c = tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    block = tl.program_id(0) // blocks_c
    x_blocks = 0
    if xp_ptr is not None:
        x_blocks = images * blocks_p
    if block < x_blocks:
        if xp_ptr is not None:
            image = (block // blocks_p).to(tl.int64)
            place = block % blocks_p * BLOCK_P + tl.arange(0, BLOCK_P)
            from_ptr = x_ptr + image * channels * places
            turn(from_ptr, xp_ptr + image * places * pitch, c, channels, places, place, places,
                 pitch)  # fmt: skip
    elif wp_ptr is not None:
        for i in range(BLOCK_R):
            row = (block - x_blocks) * BLOCK_R + i
            if row < rows:
                from_ptr = w_ptr + row.to(tl.int64) * channels * TAPS
                to_ptr = wp_ptr + row.to(tl.int64) * TAPS * pitch
                turn(from_ptr, to_ptr, c, channels, TAPS, tl.arange(0, BLOCK_T), TAPS, pitch)


@triton.jit
def live_taps(first, last, size, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
              DILATION: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Along one dim: the first tap that lies over the input for any output from `first` to `last`,
    and how many from there do.
    """
    begin, end = 0, K
    if CHECK:
        begin = (tl.maximum(PADDING - last * STRIDE, 0) + DILATION - 1) // DILATION
        room = size - 1 + PADDING - first * STRIDE
        end = tl.minimum((tl.maximum(room, -DILATION) + DILATION) // DILATION, K)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def packed_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, ws_ptr, counters_ptr,
    channels, c_blocks, sizes, outs, x_units, w_units, out_strides, stride_b,
    SHAPE: tl.constexpr, ALIGN: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, DILATION: tl.constexpr, CHECK: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, F32: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (images * pixel tiles * channel tiles * SPLIT); a tile lies in one image. c_blocks:
    steps of BLOCK_K input channels. x_units: strides of x over (n, d, h, w); w_units: of w over
    outputs and taps. SHAPE: the seven arguments from channels on, where compiled in. UNIT: see
    aligned.
    """
    if SHAPE is not None:
        channels, c_blocks, sizes = SHAPE[0], SHAPE[1], SHAPE[2]
        outs, x_units, w_units, out_strides = SHAPE[3], SHAPE[4], SHAPE[5], SHAPE[6]
    pixels, out_strides = aligned(outs[0] * outs[1] * outs[2], out_strides, UNIT)
    tiles_m, tiles_n = tl.cdiv(channels, BLOCK_M), tl.cdiv(pixels, BLOCK_N)
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    image = tile // (tiles_m * tiles_n)
    offs_m = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    begin_n = tile // tiles_m % tiles_n * BLOCK_N
    pixel = begin_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m, mask_n = offs_m < channels, pixel < pixels
    _, at = locate(pixel, outs)
    first = first_inputs(at, STRIDE, PADDING)
    if WIDE:
        image, offs_m = image.to(tl.int64), offs_m.to(tl.int64)
    x_offs = first[0] * x_units[1] + first[1] * x_units[2] + first[2] * x_units[3]
    x_ptrs = x_ptr + (image * x_units[0] + x_offs)[:, None] * ALIGN + offs_k[None, :]
    w_ptrs = w_ptr + (offs_m * w_units[0] * ALIGN)[:, None] + offs_k[None, :]

    # Taps that lie in the padding for all pixels of the tile are not visited.
    end_n = tl.minimum(begin_n + BLOCK_N, pixels) - 1
    plane = outs[1] * outs[2]
    d0, d1 = begin_n // plane, end_n // plane
    whole = d0 != d1
    h0 = tl.where(whole, 0, begin_n % plane // outs[2])
    h1 = tl.where(whole, outs[1] - 1, end_n % plane // outs[2])
    first_d, count_d = live_taps(
        d0, d1, sizes[0], KERNEL[0], STRIDE[0], PADDING[0], DILATION[0], CHECK[0]
    )
    first_h, count_h = live_taps(
        h0, h1, sizes[1], KERNEL[1], STRIDE[1], PADDING[1], DILATION[1], CHECK[1]
    )
    steps = count_d * count_h * KERNEL[2] * c_blocks
    count_h = tl.maximum(count_h, 1)  # the pipeline divides by it even where there are no steps
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps * part // SPLIT, steps * (part + 1) // SPLIT):
        c = step % c_blocks * BLOCK_K
        tap = step // c_blocks
        kw, row = tap % KERNEL[2], tap // KERNEL[2]
        kh, kd = first_h + row % count_h, first_d + row // count_h
        w_tap = ((kd * KERNEL[1] + kh) * KERNEL[2] + kw) * w_units[1]
        d, h, w = kd * DILATION[0], kh * DILATION[1], kw * DILATION[2]
        x_tap = d * x_units[1] + h * x_units[2] + w * x_units[3]
        mask_x = inside(first[0] + d, first[1] + h, first[2] + w, sizes, mask_n, CHECK)
        a = tl.load(w_ptrs + (w_tap * ALIGN + c), mask=mask_m[:, None], other=0.0)
        b = tl.load(x_ptrs + (x_tap * ALIGN + c), mask=mask_x[:, None], other=0.0)
        acc = multiply(a, tl.trans(b), acc, F32, PRECISION)

    if SPLIT == 1:
        store(acc, out_ptr, bias_ptr, image, offs_m, mask_m, pixel, mask_n, out_strides, stride_b)
    else:
        acc, last = combine(acc, ws_ptr, counters_ptr, tile, part, SPLIT)
        if last:
            store(
                acc, out_ptr, bias_ptr, image, offs_m, mask_m, pixel, mask_n, out_strides, stride_b
            )
