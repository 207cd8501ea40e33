"""Gradient of the mean of chunks of tokens.

grad[b, t, h, d] = g[b, i, h, d] / length of chunk i, for every token t of chunk i. Dense: chunks of
chunk_size tokens, the last one shorter. With sequences (B = 1): chunks restart at each; the device
looks chunk i up in the offsets.

A program writes a part of a chunk's tokens, BLOCK_N columns (h, d) wide, STEP tokens at a time.
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

from opkiln_pool.mean_plan import MAX_SEQUENCES
from opkiln_pool.mean_pooling import find_chunk
from opkiln_pool.pool_plan import power_of_two


@dataclass(frozen=True, slots=True)
class MeanBackwardTiling:
    """block_n: columns a program. tokens: tokens a program. step: of these, stored at a time."""

    block_n: int
    num_warps: int
    tokens: int
    step: int = 1
    cache: str = ""


@triton.jit(do_not_specialize=["tokens", "chunks", "sequences", "chunk_size", "parts"])
def mean_backward_kernel(
    g_ptr, offsets_ptr, out_ptr,  # offsets_ptr None where dense
    tokens, chunks, sequences, chunk_size, parts, stride_o,
    stride_b, stride_i, stride_h, stride_d,  # b, i, h in units of ALIGN; d None where dense
    D: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, BLOCK_S: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: B * chunks * parts * cdiv(N, BLOCK_N). N = H * D. parts: programs along a chunk, of
    TOKENS tokens each. FLAT: the columns of g are one dense stretch.
    """
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = cols < N
    part = tl.program_id(0) // blocks % parts
    row = tl.program_id(0) // blocks // parts
    chunk = row % chunks
    batch = (row // chunks).to(tl.int64)
    base = (batch * stride_b + chunk.to(tl.int64) * stride_i) * ALIGN
    if FLAT:
        g_ptrs = g_ptr + base + cols
    elif stride_d is None:
        g_ptrs = g_ptr + base + (cols // D).to(tl.int64) * stride_h * ALIGN + cols % D
    else:
        g_ptrs = g_ptr + base + (cols // D).to(tl.int64) * stride_h * ALIGN
        g_ptrs += (cols % D).to(tl.int64) * stride_d
    g = tl.load(g_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    if offsets_ptr is not None:
        first, length = find_chunk(offsets_ptr, stride_o, sequences, chunk, chunk_size, BLOCK_S)
    else:
        first = chunk.to(tl.int64) * chunk_size
        length = tl.minimum(tokens - first, chunk_size)
    share = (g / tl.maximum(length, 1).to(tl.float32)).to(out_ptr.dtype.element_ty)
    values = tl.broadcast_to(share[None, :], [STEP, BLOCK_N])
    left = tl.minimum(length, tokens - first).to(tl.int32)  # offsets may be wrong
    rows = part * TOKENS + tl.arange(0, STEP)[:, None]
    out_ptrs = out_ptr + (batch * tokens + first + rows) * N + cols[None, :]
    for t in tl.static_range(0, TOKENS, STEP):
        mask = (rows + t < left) & mask_n[None, :]
        tl.store(out_ptrs + t * N, values, mask=mask, cache_modifier=CACHE)


def rule(itemsize: int, columns: int, longest: int) -> MeanBackwardTiling:
    """A vector of columns a thread, and at most 32 tokens: dense-mainstream took 33.57 us so on an
    H200, and 35.04 with twice the warps and half the tokens.
    """
    vector = 16 // itemsize
    block_n = min(power_of_two(columns), 64 * vector)
    num_warps = max(block_n // (32 * vector), 1)
    return MeanBackwardTiling(block_n, num_warps, min(power_of_two(longest), 32))


def plan_for(
    call: Any, tiling: MeanBackwardTiling | None = None
) -> tuple[MeanBackwardTiling, int, tuple[Any, ...]]:
    """The tiling, the programs, and the kernel's arguments after its tensors."""
    g, offsets, p = call.tensors.grad_out, call.tensors.cu_seqlens, call.params
    batch, tokens, heads, dim = p.input_shape
    # No chunk is longer than all tokens, whatever the size asked for.
    chunk_size = max(min(p.chunk_size, tokens), 1)
    columns, chunks, itemsize = heads * dim, g.shape[1], g.dtype.itemsize
    dense_d = g.stride[3] == 1 or dim == 1
    flat = dense_d and (heads == 1 or g.stride[2] == dim)
    align = 1
    if dense_d and g.aligned:
        others = [s for n, s in zip(g.shape[:3], g.stride[:3], strict=True) if n > 1]
        align = math.gcd(16 // itemsize, dim, *others)
    t = tiling or rule(itemsize, columns, chunk_size)
    sequences = 0 if offsets is None else offsets.shape[0] - 1
    parts = -(-chunk_size // t.tokens)
    arguments = (
        tokens, chunks, sequences, chunk_size, parts, 0 if offsets is None else offsets.stride[0],
        *[s // align for s in g.stride[:3]], None if dense_d else g.stride[3],
        dim, columns, align, flat, t.block_n, t.tokens, t.step,
        min(power_of_two(max(sequences, 1)), MAX_SEQUENCES), t.cache,
    )  # fmt: skip
    return t, batch * chunks * parts * -(-columns // t.block_n), arguments


def prepare(call: Any, tiling: MeanBackwardTiling | None = None) -> Callable[..., Any]:
    """Plan the backward of mean_pooling once; the result allocates and launches."""
    if not call.outputs:  # the mask wants no gradient
        return lambda *tensors: ()
    t, programs, arguments = plan_for(call, tiling)
    options = {"num_warps": t.num_warps}
    run = launcher(mean_backward_kernel, (programs, 1, 1), options, arguments)
    allocate = allocator(call.device, call.outputs)

    def launch(g: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        (out,) = allocate()
        run(g, offsets, out)
        return out

    return launch
