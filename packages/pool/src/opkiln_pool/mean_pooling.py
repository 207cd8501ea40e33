"""Mean of chunks of tokens.

out[b, i, h, d] = mean over the tokens t of chunk i of x[b, t, h, d]. Dense: chunks of chunk_size
tokens, the last one shorter. With sequences (B = 1): chunks restart at each; the device looks chunk
i up in the offsets; chunks past the last are 0. Sums in f32.

A program sums a chunk over BLOCK_N columns (h, d), STEP tokens at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher

from opkiln_pool.mean_plan import plan_for


@triton.jit
def find_chunk(offsets_ptr, stride_o, sequences, chunk, chunk_size, BLOCK_S: tl.constexpr):
    """First token and length of a chunk; length 0 past the last."""
    first = tl.full([], 0, tl.int64)
    length = tl.full([], 0, tl.int64)
    before = tl.full([], 0, tl.int64)  # chunks of the sequences so far
    for s in range(0, sequences, BLOCK_S):
        sequence = s + tl.arange(0, BLOCK_S)
        mask = sequence < sequences
        at = offsets_ptr + sequence.to(tl.int64) * stride_o
        start = tl.load(at, mask=mask, other=0).to(tl.int64)
        end = tl.load(at + stride_o, mask=mask, other=0).to(tl.int64)
        chunks = (end - start + chunk_size - 1) // chunk_size
        within = chunk - before - (tl.cumsum(chunks, 0) - chunks)
        here = (within >= 0) & (within < chunks)
        token = start + within * chunk_size
        first += tl.sum(tl.where(here, token, 0), 0)
        length += tl.sum(tl.where(here, tl.minimum(end - token, chunk_size), 0), 0)
        before += tl.sum(chunks, 0)
    return first, length


@triton.jit(do_not_specialize=["tokens", "chunks", "sequences", "chunk_size"])
def mean_kernel(
    x_ptr, offsets_ptr, out_ptr,  # offsets_ptr None where dense
    tokens, chunks, sequences, chunk_size, stride_o,
    stride_b, stride_t, stride_h, stride_d,  # b, t, h in units of ALIGN; d None where dense
    D: tl.constexpr, N: tl.constexpr, ALIGN: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Grid: B * chunks * cdiv(N, BLOCK_N). N = H * D. FLAT: the columns are one dense stretch."""
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row = tl.program_id(0) // blocks
    chunk = row % chunks
    batch = row // chunks
    cols = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = cols < N
    if offsets_ptr is not None:
        first, length = find_chunk(offsets_ptr, stride_o, sequences, chunk, chunk_size, BLOCK_S)
    else:
        first = chunk.to(tl.int64) * chunk_size
        length = tl.minimum(tokens - first, chunk_size)
    base = (batch.to(tl.int64) * stride_b + first * stride_t) * ALIGN
    if FLAT:
        x_ptrs = x_ptr + base + cols
    elif stride_d is None:
        x_ptrs = x_ptr + base + (cols // D).to(tl.int64) * stride_h * ALIGN + cols % D
    else:
        x_ptrs = x_ptr + base + (cols // D).to(tl.int64) * stride_h * ALIGN
        x_ptrs += (cols % D).to(tl.int64) * stride_d
    steps = tl.arange(0, STEP)[:, None]
    total = tl.full([STEP, BLOCK_N], 0.0, tl.float32)
    # A chunk is at most chunk_size long, so 32 bits count its tokens.
    for t in tl.range(0, length.to(tl.int32), STEP, num_stages=STAGES):
        mask = (t + steps < length) & mask_n[None, :]
        ptrs = x_ptrs[None, :] + (t + steps).to(tl.int64) * stride_t * ALIGN
        total += tl.load(ptrs, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(length, 1).to(tl.float32)
    out_ptrs = out_ptr + row.to(tl.int64) * N + cols
    tl.store(out_ptrs, mean.to(out_ptr.dtype.element_ty), mask=mask_n)


def prepare(call: Any) -> Callable[..., Any]:
    """Plan a mean_pooling call once; the result allocates and launches."""
    plan = plan_for(call)
    options = {"num_warps": plan.tiling.num_warps}
    run = launcher(mean_kernel, plan.grid, options, plan.arguments)
    allocate = allocator(call.device, call.outputs)

    def launch(x: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        (out,) = allocate()
        run(x, offsets, out)
        return out

    return launch
