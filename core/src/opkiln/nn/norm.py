"""Normalization modules."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from opkiln import functional as F
from opkiln.nn.served import Served

Tensor = torch.Tensor


class LayerNorm(Served, torch.nn.LayerNorm):
    op = "layer_norm"

    def serve(self, input: Tensor, *, backend: str | None = None) -> Tensor:
        weights = (self.weight, self.bias)
        return F.layer_norm(input, self.normalized_shape, *weights, self.eps, backend=backend)


class RMSNorm(Served, torch.nn.RMSNorm):
    op = "rms_norm"

    def serve(self, x: Tensor, *, backend: str | None = None) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps, backend=backend)

    def forward(self, x: Tensor) -> Tensor:  # torch's name for the input
        return self.serve(x, backend=self.backend)


class GroupNorm(Served, torch.nn.GroupNorm):
    op = "group_norm"

    def serve(self, input: Tensor, *, backend: str | None = None) -> Tensor:
        weights = (self.weight, self.bias)
        return F.group_norm(input, self.num_groups, *weights, self.eps, backend=backend)


def batch_norm(self: Any, input: Tensor, *, backend: str | None = None) -> Tensor:
    """torch's rules: batch statistics in training, and in evaluation where there are no running
    ones; these are updated in training if tracked; momentum None: the mean of all batches so far
    (which reads the count from the device).
    """
    self._check_input_dim(input)
    momentum = 0.0 if self.momentum is None else self.momentum
    tracked = self.track_running_stats
    counted = self.training and tracked and self.num_batches_tracked is not None
    if counted and self.momentum is None:
        momentum = 1.0 / (float(self.num_batches_tracked) + 1.0)
    mean, var = self.running_mean, self.running_var
    by_batch = self.training or (mean is None and var is None)
    if self.training and not tracked:
        mean = var = None
    weights = (self.weight, self.bias)
    out = F.batch_norm(input, mean, var, *weights, by_batch, momentum, self.eps, backend=backend)
    if counted:  # last: a call that is refused has changed nothing
        self.num_batches_tracked.add_(1)
    return out


class BatchNorm1d(Served, torch.nn.BatchNorm1d):
    op, serve = "batch_norm", batch_norm


class BatchNorm2d(Served, torch.nn.BatchNorm2d):
    op, serve = "batch_norm", batch_norm


class BatchNorm3d(Served, torch.nn.BatchNorm3d):
    op, serve = "batch_norm", batch_norm


def instance_norm(self: Any, input: Tensor, *, backend: str | None = None) -> Tensor:
    """torch's rules; an input without a batch is a batch of one."""
    self._check_input_dim(input)
    alone = input.dim() == self._get_no_batch_dim()
    dim = input.dim() - self._get_no_batch_dim()
    if input.shape[dim] != self.num_features:
        message = (
            f"expected input's size at dim={dim} to match num_features ({self.num_features}), "
            f"but got: {input.shape[dim]}."
        )
        if self.affine:
            raise ValueError(message)
        warnings.warn(f"{message} It is not used because affine=False.", stacklevel=2)
    out = F.instance_norm(
        input.unsqueeze(0) if alone else input,
        self.running_mean,
        self.running_var,
        self.weight,
        self.bias,
        self.training or not self.track_running_stats,
        0.0 if self.momentum is None else self.momentum,
        self.eps,
        backend=backend,
    )
    return out.squeeze(0) if alone else out


class InstanceNorm1d(Served, torch.nn.InstanceNorm1d):
    op, serve = "instance_norm", instance_norm


class InstanceNorm2d(Served, torch.nn.InstanceNorm2d):
    op, serve = "instance_norm", instance_norm


class InstanceNorm3d(Served, torch.nn.InstanceNorm3d):
    op, serve = "instance_norm", instance_norm


class FusedAddLayerNorm(LayerNorm):
    """(layer_norm(input + residual), input + residual).

    LayerNorm's constructor and state_dict. inplace: as in opkiln.functional.fused_add_layer_norm.
    """

    def __init__(self, *args: Any, inplace: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inplace = inplace

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return F.fused_add_layer_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            inplace=self.inplace,
            backend=self.backend,
        )


class FusedAddRMSNorm(RMSNorm):
    """(rms_norm(input + residual), input + residual).

    RMSNorm's constructor and state_dict, but eps=1e-6 as in opkiln.functional.fused_add_rms_norm;
    inplace as there.
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-6,
        *args: Any,
        inplace: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, *args, **kwargs)
        self.inplace = inplace

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return F.fused_add_rms_norm(
            input,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,  # type: ignore[arg-type]  # a float unless the caller passed None
            inplace=self.inplace,
            backend=self.backend,
        )
