"""mhc_post: x_out[b, i, :] = h_post[b, i] * x_layer_out[b, :] + x_res[b, i, :] for each stream i.

x_layer_out [B, C], x_res [B, N * C] f16, bf16 or f32 with any strides, h_post [B, N] f32; x_out
[B, N * C] contiguous. f32 arithmetic. One program: BLOCK_C columns of one stream of one row.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
import triton
import triton.language as tl
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher


@triton.jit
def mhc_post_kernel(
    layer_ptr, h_ptr, res_ptr, out_ptr,
    c_units, stride_lb, stride_lc, stride_hb, stride_hn, stride_rb, stride_rc,
    N: tl.constexpr, ALIGN: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Grid (B, N, cdiv(C, BLOCK_C)). C = c_units * ALIGN and the row strides in units of ALIGN, so
    that the compiler knows what they are divisible by; a column stride of None means dense.
    """
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    C = c_units * ALIGN
    offs_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    layer_offs = offs_c
    res_offs = stream * C + offs_c
    if stride_lc is not None:
        layer_offs = layer_offs.to(tl.int64) * stride_lc
    if stride_rc is not None:
        res_offs = res_offs.to(tl.int64) * stride_rc
    res = tl.load(res_ptr + row * stride_rb * ALIGN + res_offs, mask=mask_c)
    layer = tl.load(layer_ptr + row * stride_lb * ALIGN + layer_offs, mask=mask_c)
    h = tl.load(h_ptr + row * stride_hb + stream * stride_hn)
    out = h * layer.to(tl.float32) + res.to(tl.float32)
    out_ptrs = out_ptr + row * N * C + stream * C + offs_c
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_c)


def layout(call: Any) -> tuple[int, list[int | None]]:
    """ALIGN, and the kernel's size and stride arguments."""
    layer, h, res = (call.tensors.x_layer_out, call.tensors.h_post, call.tensors.x_res)
    columns = layer.shape[1]
    dense = [m.stride[1] == 1 for m in (layer, res)]
    align = math.gcd(16, columns, layer.stride[0], res.stride[0]) if all(dense) else 1
    column_strides = [None if all(dense) else m.stride[1] for m in (layer, res)]
    return align, [
        columns // align,
        layer.stride[0] // align,
        column_strides[0],
        *h.stride,
        res.stride[0] // align,
        column_strides[1],
    ]


@dataclass(frozen=True, slots=True)
class Tiling:
    """fixed: sizes and strides are compiled in."""

    block_c: int
    num_warps: int
    fixed: bool = False


def rule(batch: int, invariant: bool = False) -> Tiling:
    """Latency is all there is: an access a thread; one row is spread over more CTAs.

    invariant: the same for any number of rows.
    """
    return Tiling(1024, 4) if batch > 1 or invariant else Tiling(512, 1)


@functools.cache
def tuning_rows() -> tuple[dict[str, Any], ...]:
    """The rows of tuning/sm90.json."""
    text = resources.files("opkiln_misc").joinpath("tuning/sm90.json").read_text("utf-8")
    return tuple(json.loads(text)["rows"])


def tiling_of(call: Any) -> Tiling:
    """The table's for these sizes of dense tensors, or the rule's."""
    layer, h, res = call.tensors.x_layer_out, call.tensors.h_post, call.tensors.x_res
    batch, streams = h.shape
    if all(m.stride == (m.shape[1], 1) for m in (layer, h, res)):
        key = {"streams": streams, "columns": layer.shape[1], "itemsize": res.dtype.itemsize}
        for row in tuning_rows():
            if all(row[k] == v for k, v in key.items()):
                return Tiling(**row["use"])
    return rule(batch, call.policy.batch_invariant)


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., torch.Tensor]:
    """Plan once; the result allocates and launches."""
    batch, streams = call.tensors.h_post.shape
    columns = call.tensors.x_layer_out.shape[1]
    t = tiling or tiling_of(call)
    block_c, num_warps = t.block_c, t.num_warps
    align, arguments = layout(call)
    sizes: list[Any] = list(arguments)
    if t.fixed:
        sizes = [None if size is None else tl.constexpr(size) for size in sizes]
    grid = (batch, streams, triton.cdiv(columns, block_c))
    fixed = (*sizes, streams, align, block_c)
    run = launcher(mhc_post_kernel, grid, {"num_warps": num_warps}, fixed)
    allocate = allocator(call.device, call.outputs)

    def launch(layer: torch.Tensor, h: torch.Tensor, res: torch.Tensor) -> torch.Tensor:
        (out,) = allocate()
        run(layer, h, res, out)
        return out

    return launch
