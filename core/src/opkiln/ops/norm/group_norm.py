"""Group normalization: out = (input - mean[n, g]) * rstd[n, g] * weight[c] + bias[c].

The channels are cut into `num_groups` runs of neighbours; mean and biased variance run over a
sample's group and all spatial dims. All arithmetic in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.common import affine, per_channel, statistics, wide, wide_like
from opkiln.ops.derive import with_backward
from opkiln.ops.norm.formulas import (
    channel_norm_flops,
    channel_parameter,
    input_gradient,
    masked,
    one_dtype,
    parameter_dtype,
)
from opkiln.spec import (
    FLOAT,
    Call,
    OpSpec,
    OutputSpec,
    ParamSpec,
    TensorMeta,
    TensorSpec,
    like,
    wide_dtype,
)

# torch's CUDA kernel before 2.13 rounds a 16-bit input's statistics before it uses them (PR 183946)
KEEPS_FLOAT32 = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def grouped(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[N, C, *S] -> [N, G, values of a group]."""
    n, c, *spatial = x.shape
    return x.reshape(n, num_groups, c // max(num_groups, 1) * math.prod(spatial))


def reference(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    x = wide(input)
    groups = grouped(x, num_groups)
    mean, rstd = statistics(groups, [2], eps)
    w, b = (per_channel(wide_like(t, x), x.ndim) for t in (weight, bias))
    y = affine(((groups - mean) * rstd).reshape(x.shape), w, b)
    return y.to(input.dtype), mean.squeeze(2), rstd.squeeze(2)


def native(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
) -> Any:
    if KEEPS_FLOAT32 and one_dtype(input, weight, bias):
        x = input.contiguous()  # for channels_last torch's CPU kernel takes E[x^2] - E[x]^2
        return torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)
    w, b = wide_like(weight, input), wide_like(bias, input)
    out = torch.nn.functional.group_norm(wide(input).contiguous(), num_groups, w, b, eps)
    return out.to(input.dtype)


def native_train(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Through float32: torch's 16-bit kernel hands out 16-bit statistics."""
    n, c, *spatial = input.shape
    w, b = wide_like(weight, input), wide_like(bias, input)
    sizes = (n, c, math.prod(spatial), num_groups)
    out, *saved = torch.native_group_norm(wide(input).contiguous(), w, b, *sizes, eps)
    return out.to(input.dtype), *saved


def backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    num_groups: int,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """With h = (input - mean) * rstd, sums per channel: grad_weight = sum(grad_out * h),
    grad_bias = sum(grad_out), grad_input = the pull-back of grad_out * weight through h.
    """
    g, x = wide(grad_out), wide(input)
    dims = (0, *range(2, x.ndim))
    h = (grouped(x, num_groups) - mean.unsqueeze(2)) * rstd.unsqueeze(2)
    weighted = grouped(affine(g, per_channel(wide_like(weight, x), x.ndim), None), num_groups)
    grad_input = input_gradient(weighted, h, rstd.unsqueeze(2), [2]).reshape(x.shape)
    dtype = parameter_dtype(input, weight)
    grads = (
        grad_input.to(input.dtype),
        (g * h.reshape(x.shape)).sum(dims).to(dtype),
        g.sum(dims).to(dtype),
    )
    return masked(grads, output_mask)


def backward_native(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    num_groups: int,
    output_mask: list[bool],
) -> Any:
    n, c, *spatial = input.shape
    grads = torch.ops.aten.native_group_norm_backward(
        wide(grad_out).contiguous(),
        wide(input).contiguous(),
        mean,
        rstd,
        None if weight is None else wide_like(weight, input).contiguous(),
        n,
        c,
        math.prod(spatial),
        num_groups,
        output_mask,
    )
    dtype = parameter_dtype(input, weight)
    return tuple(
        None if grad is None else grad.to(input.dtype if i == 0 else dtype)
        for i, grad in enumerate(grads)
    )


def check(call: Call) -> None:
    shape, groups = call.tensors.input.shape, call.params.num_groups
    if groups < 1 or shape[1] % groups != 0:
        raise ArgumentError(
            f"group_norm: num_groups must be positive and divide the {shape[1]} channels, "
            f"got {groups}"
        )
    if math.prod(shape) == groups:
        raise ArgumentError(
            "group_norm: expected more than 1 value per group in a batch of one, "
            f"got input of shape {list(shape)} and num_groups {groups}"
        )


def group_statistic(call: Call) -> TensorMeta:
    x = call.tensors.input
    return call.new((x.shape[0], call.params.num_groups), wide_dtype(x.dtype))


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="GroupNormFwd",
        name="group_norm",
        family="norm",
        tensors=(
            TensorSpec("input", "N C *S", FLOAT),
            TensorSpec("weight", "C", FLOAT, optional=True),
            TensorSpec("bias", "C", FLOAT, optional=True),
        ),
        params=(ParamSpec("num_groups", "int"), ParamSpec("eps", "float")),
        outputs=(
            OutputSpec("out", like("input", keep_channels_last=True)),
            OutputSpec("mean", group_statistic, saved=True, doc="mean of each sample's group"),
            OutputSpec("rstd", group_statistic, saved=True, doc="1 / sqrt(variance + eps)"),
        ),
        reference=reference,
        native=native,
        native_train=native_train,
        flops=channel_norm_flops,
        check=check,
        reduction=lambda call: math.prod(call.tensors.input.shape[1:]) // call.params.num_groups,
        autocast="fp32",
        doc="Group normalization over runs of channels.",
    ),
    wrt=("input", "weight", "bias"),
    needs=("input", "weight"),
    reference=backward_reference,
    native=backward_native,
    grad_dims="N C *S",
    saved_dims={"mean": "N G", "rstd": "N G"},
    grad_meta={"weight": channel_parameter, "bias": channel_parameter},
    drop_params=("eps",),
)
SPECS = (SPEC, BACKWARD)
