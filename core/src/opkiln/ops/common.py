"""What the references of several ops share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch

from opkiln.spec import Call, TensorMeta, wide_dtype


def wide(t: torch.Tensor) -> torch.Tensor:
    """`t` in the dtype that sums are kept in: float64 for float64, else float32."""
    return t.to(wide_dtype(t.dtype))


@overload
def wide_like(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor: ...
@overload
def wide_like(t: None, x: torch.Tensor) -> None: ...
def wide_like(t: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """`t` in the dtype of the statistics of `x`; None stays None."""
    return None if t is None else t.to(wide_dtype(x.dtype))


def affine(y: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """y * weight + bias, either absent; broadcast over y."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@overload
def per_channel(t: torch.Tensor, ndim: int) -> torch.Tensor: ...
@overload
def per_channel(t: None, ndim: int) -> None: ...
def per_channel(t: torch.Tensor | None, ndim: int) -> torch.Tensor | None:
    """[C] -> [1, C, 1, ...] of `ndim` dims."""
    return None if t is None else t.view(1, -1, *[1] * (ndim - 2))


def statistics(x: torch.Tensor, dims: Sequence[int], eps: float) -> tuple[torch.Tensor, ...]:
    """Mean and 1 / sqrt(variance + eps) over `dims`, kept as size-1 dims; two passes over x."""
    mean = x.mean(tuple(dims), keepdim=True)
    var = (x - mean).square().mean(tuple(dims), keepdim=True)
    return mean, torch.rsqrt(var + eps)


def row_statistic(call: Call) -> TensorMeta:
    """Meta of a per-row statistic: the leading dims of `input`, before normalized_shape."""
    x = call.tensors.input
    rows = x.shape[: x.ndim - len(call.params.normalized_shape)]
    return call.new(rows, wide_dtype(x.dtype))


def row_length(call: Call) -> int:
    return math.prod(call.params.normalized_shape)
