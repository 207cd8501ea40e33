"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opkiln import policy
from opkiln.errors import ArgumentError
from opkiln.functional.arguments import bind, integer, ints, tensor
from opkiln.road import Bound, run

Tensor = torch.Tensor
Ints = int | Sequence[int]
Padding = Ints | str


def allow_tf32() -> bool:
    """Whether the policy in force lets float32 convolutions use TF32; a constant of a trace."""
    return policy.current().allow_tf32


allow_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as road.policy_of_trace


def padding_pairs(
    op: str,
    padding: Padding,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    """Zeros before and after each dim; of an odd number of zeros 'same' puts one more after."""
    n = len(dilation)
    if not isinstance(padding, str):
        return tuple(p for p in ints(op, "padding", padding, n) for _ in (0, 1))
    if padding == "valid":
        return (0,) * (2 * n)
    if padding != "same":
        raise ArgumentError(f"{op}: padding must be ints, 'valid' or 'same', got {padding!r}")
    if any(s != 1 for s in stride):
        raise ArgumentError(f"{op}: padding='same' needs stride 1, got stride {list(stride)}")
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=False)]
    return tuple(p for total in totals for p in (total // 2, total - total // 2))


def _conv(
    n: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
) -> Bound:
    op = f"conv{n}d"
    strides = ints(op, "stride", stride, n)
    dilations = ints(op, "dilation", dilation, n)
    kernel = tensor(op, "weight", weight).shape[2:]
    return bind(
        op,
        input,
        weight,
        bias,
        stride=strides,
        padding=padding_pairs(op, padding, kernel, strides, dilations),
        dilation=dilations,
        groups=integer(op, "groups", groups),
        allow_tf32=allow_tf32(),
    )


def _conv1d(*args: Any) -> Bound:
    return _conv(1, *args)


def _conv2d(*args: Any) -> Bound:
    return _conv(2, *args)


def _conv3d(*args: Any) -> Bound:
    return _conv(3, *args)


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    backend: str | None = None,
) -> Tensor:
    """Correlate input [N, C, L] or [C, L] with weight [O, C / groups, K]; add bias [O].

    padding: zeros on both sides, 'valid' (none), or 'same' (as many as keep the length; stride 1;
    an odd one goes to the right). All tensors of one dtype: float16, bfloat16, float32, float64;
    sums in float32, for float32 in IEEE arithmetic (TF32 only under `opkiln.use(allow_tf32=True)`).
    Result in the input's dtype, [N, O, positions]. Gradients: input, weight, bias; the backward
    keeps input and weight. An empty batch is allowed. Raises ArgumentError for channels, groups or
    kernels that do not fit, TypeError for no ints.
    """
    return run(_conv1d, (input, weight, bias), (stride, padding, dilation, groups), backend)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    backend: str | None = None,
) -> Tensor:
    """Correlate input [N, C, H, W] or [C, H, W] with weight [O, C / groups, KH, KW].

    As conv1d, with one int for both spatial dims or one each; channels_last iff the input is.
    """
    return run(_conv2d, (input, weight, bias), (stride, padding, dilation, groups), backend)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    backend: str | None = None,
) -> Tensor:
    """Correlate input [N, C, D, H, W] or [C, D, H, W] with weight [O, C / groups, KD, KH, KW].

    As conv1d, with one int for all spatial dims or one each; channels_last_3d iff the input is.
    """
    return run(_conv3d, (input, weight, bias), (stride, padding, dilation, groups), backend)
