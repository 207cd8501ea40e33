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
    linear = () if "gate" in names else ("shift",)
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
        needs=("input", *(n for n in names if n not in linear)),
        grad_dims="*B N",
        saved_dims={"mean": "*B", "rstd": "*B"},
    )


SPECS = (
    *ada_specs("AdaLayerNormFwd", "ada_layer_norm", MODULATION[:2], flops=5),
    *ada_specs("AdaLayerNormZeroFwd", "ada_layer_norm_zero", MODULATION, flops=6),
)
