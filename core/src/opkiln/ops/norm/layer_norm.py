"""Layer normalization: out = (input - mean) * rstd * weight + bias.

rstd = 1 / sqrt(variance + eps). Mean and biased variance run over the trailing dims
`normalized_shape`; all arithmetic in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from opkiln.ops.common import affine, row_length, row_statistic, statistics, wide, wide_like
from opkiln.ops.derive import with_backward
from opkiln.ops.norm.formulas import (
    input_gradient,
    masked,
    one_dtype,
    parameter_dtype,
    row_parameter,
    saves_wide,
)
from opkiln.spec import FLOAT, OpSpec, OutputSpec, ParamSpec, TensorSpec, like

Shape = tuple[int, ...]


def reference(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    x = wide(input)
    mean, rstd = statistics(x, range(-len(normalized_shape), 0), eps)
    y = affine((x - mean) * rstd, wide_like(weight, x), wide_like(bias, x))
    rows = input.shape[: input.ndim - len(normalized_shape)]
    return y.to(input.dtype), mean.view(rows), rstd.view(rows)


def native(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float,
) -> Any:
    if not one_dtype(input, weight, bias):  # refused by torch on CUDA
        return reference(input, weight, bias, normalized_shape, eps)[0]
    return torch.nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)


def native_train(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: Shape,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    if not one_dtype(input, weight, bias) or not saves_wide(input):
        return reference(input, weight, bias, normalized_shape, eps)
    out, mean, rstd = torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
    rows = input.shape[: input.ndim - len(normalized_shape)]
    return out, mean.view(rows), rstd.view(rows)


def backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    normalized_shape: Shape,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """With h = (input - mean) * rstd, sums over rows: grad_weight = sum(grad_out * h),
    grad_bias = sum(grad_out), grad_input = the pull-back of grad_out * weight through h.
    """
    g, x = wide(grad_out), wide(input)
    dims = range(-len(normalized_shape), 0)
    m, r = (t.view(*t.shape, *[1] * len(normalized_shape)) for t in (mean, rstd))
    h = (x - m) * r
    grad_input = input_gradient(affine(g, wide_like(weight, x), None), h, r, dims)
    rows = range(x.ndim - len(normalized_shape))
    dtype = parameter_dtype(input, weight)
    grads = (
        grad_input.to(input.dtype),
        sum_over(g * h, rows).to(dtype),
        sum_over(g, rows).to(dtype),
    )
    return masked(grads, output_mask)


def sum_over(t: torch.Tensor, dims: range) -> torch.Tensor:
    """Sum over `dims`, none of them included: torch's sum over no dims sums all."""
    return t.sum(tuple(dims)) if dims else t


def backward_native(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    normalized_shape: Shape,
    output_mask: list[bool],
) -> Any:
    fits = one_dtype(input, weight) and saves_wide(input)
    if not fits or (weight is None and any(output_mask[1:])):
        args = (grad_out, input, weight, mean, rstd, normalized_shape, output_mask)
        return backward_reference(*args)
    return torch.ops.aten.native_layer_norm_backward(
        grad_out,
        input,
        normalized_shape,
        mean.view(*mean.shape, *[1] * len(normalized_shape)),
        rstd.view(*rstd.shape, *[1] * len(normalized_shape)),
        weight,
        weight,  # stands in for the bias: only its shape and dtype are read
        output_mask,
    )


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="LayerNormFwd",
        name="layer_norm",
        family="norm",
        tensors=(
            TensorSpec("input", "*B *normalized_shape", FLOAT),
            TensorSpec("weight", "*normalized_shape", FLOAT, optional=True),
            TensorSpec("bias", "*normalized_shape", FLOAT, optional=True),
        ),
        params=(ParamSpec("normalized_shape", "int[]"), ParamSpec("eps", "float")),
        outputs=(
            OutputSpec("out", like("input")),
            OutputSpec("mean", row_statistic, saved=True, doc="mean of each row"),
            OutputSpec("rstd", row_statistic, saved=True, doc="1 / sqrt(variance + eps) of each"),
        ),
        reference=reference,
        native=native,
        native_train=native_train,
        flops=lambda call: 5 * call.tensors.input.numel,
        reduction=row_length,
        autocast="fp32",
        doc="Layer normalization over the trailing dims.",
    ),
    wrt=("input", "weight", "bias"),
    needs=("input", "weight"),
    reference=backward_reference,
    native=backward_native,
    grad_dims="*B *normalized_shape",
    saved_dims={"mean": "*B", "rstd": "*B"},
    grad_meta={"weight": row_parameter("input"), "bias": row_parameter("input")},
    drop_params=("eps",),
)
SPECS = (SPEC, BACKWARD)
