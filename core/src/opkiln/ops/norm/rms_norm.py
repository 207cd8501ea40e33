"""RMS normalization: out = input * rstd * weight, rstd = 1 / sqrt(mean(input^2) + eps).

The mean runs over the trailing dims `normalized_shape`; statistics and products in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from opkiln.ops.common import affine, row_length, row_statistic, wide, wide_like
from opkiln.ops.derive import with_backward
from opkiln.ops.norm.formulas import (
    input_gradient,
    masked,
    one_dtype,
    parameter_dtype,
    row_parameter,
    saves_wide,
)
from opkiln.ops.norm.layer_norm import sum_over
from opkiln.spec import FLOAT, OpSpec, OutputSpec, ParamSpec, TensorSpec, like

Shape = tuple[int, ...]


def reference(
    input: torch.Tensor, weight: torch.Tensor | None, normalized_shape: Shape, eps: float
) -> tuple[torch.Tensor, ...]:
    x = wide(input)
    dims = tuple(range(-len(normalized_shape), 0))
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    y = affine(x * rstd, wide_like(weight, x), None)
    return y.to(input.dtype), rstd.view(input.shape[: input.ndim - len(normalized_shape)])


def native(
    input: torch.Tensor, weight: torch.Tensor | None, normalized_shape: Shape, eps: float
) -> Any:
    if not one_dtype(input, weight):  # torch 2.11 upcasts the result
        return reference(input, weight, normalized_shape, eps)[0]
    return torch.nn.functional.rms_norm(input, normalized_shape, weight, eps)


def native_train(
    input: torch.Tensor, weight: torch.Tensor | None, normalized_shape: Shape, eps: float
) -> tuple[torch.Tensor, ...]:
    if not one_dtype(input, weight) or not saves_wide(input):
        return reference(input, weight, normalized_shape, eps)
    out, rstd = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)
    return out, rstd.view(input.shape[: input.ndim - len(normalized_shape)])


def backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    normalized_shape: Shape,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """With h = input * rstd: grad_weight = sum(grad_out * h) over rows,
    grad_input = the pull-back of grad_out * weight through h.
    """
    g, x = wide(grad_out), wide(input)
    dims = range(-len(normalized_shape), 0)
    r = rstd.view(*rstd.shape, *[1] * len(normalized_shape))
    h = x * r
    weighted = affine(g, wide_like(weight, x), None)
    grad_input = input_gradient(weighted, h, r, dims, centered=False)
    grad_weight = sum_over(g * h, range(x.ndim - len(normalized_shape)))
    grads = (grad_input.to(input.dtype), grad_weight.to(parameter_dtype(input, weight)))
    return masked(grads, output_mask)


def backward_native(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    normalized_shape: Shape,
    output_mask: list[bool],
) -> Any:
    fits = input.is_cuda and one_dtype(input, weight)  # torch has no such kernel for a CPU
    if not fits or (weight is None and output_mask[1]):
        return backward_reference(grad_out, input, weight, rstd, normalized_shape, output_mask)
    rstd = rstd.view(*rstd.shape, *[1] * len(normalized_shape))
    return torch.ops.aten._fused_rms_norm_backward(
        grad_out, input, normalized_shape, rstd, weight, output_mask
    )


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="RMSNormFwd",
        name="rms_norm",
        family="norm",
        tensors=(
            TensorSpec("input", "*B *normalized_shape", FLOAT),
            TensorSpec("weight", "*normalized_shape", FLOAT, optional=True),
        ),
        params=(ParamSpec("normalized_shape", "int[]"), ParamSpec("eps", "float")),
        outputs=(
            OutputSpec("out", like("input")),
            OutputSpec("rstd", row_statistic, saved=True, doc="1 / rms of each row"),
        ),
        reference=reference,
        native=native,
        native_train=native_train,
        flops=lambda call: 4 * call.tensors.input.numel,
        reduction=row_length,
        autocast="fp32",
        doc="RMS normalization over the trailing dims.",
    ),
    wrt=("input", "weight"),
    needs=("input", "weight"),
    reference=backward_reference,
    native=backward_native,
    grad_dims="*B *normalized_shape",
    saved_dims={"rstd": "*B"},
    grad_meta={"weight": row_parameter("input")},
    drop_params=("eps",),
)
SPECS = (SPEC, BACKWARD)
