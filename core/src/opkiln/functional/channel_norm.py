"""Normalizations of channels: batch, group and instance norm."""

from __future__ import annotations

from typing import Any

import torch

from opkiln.functional.arguments import bind, flag, integer, real
from opkiln.road import Bound, run

Tensor = torch.Tensor


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: Any,
    eps: Any,
) -> Bound:
    return bind(
        "batch_norm",
        input,
        running_mean,
        running_var,
        weight,
        bias,
        training=flag("batch_norm", "training", training),
        momentum=real("batch_norm", "momentum", momentum),
        eps=real("batch_norm", "eps", eps),
    )


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """Normalize each channel of input [N, C, *] by its batch's or the running statistics.

    training: batch statistics (biased variance); running_mean and running_var [C], where given, are
    updated in place with `momentum` of the mean and the unbiased variance. Otherwise the running
    statistics serve. Any mix of float dtypes; statistics in float32; result in the input's dtype,
    channels_last iff the input is. Gradients: input, weight, bias; the backward keeps input, weight
    and each channel's mean and rstd in float32.
    Raises ArgumentError for one value per channel in training, or sizes that do not fit.
    Source: Ioffe and Szegedy, "Batch Normalization", 2015.
    """
    tensors = (input, running_mean, running_var, weight, bias)
    return run(_batch_norm, tensors, (training, momentum, eps), backend)


def _batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
) -> Bound:
    return bind(
        "batch_norm_backward",
        grad_out,
        input,
        weight,
        mean,
        rstd,
        training=flag("batch_norm_backward", "training", training),
        output_mask=(True, True, True),
    )


def batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    training: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of batch_norm: (grad_input, grad_weight, grad_bias).

    grad_out, input: [N, C, *]; weight: [C] or None; mean, rstd: [C] float32, the statistics that
    normalized the input, rstd = 1 / sqrt(variance + eps). training=False: they were the running
    statistics, constants of the formula. grad_weight and grad_bias have the weight's dtype.
    """
    tensors = (grad_out, input, weight, mean, rstd)
    grads: tuple[Tensor, Tensor, Tensor] = run(_batch_norm_backward, tensors, (training,), backend)
    return grads


def _group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: Any, eps: Any
) -> Bound:
    return bind(
        "group_norm",
        input,
        weight,
        bias,
        num_groups=integer("group_norm", "num_groups", num_groups),
        eps=real("group_norm", "eps", eps),
    )


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """Normalize each sample's groups of neighbouring channels of input [N, C, *].

    num_groups divides C; weight, bias: [C]. Any mix of float dtypes; biased variance and affine in
    float32; result in the input's dtype, channels_last iff the input is. Gradients: input, weight,
    bias; the backward keeps input, weight and each group's mean and rstd in float32. Raises
    ArgumentError for sizes that do not fit, and for one value a group in a batch of one. Source: Wu
    and He, "Group Normalization", 2018.
    """
    return run(_group_norm, (input, weight, bias), (num_groups, eps), backend)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    use_input_stats: bool,
    momentum: Any,
    eps: Any,
) -> Bound:
    return bind(
        "instance_norm",
        input,
        running_mean,
        running_var,
        weight,
        bias,
        use_input_stats=flag("instance_norm", "use_input_stats", use_input_stats),
        momentum=real("instance_norm", "momentum", momentum),
        eps=real("instance_norm", "eps", eps),
    )


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """Normalize each channel plane of each sample of input [N, C, *].

    use_input_stats: by its own statistics (biased variance); running_mean and running_var [C],
    where given, are updated in place with `momentum` of the mean and the unbiased variance,
    averaged over the batch. Otherwise the running statistics serve. Any mix of float dtypes;
    statistics and affine in float32; result in the input's dtype, channels_last iff the input is.
    Gradients: input, weight, bias; the backward keeps input, weight and each plane's mean and rstd
    in float32. Raises ArgumentError for planes of one value under
    use_input_stats, or sizes that do not fit. Source: Ulyanov, Vedaldi and Lempitsky, "Instance
    Normalization", 2016.
    """
    tensors = (input, running_mean, running_var, weight, bias)
    return run(_instance_norm, tensors, (use_input_stats, momentum, eps), backend)
