"""All rotary embeddings: pairs (a, b) of channels turned by the angle of their token's position.

out = (a cos - b sin, b cos + a sin)     sin negated for the gradient

x [B, S, H, D] f16, bf16 or f32 with any strides; out contiguous, or x itself. The first 2 * P of D
channels turn: (a, b) are the halves of these ("half-split") or neighbours (INTERLEAVED); the rest
is copied. A token's position is offset + s, or ids[s]. f32 arithmetic.

A program turns BLOCK_H * STEPS heads of BLOCK_T tokens by angles computed once. It asks for ids,
frequencies and all of its x before it waits for any of them.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher
from opkiln.ops.rope import rules

from opkiln_rope.angles import amplitude, angles, turns
from opkiln_rope.rotation_plan import NOT_OF_THE_RULE, Plan, Tiling, plan_for

RULES: dict[str, rules.Rule] = {
    "rope_neox": rules.plain,
    "rope_non_neox": rules.plain,
    "rope_llama31": rules.llama31,
    "rope_yarn": rules.yarn,
    "rope_longrope": rules.longrope,
    "rope_neox_position_ids": rules.plain,
}


@triton.jit
def channel_offsets(start, cols, stride_d):
    """Offsets of channels start + cols; a stride of None: dense, for 16-byte accesses."""
    offs = start + cols
    if stride_d is not None:
        offs = offs.to(tl.int64) * stride_d
    return offs


@triton.jit
def load_tile(ptrs, mask, EVICT: tl.constexpr):
    if mask is None:
        tile = tl.load(ptrs, eviction_policy=EVICT)
    else:
        tile = tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICT)
    return tile


@triton.jit
def tile_mask(mask_rows, cols, size, EVEN: tl.constexpr):
    """Of the elements that exist; None where all do. mask_rows None: all rows exist."""
    if EVEN:
        mask = mask_rows
    elif mask_rows is None:
        mask = cols < size
    else:
        mask = mask_rows & (cols < size)
    return mask


@triton.jit
def load_pairs(rows, mask_rows, half, stride_d, INTERLEAVED: tl.constexpr, EVEN: tl.constexpr,
               BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, EVICT: tl.constexpr):  # fmt: skip
    """a and b [BLOCK_R, BLOCK_P] of the rows that start at `rows`."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_P)[None, :]
        mask = tile_mask(mask_rows, cols, 2 * half, EVEN)
        if mask is not None:
            mask = tl.broadcast_to(mask, [BLOCK_R, 2 * BLOCK_P])
        tile = load_tile(rows + channel_offsets(0, cols, stride_d), mask, EVICT)
        a, b = tl.split(tl.reshape(tile, [BLOCK_R, BLOCK_P, 2]))
    else:
        cols = tl.arange(0, BLOCK_P)[None, :]
        mask = tile_mask(mask_rows, cols, half, EVEN)
        if mask is not None:
            mask = tl.broadcast_to(mask, [BLOCK_R, BLOCK_P])
        a = load_tile(rows + channel_offsets(0, cols, stride_d), mask, EVICT)
        b = load_tile(rows + channel_offsets(half, cols, stride_d), mask, EVICT)
    return a, b


@triton.jit
def store_pairs(rows, a, b, mask_rows, half, stride_d, INTERLEAVED: tl.constexpr,
                EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
                STORE_CACHE: tl.constexpr):  # fmt: skip
    dtype: tl.constexpr = rows.dtype.element_ty
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_P)[None, :]
        tile = tl.reshape(tl.join(a.to(dtype), b.to(dtype)), [BLOCK_R, 2 * BLOCK_P])
        mask = tile_mask(mask_rows, cols, 2 * half, EVEN)
        ptrs = rows + channel_offsets(0, cols, stride_d)
        tl.store(ptrs, tile, mask=mask, cache_modifier=STORE_CACHE)
    else:
        cols = tl.arange(0, BLOCK_P)[None, :]
        mask = tile_mask(mask_rows, cols, half, EVEN)
        a_ptrs = rows + channel_offsets(0, cols, stride_d)
        b_ptrs = rows + channel_offsets(half, cols, stride_d)
        tl.store(a_ptrs, a.to(dtype), mask=mask, cache_modifier=STORE_CACHE)
        tl.store(b_ptrs, b.to(dtype), mask=mask, cache_modifier=STORE_CACHE)


@triton.jit(do_not_specialize=["tokens", "S", "offset", "last_position"])
def rotation_kernel(
    x_ptr, out_ptr, turns_ptr, ids_ptr,  # ids_ptr None: positions offset + s
    scale,  # of cos and sin; None: 1
    x_strides, out_strides, stride_xd, stride_od, stride_id,  # of batch, token, head; then channel
    tokens, S, H, half_units, rest_units, offset, last_position,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, BATCHED: tl.constexpr, REST: tl.constexpr,
    EVEN_H: tl.constexpr, EVEN_P: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr, STEPS: tl.constexpr,
    EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(tokens, BLOCK_T), cdiv(H, BLOCK_H * STEPS)). P = half_units * ALIGN; strides of
    batch, token and head in units of ALIGN too. BATCHED: more than one sequence of S tokens.
    """
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

    # Else ptxas, to save registers, delays loads until it has computed with what came before, and a
    # program waits for memory twice.
    tl.debug_barrier()
    position = seq + offset
    if ids_ptr is not None:
        # Unchecked on a GPU: a wrong id turns by the angle of the nearest one.
        position = tl.load(ids_ptr + seq.to(tl.int64) * stride_id, mask=mask_t)
        position = tl.minimum(tl.maximum(position, 0), last_position)
    cos, sin = angles(position, turns_ptr, half, scale, EVEN_P, BLOCK_T, BLOCK_R, BLOCK_P)
    if BACK:
        sin = -sin

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
        if REST > 0:
            cols_r = tl.arange(0, REST)[None, :]
            mask_r = tile_mask(mask, cols_r, rest_units * ALIGN, False)
            from_rows = x_ptr + (x_tokens + head_i.to(tl.int64) * x_strides[2]) * ALIGN
            rest = tl.load(from_rows + channel_offsets(2 * half, cols_r, stride_xd), mask=mask_r)
            tl.store(rows + channel_offsets(2 * half, cols_r, stride_od), rest, mask=mask_r)


def numbers_of(call: Any) -> dict[str, Any]:
    """The rule's parameters, rotary_dim among them."""
    return {k: v for k, v in vars(call.params).items() if k not in NOT_OF_THE_RULE}


def rule_of(call: Any) -> rules.Rule:
    return RULES[call.spec.forward_op or call.spec.name]


def fixed_arguments(call: Any, plan: Plan) -> tuple[Any, ...]:
    """The kernel's arguments after its tensors."""
    scale = amplitude(rule_of(call), **numbers_of(call))
    return (scale, *plan.sizes, *plan.constexprs().values())


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    if plan is None:  # a gradient that nobody asked for
        return lambda *tensors: ()
    rule, numbers = rule_of(call), numbers_of(call)
    device, returned = call.device, bool(call.outputs)
    run = launcher(rotation_kernel, plan.grid, plan.options(), fixed_arguments(call, plan))
    allocate = allocator(device, call.outputs)

    def launch(x: torch.Tensor, ids: torch.Tensor | None = None) -> Any:
        (out,) = allocate() if returned else (x,)
        run(x, out, *turns(rule, device, **numbers), ids)
        return out if returned else ()

    return launch
