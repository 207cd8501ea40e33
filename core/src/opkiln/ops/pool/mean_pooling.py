"""Mean pooling over chunks of tokens.

input [B, T, H, D] -> out [B, chunks, H, D]: the mean of each run of `chunk_size` tokens; the last
run of a sequence may be shorter and is divided by its own length. With `cu_seqlens` (B = 1)
chunks restart at every sequence. Sums in float32.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.common import wide
from opkiln.ops.derive import with_backward
from opkiln.spec import (
    FLOAT,
    INDEX,
    Call,
    DataSize,
    OpSpec,
    OutputSpec,
    ParamSpec,
    TensorMeta,
    TensorSpec,
    wide_dtype,
)


def chunks_of_sequences(cu_seqlens: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """Chunks of each sequence, int64 [sequences]."""
    return (cu_seqlens.long().diff() + chunk_size - 1) // chunk_size


def count_chunks(
    input: torch.Tensor, cu_seqlens: torch.Tensor, chunk_size: int, num_chunks: int | None = None
) -> int:
    """Chunks of all sequences together; one sync on a GPU."""
    return int(chunks_of_sequences(cu_seqlens, chunk_size).sum())


def chunk_bounds(
    tokens: int, cu_seqlens: torch.Tensor, chunk_size: int, num_chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """First token and length of each chunk, [num_chunks]; chunks past the last have length 0."""
    per_sequence = chunks_of_sequences(cu_seqlens, chunk_size)
    ends = per_sequence.cumsum(0)
    chunk = torch.arange(num_chunks, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, chunk, right=True)
    exists = sequence < per_sequence.numel()
    sequence = sequence.clamp(max=per_sequence.numel() - 1)
    within = chunk - (ends - per_sequence)[sequence]
    first = cu_seqlens.long()[sequence] + within * chunk_size
    length = (cu_seqlens.long()[sequence + 1] - first).clamp(0, chunk_size)
    return first.clamp(0, max(tokens - 1, 0)), torch.where(exists, length, 0)


def bounds_of(
    input: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    num_chunks: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = input.shape[1]
    if cu_seqlens is not None:
        if num_chunks is None:
            num_chunks = count_chunks(input, cu_seqlens, chunk_size)
        return chunk_bounds(tokens, cu_seqlens, chunk_size, num_chunks)
    first = torch.arange(0, tokens, chunk_size, device=input.device)
    return first, (tokens - first).clamp(max=chunk_size)


def reference(
    input: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    num_chunks: int | None,
) -> torch.Tensor:
    x = wide(input)
    first, length = bounds_of(input, cu_seqlens, chunk_size, num_chunks)
    total = x.new_zeros((x.shape[0], first.numel(), *x.shape[2:]))
    if x.shape[1] == 0:
        return total.to(input.dtype)
    for i in range(min(chunk_size, x.shape[1])):  # token by token: a fixed order of the sums
        token = x[:, (first + i).clamp(max=x.shape[1] - 1)]
        total = total + torch.where((i < length).view(-1, 1, 1), token, 0)
    return (total / length.clamp(min=1).view(-1, 1, 1)).to(input.dtype)


def native(
    input: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    num_chunks: int | None,
) -> torch.Tensor:
    batch, tokens = input.shape[:2]
    if cu_seqlens is None and tokens % chunk_size == 0:
        chunks = input.reshape(batch, tokens // chunk_size, chunk_size, *input.shape[2:])
        return chunks.mean(2, dtype=wide_dtype(input.dtype))
    first, length = bounds_of(input, cu_seqlens, chunk_size, num_chunks)
    widest = min(chunk_size, tokens)
    if first.numel() * widest > 4 * tokens:  # short sequences: one gather would be mostly padding
        return reference(input, cu_seqlens, chunk_size, num_chunks)
    within = torch.arange(widest, device=input.device)
    token = (first[:, None] + within).clamp(max=max(tokens - 1, 0))
    outside = (within >= length[:, None]).view(*token.shape, 1, 1)
    total = input[:, token].masked_fill(outside, 0).sum(2, dtype=wide_dtype(input.dtype))
    return total / length.clamp(min=1).view(-1, 1, 1)


def pooled(call: Call) -> TensorMeta:
    x, p = call.tensors.input, call.params
    chunks = p.num_chunks if call.tensors.cu_seqlens else -(-x.shape[1] // p.chunk_size)
    return call.new((x.shape[0], chunks, *x.shape[2:]), x.dtype)


def check(call: Call) -> None:
    t, p = call.tensors, call.params
    if p.chunk_size < 1:
        raise ArgumentError(f"mean_pooling: chunk_size must be at least 1, got {p.chunk_size}")
    if t.cu_seqlens is None:
        if p.num_chunks is not None:
            raise ArgumentError("mean_pooling: num_chunks goes with cu_seqlens, which is absent")
        return
    if t.input.shape[0] != 1:
        raise ArgumentError(
            f"mean_pooling: with cu_seqlens the batch size must be 1, got {t.input.shape[0]}"
        )
    if t.cu_seqlens.shape[0] < 2:
        raise ArgumentError("mean_pooling: cu_seqlens needs at least two entries")
    if p.num_chunks is None or p.num_chunks < 0:
        raise ArgumentError(f"mean_pooling: num_chunks must be at least 0, got {p.num_chunks}")


def check_values(
    input: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    num_chunks: int | None,
) -> None:
    """cu_seqlens rises from 0 to T, and num_chunks holds every chunk."""
    if cu_seqlens is None or num_chunks is None:
        return
    offsets = cu_seqlens.tolist()
    rising = all(a <= b for a, b in pairwise(offsets))
    if not rising or offsets[0] != 0 or offsets[-1] != input.shape[1]:
        raise ArgumentError(
            f"mean_pooling: cu_seqlens must rise from 0 to {input.shape[1]}, the number of tokens"
        )
    needed = count_chunks(input, cu_seqlens, chunk_size)
    if num_chunks < needed:
        raise ArgumentError(
            f"mean_pooling: num_chunks is {num_chunks}, the sequences have {needed} chunks"
        )


def backward_reference(
    grad_out: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunk_size: int,
    num_chunks: int | None,
    input_shape: tuple[int, ...],
    output_mask: list[bool],
) -> Any:
    """Every token gets its chunk's gradient divided by the chunk's length."""
    token = torch.arange(input_shape[1], device=grad_out.device)
    if cu_seqlens is None:
        chunk = token // chunk_size
        length = (input_shape[1] - chunk * chunk_size).clamp(max=chunk_size)
    else:
        offsets = cu_seqlens.long()
        per_sequence = chunks_of_sequences(offsets, chunk_size)
        sequence = torch.searchsorted(offsets[1:].contiguous(), token, right=True)
        within = (token - offsets[sequence]) // chunk_size
        chunk = (per_sequence.cumsum(0) - per_sequence)[sequence] + within
        left = offsets[sequence + 1] - offsets[sequence] - within * chunk_size
        length = left.clamp(max=chunk_size)
    share = wide(grad_out)[:, chunk] / length.view(-1, 1, 1)
    return (share.to(grad_out.dtype),)


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="MeanPoolingForward",
        name="mean_pooling",
        family="pool",
        tensors=(
            TensorSpec("input", "B T H D", FLOAT),
            TensorSpec("cu_seqlens", "offsets", INDEX, optional=True),
        ),
        params=(ParamSpec("chunk_size", "int"), ParamSpec("num_chunks", "int?")),
        outputs=(OutputSpec("out", pooled),),
        reference=reference,
        native=native,
        flops=lambda call: call.params.chunk_size * pooled(call).numel,
        check=check,
        check_values=check_values,
        data_size=DataSize("num_chunks", "cu_seqlens", count_chunks),
        reduction=lambda call: call.params.chunk_size,
        autocast="fp32",
        doc="Mean over chunks of tokens, dense or variable length.",
    ),
    wrt=("input",),
    needs=("cu_seqlens",),
    reference=backward_reference,
    flops=lambda call: call.tensors.grad_out.numel,
)
SPECS = (SPEC, BACKWARD)
