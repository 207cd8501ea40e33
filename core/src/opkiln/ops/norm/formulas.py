"""What several normalizations share: the gradient formula, and when torch's own call fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from opkiln.spec import WIDE, Call, TensorMeta


def input_gradient(
    g: torch.Tensor, h: torch.Tensor, rstd: torch.Tensor, dims: Sequence[int], centered: bool = True
) -> torch.Tensor:
    """Pull g back through h = (x - mean) * rstd, statistics over `dims` included.

    rstd * (g - mean(g) - h * mean(g * h)); without mean(g) where h = x * rstd.
    """
    pull = h * (g * h).mean(tuple(dims), keepdim=True)
    if centered:
        pull = pull + g.mean(tuple(dims), keepdim=True)
    return rstd * (g - pull)


def masked(
    grads: Sequence[torch.Tensor | None], output_mask: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients that are wanted, None for the others."""
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


def parameter_dtype(input: torch.Tensor, weight: torch.Tensor | None) -> torch.dtype:
    """Dtype of the gradients of weight and bias: the weight's, without one the input's."""
    return input.dtype if weight is None else weight.dtype


def channel_parameter(call: Call) -> TensorMeta:
    """Meta of the gradient of a [C] weight or bias."""
    w = call.tensors.weight or call.tensors.input
    return call.new((call.tensors.input.shape[1],), w.dtype)


def channel_norm_flops(call: Call) -> int:
    """Three operations an element for the norm, one each for weight and bias."""
    t = call.tensors
    return (3 + (t.weight is not None) + (t.bias is not None)) * t.input.numel


def row_parameter(rows: str) -> Callable[[Call], TensorMeta]:
    """Meta rule of the gradient of a [*normalized_shape] weight or bias; `rows`: the input."""

    def meta(call: Call) -> TensorMeta:
        w = call.tensors.weight or getattr(call.tensors, rows)
        return call.new(call.params.normalized_shape, w.dtype)

    return meta


def one_dtype(input: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether every tensor given has the input's dtype."""
    return all(t is None or t.dtype == input.dtype for t in others)


def saves_wide(input: torch.Tensor) -> bool:
    """Whether torch's row norms hand out float32 statistics; a CPU's have the input's dtype."""
    return input.dtype in WIDE or input.is_cuda


def channel_norm_fits(input: torch.Tensor, *params: torch.Tensor | None) -> bool:
    """Whether torch's batch norm takes these dtypes and keeps its statistics in float32.

    On a CPU a 16-bit input has float32 statistics only beside float32 parameters. On a GPU torch
    2.11 writes strided running statistics to wrong places, and fails on an empty batch.
    """
    if input.numel() == 0 or not all(t is None or t.is_contiguous() for t in params):
        return False
    dtypes = {t.dtype for t in params if t is not None}
    if input.dtype in WIDE:
        return dtypes <= {input.dtype}
    return dtypes == {torch.float32} or (input.is_cuda and dtypes <= {input.dtype})
