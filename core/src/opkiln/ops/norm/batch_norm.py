"""Batch normalization: out = (input - mean[c]) * rstd[c] * weight[c] + bias[c].

training: mean and biased variance of the batch, per channel; running statistics take
`momentum` of the batch's mean and unbiased variance. Otherwise the running statistics serve.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.common import affine, per_channel, statistics, wide, wide_like
from opkiln.ops.derive import with_backward
from opkiln.ops.norm.formulas import (
    channel_norm_fits,
    channel_parameter,
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


def reference(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = wide(input)
    if training:
        mean, rstd = statistics(x, [0, *range(2, x.ndim)], eps)
        update_running(running_mean, running_var, x, mean, momentum)
    else:
        assert running_mean is not None and running_var is not None  # by check
        mean = per_channel(wide_like(running_mean, x), x.ndim)
        rstd = torch.rsqrt(per_channel(wide_like(running_var, x), x.ndim) + eps)
    w, b = (per_channel(wide_like(t, x), x.ndim) for t in (weight, bias))
    y = affine((x - mean) * rstd, w, b)
    return y.to(input.dtype), mean.flatten(), rstd.flatten()


def update_running(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    momentum: float,
) -> None:
    """Move the running statistics towards the batch's mean and unbiased variance; an empty batch
    leaves them alone, as torch's does.
    """
    if running_mean is None or running_var is None or x.numel() == 0:
        return
    count = x.numel() // x.shape[1]
    dims = (0, *range(2, x.ndim))
    var = (x - mean).square().sum(dims) / (count - 1)
    with torch.no_grad():
        for running, new in ((running_mean, mean.flatten()), (running_var, var)):
            running.copy_((1 - momentum) * wide(running) + momentum * new)


def native(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    args = (input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not channel_norm_fits(input, running_mean, running_var, weight, bias):
        return reference(*args)[0]
    return torch.nn.functional.batch_norm(*args)


def native_train(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    if not channel_norm_fits(input, running_mean, running_var, weight, bias):
        return reference(input, running_mean, running_var, weight, bias, training, momentum, eps)
    out, *saved = torch.native_batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps
    )
    if not training:  # torch leaves these empty
        assert running_mean is not None and running_var is not None
        mean, var = wide_like(running_mean, input), wide_like(running_var, input)
        saved = [mean, torch.rsqrt(var + eps)]
    return out, *saved


def check(call: Call) -> None:
    t, p = call.tensors, call.params
    if t.input.ndim < 2:
        raise ArgumentError(f"batch_norm: input has {t.input.ndim} dims, expected at least 2")
    if (t.running_mean is None) != (t.running_var is None):
        raise ArgumentError("batch_norm: running_mean and running_var must both be given or absent")
    if not p.training and t.running_mean is None:
        raise ArgumentError("batch_norm: running_mean and running_var are required in evaluation")
    if t.running_mean is not None and t.running_mean.dtype != t.running_var.dtype:
        raise ArgumentError("batch_norm: running_mean and running_var must have one dtype")
    count = math.prod((t.input.shape[0], *t.input.shape[2:]))
    if p.training and count == 1:
        raise ArgumentError(
            "batch_norm: expected more than 1 value per channel when training, "
            f"got input of shape {list(t.input.shape)}"
        )


def mutates(call: Call) -> tuple[str, ...]:
    running = call.params.training and call.tensors.running_mean is not None
    return ("running_mean", "running_var") if running else ()


def channel_statistic(call: Call) -> TensorMeta:
    x = call.tensors.input
    return call.new((x.shape[1],), wide_dtype(x.dtype))


def backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    training: bool,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """With g = grad_out and h = (input - mean) * rstd, sums per channel over n values:

    grad_bias = sum(g), grad_weight = sum(g * h),
    grad_input = weight * rstd * (g - training * (grad_bias + h * grad_weight) / n).
    """
    g, x = wide(grad_out), wide(input)
    dims = (0, *range(2, x.ndim))
    m, r = (per_channel(wide_like(t, x), x.ndim) for t in (mean, rstd))
    h = (x - m) * r
    grad_bias, grad_weight = g.sum(dims), (g * h).sum(dims)
    if training:
        count = max(x.numel() // max(x.shape[1], 1), 1)
        means = per_channel(grad_bias, x.ndim) + h * per_channel(grad_weight, x.ndim)
        g = g - means / count
    grad_input = affine(g * r, per_channel(wide_like(weight, x), x.ndim), None)
    dtype = parameter_dtype(input, weight)
    grads = (grad_input.to(input.dtype), grad_weight.to(dtype), grad_bias.to(dtype))
    return masked(grads, output_mask)


def backward_native(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    training: bool,
    output_mask: list[bool],
) -> Any:
    args = (grad_out, input, weight, mean, rstd, training, output_mask)
    fits = channel_norm_fits(input, weight) and one_dtype(wide(input[:0]), mean, rstd)
    if not training or weight is None or not fits:
        return backward_reference(*args)
    grads = torch.ops.aten.native_batch_norm_backward(  # widened: cuDNN's 16-bit sums are rough
        wide(grad_out), wide(input), wide(weight), None, None, mean, rstd, True, 0.0, output_mask
    )
    dtypes = (input.dtype, weight.dtype, weight.dtype)
    return tuple(None if g is None else g.to(d) for g, d in zip(grads, dtypes, strict=True))


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="BatchNormFwd",
        name="batch_norm",
        family="norm",
        tensors=(
            TensorSpec("input", "N C *S", FLOAT),
            TensorSpec("running_mean", "C", FLOAT, optional=True),
            TensorSpec("running_var", "C", FLOAT, optional=True),
            TensorSpec("weight", "C", FLOAT, optional=True),
            TensorSpec("bias", "C", FLOAT, optional=True),
        ),
        params=(
            ParamSpec("training", "bool"),
            ParamSpec("momentum", "float"),
            ParamSpec("eps", "float"),
        ),
        outputs=(
            OutputSpec("out", like("input", keep_channels_last=True)),
            OutputSpec("mean", channel_statistic, saved=True, doc="the mean that was subtracted"),
            OutputSpec("rstd", channel_statistic, saved=True, doc="1 / sqrt(variance + eps)"),
        ),
        reference=reference,
        native=native,
        native_train=native_train,
        flops=lambda call: 10 * call.tensors.input.numel,
        check=check,
        mutates=mutates,
        may_mutate=("running_mean", "running_var"),
        reduction=lambda call: call.tensors.input.numel // max(call.tensors.input.shape[1], 1),
        doc="Batch normalization over all dims but the second.",
    ),
    wrt=("input", "weight", "bias"),
    needs=("input", "weight"),
    reference=backward_reference,
    native=backward_native,
    grad_dims="N C *S",
    saved_dims={"mean": "C", "rstd": "C"},
    grad_meta={"weight": channel_parameter, "bias": channel_parameter},
    drop_params=("momentum", "eps"),
    flops=lambda call: 8 * call.tensors.input.numel,
)
SPECS = (SPEC, BACKWARD)
