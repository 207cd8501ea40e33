"""The rotation kernel up to e84a7af, with float32 tables of cosines and sines, for rope.py.

fence: with the barrier that the present kernel has behind its loads of x.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher
from opkiln.ops.rope.rotation import cached_cos_sin
from opkiln_rope.rotation import (
    load_pairs,
    load_tile,
    numbers_of,
    rule_of,
    store_pairs,
    tile_mask,
)
from opkiln_rope.rotation_plan import Plan, Tiling, plan_for


@triton.jit(do_not_specialize=["tokens", "S", "offset", "last_position"])
def table_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, ids_ptr,
    x_strides, out_strides, stride_xd, stride_od, stride_id,
    tokens, S, H, half_units, rest_units, offset, last_position,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, BATCHED: tl.constexpr, REST: tl.constexpr,
    EVEN_H: tl.constexpr, EVEN_P: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, STEPS: tl.constexpr,
    EVICT: tl.constexpr, STORE_CACHE: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    half = half_units * ALIGN
    if EVEN_P:
        half = BLOCK_P
    BLOCK_R: tl.constexpr = BLOCK_T * BLOCK_H
    row = tl.arange(0, BLOCK_R)[:, None]
    token = tl.program_id(0)
    if BLOCK_T > 1:
        token = token * BLOCK_T + row // BLOCK_H
    seq = token
    x_tokens = seq.to(tl.int64) * x_strides[1]
    out_tokens = seq.to(tl.int64) * out_strides[1]
    if BATCHED:
        batch = (token // S).to(tl.int64)
        seq = token % S
        x_tokens = seq.to(tl.int64) * x_strides[1] + batch * x_strides[0]
        out_tokens = seq.to(tl.int64) * out_strides[1] + batch * out_strides[0]
    head = tl.program_id(1) * (BLOCK_H * STEPS) + row % BLOCK_H
    mask_t = None
    if BLOCK_T > 1:
        mask_t = token < tokens
    a = ()
    b = ()
    for i in tl.static_range(STEPS):
        head_i = head + i * BLOCK_H
        rows = x_ptr + (x_tokens + head_i.to(tl.int64) * x_strides[2]) * ALIGN
        mask = tile_mask(mask_t, head_i, H, EVEN_H)
        a_i, b_i = load_pairs(
            rows, mask, half, stride_xd, INTERLEAVED, EVEN_P, BLOCK_R, BLOCK_P, EVICT
        )
        a = a + (a_i,)
        b = b + (b_i,)
    position = seq + offset
    if ids_ptr is not None:
        position = tl.load(ids_ptr + seq.to(tl.int64) * stride_id, mask=mask_t)
        position = tl.minimum(tl.maximum(position, 0), last_position)
    cols = tl.arange(0, BLOCK_P)[None, :]
    entry = tl.broadcast_to(position.to(tl.int64) * half + cols, [BLOCK_R, BLOCK_P])
    mask_p = tile_mask(mask_t, cols, half, EVEN_P)
    if mask_p is not None:
        mask_p = tl.broadcast_to(mask_p, [BLOCK_R, BLOCK_P])
    cos = load_tile(cos_ptr + entry, mask_p, "")
    sin = load_tile(sin_ptr + entry, mask_p, "")
    if FENCE:
        tl.debug_barrier()
    for i in tl.static_range(STEPS):
        head_i = head + i * BLOCK_H
        rows = out_ptr + (out_tokens + head_i.to(tl.int64) * out_strides[2]) * ALIGN
        mask = tile_mask(mask_t, head_i, H, EVEN_H)
        a_i = a[i].to(tl.float32)
        b_i = b[i].to(tl.float32)
        store_pairs(
            rows, a_i * cos - b_i * sin, b_i * cos + a_i * sin, mask, half, stride_od,
            INTERLEAVED, EVEN_P, BLOCK_R, BLOCK_P, STORE_CACHE,
        )  # fmt: skip


def fixed_arguments(plan: Plan, fence: bool) -> tuple[Any, ...]:
    return (*plan.sizes, *plan.constexprs().values(), fence)


def prepare(call: Any, tiling: Tiling, fence: bool) -> Callable[..., Any]:
    """Forward alone, all channels turned."""
    plan = plan_for(call, tiling)
    assert plan is not None and not plan.back and not plan.rest
    rule, numbers, device = rule_of(call), numbers_of(call), call.device
    positions = plan.sizes[-1] + 1
    run = launcher(table_kernel, plan.grid, plan.options(), fixed_arguments(plan, fence))
    allocate = allocator(device, call.outputs)

    def launch(x: torch.Tensor, ids: torch.Tensor | None = None) -> Any:
        (out,) = allocate()
        run(x, out, *cached_cos_sin(rule, positions, device, **numbers), ids)
        return out

    return launch
