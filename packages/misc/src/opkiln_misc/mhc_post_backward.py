"""Backward of mhc_post: of x_out[b, i, :] = h_post[b, i] * x_layer_out[b, :] + x_res[b, i, :].

With g the gradient of x_out [B, N * C] and of type f16, bf16 or f32, any strides:
    grad_x_layer_out[b, :] = sum_i h_post[b, i] * g[b, i, :]    [B, C]
    grad_h_post[b, i] = sum_c g[b, i, c] * x_layer_out[b, c]    [B, N] f32
    grad_x_res = g, a copy                                      [B, N * C]
f32 arithmetic, no atomics. One program serves a row, or, of few rows, one stream of a row: it then
sums that stream's grad_h_post and writes its share of the other two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher

MOST_SPREAD = 64  # rows: of more, a program each fills the GPU


@triton.jit
def load_block(ptr, row, offs_c, mask_c, first, stride_b, stride_c, ALIGN: tl.constexpr):
    """Columns `first` + offs_c of a row; stride_c None: dense, the row stride in units of ALIGN."""
    ptr += row * stride_b * ALIGN
    cols = first + offs_c
    if stride_c is not None:
        cols = cols.to(tl.int64) * stride_c
    return tl.load(ptr + cols, mask=mask_c, other=0.0)


@triton.jit
def mhc_post_backward_kernel(
    g_ptr, layer_ptr, h_ptr, d_layer_ptr, d_h_ptr, d_res_ptr,
    c_units, stride_gb, stride_gc, stride_lb, stride_lc, stride_hb, stride_hn,
    N: tl.constexpr, ALIGN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (B, 1). Pointers of gradients that are not wanted are None. C = c_units * ALIGN."""
    row = tl.program_id(0).to(tl.int64)
    C = c_units * ALIGN
    sums = ()
    for _ in tl.static_range(N):
        sums = sums + (tl.full([BLOCK_C], 0.0, tl.float32),)
    for start in tl.range(0, C, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        mask_c = offs_c < C
        streams = ()
        for i in tl.static_range(N):
            g = load_block(g_ptr, row, offs_c, mask_c, i * C, stride_gb, stride_gc, ALIGN)
            streams = streams + (g,)
        if d_h_ptr is not None:
            layer = load_block(layer_ptr, row, offs_c, mask_c, 0, stride_lb, stride_lc, ALIGN)
            layer = layer.to(tl.float32)
        d_layer = tl.full([BLOCK_C], 0.0, tl.float32)
        added = ()
        for i in tl.static_range(N):
            g = streams[i].to(tl.float32)
            if d_layer_ptr is not None:
                h = tl.load(h_ptr + row * stride_hb + i * stride_hn)
                d_layer += h * g
            if d_h_ptr is not None:
                added = added + (sums[i] + g * layer,)
            if d_res_ptr is not None:
                tl.store(d_res_ptr + row * N * C + i * C + offs_c, streams[i], mask=mask_c)
        if d_h_ptr is not None:
            sums = added
        if d_layer_ptr is not None:
            d_layer = d_layer.to(d_layer_ptr.dtype.element_ty)
            tl.store(d_layer_ptr + row * C + offs_c, d_layer, mask=mask_c)
    if d_h_ptr is not None:
        for i in tl.static_range(N):
            tl.store(d_h_ptr + row * N + i, tl.sum(sums[i], axis=0))


@triton.jit
def mhc_post_backward_spread_kernel(
    g_ptr, layer_ptr, h_ptr, d_layer_ptr, d_h_ptr, d_res_ptr,
    c_units, stride_gb, stride_gc, stride_lb, stride_lc, stride_hb, stride_hn,
    N: tl.constexpr, ALIGN: tl.constexpr, BLOCK_C: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Grid (B, N): stream i of a row, and columns [i * SHARE, (i + 1) * SHARE) of d_layer."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    C = c_units * ALIGN
    if d_layer_ptr is not None:
        offs_c = stream * SHARE + tl.arange(0, SHARE)
        mask_c = offs_c < C
        d_layer = tl.full([SHARE], 0.0, tl.float32)
        for i in tl.static_range(N):
            g = load_block(g_ptr, row, offs_c, mask_c, i * C, stride_gb, stride_gc, ALIGN)
            h = tl.load(h_ptr + row * stride_hb + i * stride_hn)
            d_layer += h * g.to(tl.float32)
        d_layer = d_layer.to(d_layer_ptr.dtype.element_ty)
        tl.store(d_layer_ptr + row * C + offs_c, d_layer, mask=mask_c)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    g = load_block(g_ptr, row, offs_c, mask_c, stream * C, stride_gb, stride_gc, ALIGN)
    if d_h_ptr is not None:
        layer = load_block(layer_ptr, row, offs_c, mask_c, 0, stride_lb, stride_lc, ALIGN)
        d_h = tl.sum(g.to(tl.float32) * layer.to(tl.float32), axis=0)
        tl.store(d_h_ptr + row * N + stream, d_h)
    if d_res_ptr is not None:
        tl.store(d_res_ptr + row * N * C + stream * C + offs_c, g, mask=mask_c)


@dataclass(frozen=True, slots=True)
class Tiling:
    """spread: a program a stream; block_c is then at least the number of columns."""

    block_c: int
    num_warps: int
    spread: bool = False


def rule(batch: int, streams: int, columns: int, itemsize: int) -> Tiling:
    """A spread stream is one block. Else a vector of 16 bytes a thread of each stream, and no more
    warps than a row has vectors.
    """
    whole = triton.next_power_of_2(max(columns, 16))
    if batch <= MOST_SPREAD and streams > 1 and whole <= 16384:
        return Tiling(whole, min(max(whole * itemsize // 512, 1), 16), spread=True)
    vector = 16 // itemsize
    warps = min(max(whole // (32 * vector), 1), 4 if streams <= 4 else 8)
    return Tiling(min(whole, warps * 32 * vector), warps)


def plan_for(call: Any) -> tuple[int, list[int | None]]:
    """ALIGN, and the kernels' size and stride arguments. ValueError: what they cannot serve."""
    g, layer, h = call.tensors.grad_x_out, call.tensors.x_layer_out, call.tensors.h_post
    if g.shape[1] > 2**31 - 2**15:
        raise ValueError(f"serves rows of up to 2**31 - 2**15 elements, not {g.shape[1]}")
    if h.shape[1] > 64:
        raise ValueError(f"serves up to 64 streams, not {h.shape[1]}")
    dense = g.stride[1] == 1 and layer.stride[1] == 1
    columns = layer.shape[1]
    align = math.gcd(16, columns, g.stride[0], layer.stride[0]) if dense else 1
    column_strides = [None if dense else m.stride[1] for m in (g, layer)]
    rows = [m.stride[0] // align for m in (g, layer)]
    return align, [columns // align, rows[0], column_strides[0], rows[1], column_strides[1],
                   *h.stride]  # fmt: skip


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Plan once; the result allocates and launches."""
    align, sizes = plan_for(call)
    batch, streams = call.tensors.h_post.shape
    columns, itemsize = call.tensors.x_layer_out.shape[1], call.tensors.grad_x_out.dtype.itemsize
    many = call.policy.batch_invariant  # as if there were: the order of a sum follows the tiling
    t = tiling or rule(MOST_SPREAD + 1 if many else batch, streams, columns, itemsize)
    fixed: tuple[Any, ...] = (*sizes, streams, align, t.block_c)
    kernel, programs = mhc_post_backward_kernel, 1
    if t.spread:
        share = triton.next_power_of_2(triton.cdiv(columns, streams))
        kernel, programs, fixed = mhc_post_backward_spread_kernel, streams, (*fixed, share)
    run = launcher(kernel, (batch, programs, 1), {"num_warps": t.num_warps}, fixed)
    allocate = allocator(call.device, call.outputs)
    wanted = call.present

    def launch(g: torch.Tensor, layer: torch.Tensor, h: torch.Tensor) -> Any:
        outputs = allocate()
        made = iter(outputs)
        run(g, layer, h, *[next(made) if w else None for w in wanted])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch
