"""Adaptive layer normalization: a row norm modulated by tensors instead of parameters.

ada_layer_norm: out = (scale_offset + scale) * LN(input) + shift;
ada_layer_norm_zero: out = gate * ((scale_offset + scale) * LN(input) + shift).
LN(input) = (input - mean) * rstd over the last dim. scale, shift and gate have the input's shape or
broadcast to it ([B, 1, N]: one row a sample). All arithmetic in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.common import statistics, wide
from opkiln.ops.derive import with_backward
from opkiln.ops.norm.formulas import input_gradient, masked
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

MODULATION = ("scale", "shift", "gate")


def modulate(
    normed: torch.Tensor, modulation: tuple[torch.Tensor, ...], scale_offset: float
) -> torch.Tensor:
    scale, shift, *gate = (wide(t) for t in modulation)
    y = (scale_offset + scale) * normed + shift
    return y * gate[0] if gate else y


def reference(
    input: torch.Tensor, *modulation: torch.Tensor, eps: float, scale_offset: float
) -> tuple[torch.Tensor, ...]:
    x = wide(input)
    mean, rstd = statistics(x, [-1], eps)
    y = modulate((x - mean) * rstd, modulation, scale_offset)
    return y.to(input.dtype), mean.squeeze(-1), rstd.squeeze(-1)


def native(input: torch.Tensor, *modulation: torch.Tensor, eps: float, scale_offset: float) -> Any:
    normed = torch.nn.functional.layer_norm(wide(input), input.shape[-1:], eps=eps)
    return modulate(normed, modulation, scale_offset).to(input.dtype)


def native_train(
    input: torch.Tensor, *modulation: torch.Tensor, eps: float, scale_offset: float
) -> tuple[torch.Tensor, ...]:
    normed, *saved = torch.native_layer_norm(wide(input), input.shape[-1:], None, None, eps)
    out = modulate(normed, modulation, scale_offset).to(input.dtype)
    return out, *(t.squeeze(-1) for t in saved)


def backward_reference(*tensors: torch.Tensor, **params: Any) -> tuple[torch.Tensor | None, ...]:
    """Without a gate: shift enters linearly and comes as its shape."""
    grad_out, input, scale, mean, rstd = tensors
    shape, mask = params["shift_shape"], params["output_mask"]
    to_input, h = pull_back(wide(grad_out), input, scale, mean, rstd, params["scale_offset"])
    g = wide(grad_out)
    grads = (to_input, (g * h).sum_to_size(scale.shape), g.sum_to_size(shape))
    return masked([t.to(input.dtype) for t in grads], mask)


def zero_backward_reference(
    *tensors: torch.Tensor, **params: Any
) -> tuple[torch.Tensor | None, ...]:
    """The gate's gradient is that of the output times what was gated; the rest sees grad * gate."""
    grad_out, input, scale, shift, gate, mean, rstd = tensors
    offset = params["scale_offset"]
    g = wide(grad_out) * wide(gate)
    to_input, h = pull_back(g, input, scale, mean, rstd, offset)
    gated = modulate(h, (scale, shift), offset)
    grads = (
        to_input,
        (g * h).sum_to_size(scale.shape),
        g.sum_to_size(shift.shape),
        (wide(grad_out) * gated).sum_to_size(gate.shape),
    )
    return masked([t.to(input.dtype) for t in grads], params["output_mask"])


def pull_back(
    g: torch.Tensor,
    input: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    scale_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the input from that of the modulated norm, and h = LN(input)."""
    r = rstd.unsqueeze(-1)
    h = (wide(input) - mean.unsqueeze(-1)) * r
    return input_gradient(g * (scale_offset + wide(scale)), h, r, [-1]), h


def row_statistic(call: Call) -> TensorMeta:
    x = call.tensors.input
    return call.new(x.shape[:-1], wide_dtype(x.dtype))


def check(call: Call) -> None:
    shape = call.tensors.input.shape
    for name in MODULATION:
        meta = getattr(call.tensors, name, None)
        if meta is None:
            continue
        trailing = shape[len(shape) - meta.ndim :]
        fits = meta.ndim <= len(shape) and all(
            a in (1, b) for a, b in zip(meta.shape, trailing, strict=True)
        )
        if not fits:
            raise ArgumentError(
                f"{call.spec.name}: {name} has shape {list(meta.shape)}, which does not broadcast "
                f"to the input's {list(shape)}"
            )


def ada_specs(op: str, name: str, names: tuple[str, ...], flops: int) -> tuple[OpSpec, OpSpec]:
    """Forward and backward of the norm modulated by `names`."""
    gated = "gate" in names
    return with_backward(
        OpSpec(
            op=op,
            name=name,
            family="norm",
            tensors=(
                TensorSpec("input", "*B N", FLOAT),
                *(TensorSpec(n, f"*{n}_dims") for n in names),
            ),
            params=(
                ParamSpec("eps", "float"),
                ParamSpec("scale_offset", "float", "1.0 where the network learns scale - 1"),
            ),
            outputs=(
                OutputSpec("out", like("input")),
                OutputSpec("mean", row_statistic, saved=True, doc="mean of each row"),
                OutputSpec("rstd", row_statistic, saved=True, doc="1 / sqrt(variance + eps)"),
            ),
            reference=reference,
            native=native,
            native_train=native_train,
            flops=lambda call: flops * call.tensors.input.numel,
            check=check,
            reduction=lambda call: call.tensors.input.shape[-1],
            autocast="fp32",
            doc=f"Layer norm over the last dim, modulated by {', '.join(names)}.",
        ),
        wrt=("input", *names),
        needs=("input", *(n for n in names if gated or n != "shift")),
        reference=zero_backward_reference if gated else backward_reference,
        grad_dims="*B N",
        saved_dims={"mean": "*B", "rstd": "*B"},
        drop_params=("eps",),
    )


SPECS = (
    *ada_specs("AdaLayerNormFwd", "ada_layer_norm", MODULATION[:2], flops=5),
    *ada_specs("AdaLayerNormZeroFwd", "ada_layer_norm_zero", MODULATION, flops=6),
)
