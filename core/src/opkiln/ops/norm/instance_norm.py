"""Instance normalization: out = (input - mean[n, c]) * rstd[n, c] * weight[c] + bias[c].

use_input_stats: mean and biased variance of each channel plane; running statistics take `momentum`
of the mean and unbiased variance, averaged over the batch. Otherwise the running statistics serve.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.common import affine, per_channel, statistics, wide, wide_like
from opkiln.ops.derive import with_backward
from opkiln.ops.norm import group_norm
from opkiln.ops.norm.formulas import (
    channel_norm_fits,
    channel_norm_flops,
    channel_parameter,
    input_gradient,
    masked,
    parameter_dtype,
    saves_wide,
)
from opkiln.spec import (
    FLOAT,
    WIDE,
    Call,
    OpSpec,
    OutputSpec,
    ParamSpec,
    TensorMeta,
    TensorSpec,
    like,
    wide_dtype,
)


def reference(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    x = wide(input)
    if use_input_stats:
        mean, rstd = statistics(x, range(2, x.ndim), eps)
        update_running(running_mean, running_var, x, mean, momentum)
    else:
        assert running_mean is not None and running_var is not None  # by check
        mean = per_channel(wide_like(running_mean, x), x.ndim)
        rstd = torch.rsqrt(per_channel(wide_like(running_var, x), x.ndim) + eps)
    w, b = (per_channel(wide_like(t, x), x.ndim) for t in (weight, bias))
    y = affine((x - mean) * rstd, w, b)
    mean, rstd = (t.flatten(1).expand(x.shape[:2]) for t in (mean, rstd))
    return y.to(input.dtype), mean, rstd


def update_running(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    momentum: float,
) -> None:
    """Move the running statistics towards the batch's average of the planes' statistics; an empty
    batch leaves them alone.
    """
    if running_mean is None or running_var is None or x.numel() == 0:
        return
    count = math.prod(x.shape[2:])
    var = (x - mean).square().sum(tuple(range(2, x.ndim))) / (count - 1)
    with torch.no_grad():
        for running, new in ((running_mean, mean.flatten(1)), (running_var, var)):
            running.copy_((1 - momentum) * wide(running) + momentum * new.mean(0))


def native(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> Any:
    args = (input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    # torch rounds each plane's statistics to the input's dtype, or to the running statistics'
    rounds = running_mean is not None and not {running_mean.dtype, input.dtype} <= set(WIDE)
    rounds = rounds or (weight is None and not saves_wide(input))
    if rounds or not channel_norm_fits(input, running_mean, running_var, weight, bias):
        return reference(*args)[0]
    return torch.nn.functional.instance_norm(*args)


def native_train(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """A group norm with one channel a group, where no running statistics take part."""
    if running_mean is None:
        return group_norm.native_train(input, weight, bias, input.shape[1], eps)
    return reference(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    use_input_stats: bool,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """As group_norm's with one channel a group; running statistics are constants of the formula."""
    g, x = wide(grad_out), wide(input)
    m, r = (t.view(*x.shape[:2], *[1] * (x.ndim - 2)) for t in (mean, rstd))
    h = (x - m) * r
    weighted = affine(g, per_channel(wide_like(weight, x), x.ndim), None)
    planes = range(2, x.ndim)
    grad_input = input_gradient(weighted, h, r, planes) if use_input_stats else weighted * r
    dtype = parameter_dtype(input, weight)
    dims = (0, *planes)
    grads = (grad_input.to(input.dtype), (g * h).sum(dims).to(dtype), g.sum(dims).to(dtype))
    return masked(grads, output_mask)


def backward_native(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    use_input_stats: bool,
    output_mask: list[bool],
) -> Any:
    args = (grad_out, input, weight, mean, rstd)
    if not use_input_stats:
        return backward_reference(*args, use_input_stats, output_mask)
    return group_norm.backward_native(*args, input.shape[1], output_mask)


def check(call: Call) -> None:
    t, p = call.tensors, call.params
    if t.input.ndim < 2:
        raise ArgumentError(f"instance_norm: input has {t.input.ndim} dims, expected at least 2")
    if (t.running_mean is None) != (t.running_var is None):
        raise ArgumentError(
            "instance_norm: running_mean and running_var must both be given or absent"
        )
    if t.running_mean is None and not p.use_input_stats:
        raise ArgumentError(
            "instance_norm: running_mean and running_var are required when use_input_stats is False"
        )
    if t.running_mean is not None and t.running_mean.dtype != t.running_var.dtype:
        raise ArgumentError("instance_norm: running_mean and running_var must have one dtype")
    if p.use_input_stats and math.prod(t.input.shape[2:]) == 1:
        raise ArgumentError(
            "instance_norm: expected more than 1 spatial element when use_input_stats is True, "
            f"got input of shape {list(t.input.shape)}"
        )


def mutates(call: Call) -> tuple[str, ...]:
    running = call.params.use_input_stats and call.tensors.running_mean is not None
    return ("running_mean", "running_var") if running else ()


def plane_statistic(call: Call) -> TensorMeta:
    x = call.tensors.input
    return call.new(x.shape[:2], wide_dtype(x.dtype))


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="InstanceNormFwd",
        name="instance_norm",
        family="norm",
        tensors=(
            TensorSpec("input", "N C *S", FLOAT),
            TensorSpec("running_mean", "C", FLOAT, optional=True),
            TensorSpec("running_var", "C", FLOAT, optional=True),
            TensorSpec("weight", "C", FLOAT, optional=True),
            TensorSpec("bias", "C", FLOAT, optional=True),
        ),
        params=(
            ParamSpec("use_input_stats", "bool"),
            ParamSpec("momentum", "float"),
            ParamSpec("eps", "float"),
        ),
        outputs=(
            OutputSpec("out", like("input", keep_channels_last=True)),
            OutputSpec("mean", plane_statistic, saved=True, doc="the mean that was subtracted"),
            OutputSpec("rstd", plane_statistic, saved=True, doc="1 / sqrt(variance + eps)"),
        ),
        reference=reference,
        native=native,
        native_train=native_train,
        flops=channel_norm_flops,
        check=check,
        mutates=mutates,
        may_mutate=("running_mean", "running_var"),
        reduction=lambda call: math.prod(call.tensors.input.shape[2:]),
        doc="Instance normalization of every channel plane.",
    ),
    wrt=("input", "weight", "bias"),
    needs=("input", "weight"),
    reference=backward_reference,
    native=backward_native,
    grad_dims="N C *S",
    saved_dims={"mean": "N C", "rstd": "N C"},
    grad_meta={"weight": channel_parameter, "bias": channel_parameter},
    drop_params=("momentum", "eps"),
)
SPECS = (SPEC, BACKWARD)
