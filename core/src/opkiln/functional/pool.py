"""Pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.functional.arguments import bind, flag, integer, ints, tensor
from opkiln.ops.pool.mean_pooling import count_chunks
from opkiln.road import Bound, is_direct, run

Tensor = torch.Tensor
Ints = int | Sequence[int]
OutputSize = int | None | Sequence[int | None]


def _windows(op: str, ndim: int, kernel_size: Any, stride: Any, padding: Any) -> dict[str, Any]:
    """The canonical parameters that windows of every pool have; no stride: windows side by side."""
    kernel = ints(op, "kernel_size", kernel_size, ndim)
    absent = stride is None or (isinstance(stride, tuple | list) and not stride)
    return {
        "kernel_size": kernel,
        "stride": kernel if absent else ints(op, "stride", stride, ndim),
        "padding": ints(op, "padding", padding, ndim),
    }


def _max_pool(
    input: Tensor,
    ndim: int,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    return_indices: bool,
) -> Bound:
    op = f"max_pool{ndim}d"
    return bind(
        f"{op}_indices" if return_indices else op,
        input,
        **_windows(op, ndim, kernel_size, stride, padding),
        dilation=ints(op, "dilation", dilation, ndim),
        ceil_mode=flag(op, "ceil_mode", ceil_mode),
    )


def max_pool1d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    backend: str | None = None,
) -> Any:
    """Maximum over windows of [N, C, L] or [C, L]. See max_pool2d."""
    args = (1, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return run(_max_pool, (input,), args, backend)


def max_pool2d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    backend: str | None = None,
) -> Any:
    """Maximum over windows of [N, C, H, W] or [C, H, W].

    input: float16, bfloat16, float32 or float64; the result has its dtype and is channels_last iff
    the input is. stride=None: kernel_size. padding: at most half of kernel_size, never chosen as
    the maximum. ceil_mode: the last window may hang over the padding, but not start in it.
    return_indices: also the int64 index of each maximum, flat over the input's plane. NaN wins
    (several: the last), ties go to the first index. Gradient: input, deterministic; the backward
    keeps where in its window each maximum lies: 8 bits for windows of up to 256 taps, 16 up to
    32,768, else 32.
    Raises ArgumentError for windows that do not fit, TypeError for sizes that are not ints.
    """
    args = (2, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return run(_max_pool, (input,), args, backend)


def max_pool3d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    backend: str | None = None,
) -> Any:
    """Maximum over windows of [N, C, D, H, W] or [C, D, H, W]. See max_pool2d."""
    args = (3, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    return run(_max_pool, (input,), args, backend)


def _avg_pool(
    input: Tensor,
    ndim: int,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: Any = None,
) -> Bound:
    op = f"avg_pool{ndim}d"
    params = _windows(op, ndim, kernel_size, stride, padding)
    params |= {
        "ceil_mode": flag(op, "ceil_mode", ceil_mode),
        "count_include_pad": flag(op, "count_include_pad", count_include_pad),
    }
    if ndim > 1:
        given = divisor_override is not None
        params["divisor_override"] = (
            integer(op, "divisor_override", divisor_override) if given else None
        )
    return bind(op, input, **params)


def avg_pool1d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    *,
    backend: str | None = None,
) -> Tensor:
    """Mean over windows of [N, C, L] or [C, L]. See avg_pool2d; there is no divisor_override."""
    args = (1, kernel_size, stride, padding, ceil_mode, count_include_pad)
    out: Tensor = run(_avg_pool, (input,), args, backend)
    return out


def avg_pool2d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Mean over windows of [N, C, H, W] or [C, H, W].

    input: float16, bfloat16, float32 or float64; the result has its dtype and is channels_last iff
    the input is. Sums in float32. stride=None: kernel_size; padding: at most half of kernel_size.
    A sum is divided by divisor_override where given (not zero), else by the elements of its window
    inside the padded input (count_include_pad) or inside the input. What ceil_mode lets hang over
    the padding is not counted. Gradient: input, deterministic; nothing is kept for it.
    Raises ArgumentError for windows that do not fit, TypeError for sizes that are not ints.
    """
    args = (2, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    out: Tensor = run(_avg_pool, (input,), args, backend)
    return out


def avg_pool3d(
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Mean over windows of [N, C, D, H, W] or [C, D, H, W]. See avg_pool2d."""
    args = (3, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    out: Tensor = run(_avg_pool, (input,), args, backend)
    return out


def _output_size(op: str, input: Tensor, output_size: Any) -> tuple[int, ...]:
    """Two sizes; None keeps the input's."""
    sizes = output_size if isinstance(output_size, tuple | list) else (output_size,) * 2
    if tensor(op, "input", input).ndim < 2 or len(sizes) != 2:
        raise ArgumentError(
            f"{op}: output_size must be one int or two for an input [N, C, H, W], got "
            f"{output_size} for shape {list(input.shape)}"
        )
    return tuple(
        size if given is None else integer(op, "output_size", given)
        for given, size in zip(sizes, input.shape[-2:], strict=True)
    )


def _adaptive_pool(input: Tensor, op: str, output_size: Any) -> Bound:
    return bind(op, input, output_size=_output_size(op, input, output_size))


def adaptive_avg_pool2d(
    input: Tensor, output_size: OutputSize, *, backend: str | None = None
) -> Tensor:
    """Mean over windows that divide the plane of [N, C, H, W] or [C, H, W] into output_size.

    output_size: h or (h, w), None: the input's; window i of a dim is [floor(i * H / h),
    ceil((i + 1) * H / h)). Zero gives an empty result. Result in the input's dtype, channels_last
    iff the input is; sums in float32. Gradient: input, deterministic; nothing is kept for it.
    Raises ArgumentError for negative sizes or an empty plane.
    """
    out: Tensor = run(_adaptive_pool, (input,), ("adaptive_avg_pool2d", output_size), backend)
    return out


def adaptive_max_pool2d(
    input: Tensor,
    output_size: OutputSize,
    return_indices: bool = False,
    *,
    backend: str | None = None,
) -> Any:
    """Maximum over the windows of adaptive_avg_pool2d.

    return_indices: also the int64 index of each maximum, flat over the input's plane. NaN wins
    (several: the last), ties go to the first index. Gradient: input, deterministic; the backward
    keeps the window offsets, as max_pool2d's.
    """
    op = "adaptive_max_pool2d_indices" if return_indices else "adaptive_max_pool2d"
    return run(_adaptive_pool, (input,), (op, output_size), backend)


def _mean_pooling(
    input: Tensor, cu_seqlens: Tensor | None, chunk_size: Any, num_chunks: Any
) -> Bound:
    op = "mean_pooling"
    return bind(
        op,
        input,
        cu_seqlens,
        chunk_size=integer(op, "chunk_size", chunk_size),
        num_chunks=None if num_chunks is None else integer(op, "num_chunks", num_chunks),
    )


def mean_pooling(
    input: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    *,
    num_chunks: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mean over runs of `chunk_size` tokens: [B, T, H, D] -> [B, chunks, H, D].

    cu_seqlens: [sequences + 1] int32 or int64, rising from 0 to T; then B = 1 and chunks restart at
    every sequence. num_chunks: how many chunks all sequences have; given, the call does not wait
    for the GPU and can be captured (chunks past the last are zero); absent, it costs one sync.
    Sums in float32; the last chunk of a sequence is divided by its own length. Gradient: input;
    the backward keeps cu_seqlens.
    """
    tensors = (input, cu_seqlens)
    if num_chunks is None and cu_seqlens is not None and is_direct(tensors):
        chunk_size = integer("mean_pooling", "chunk_size", chunk_size)
        num_chunks = count_chunks(input, cu_seqlens, max(chunk_size, 1))
    return run(_mean_pooling, tensors, (chunk_size, num_chunks), backend)
