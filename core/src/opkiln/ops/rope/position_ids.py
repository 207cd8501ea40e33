"""Rotary embedding with a position for every token: x [T, H, D], position_ids [T].

Half-split pairs, plain frequencies, ids in [0, max_position). See rotation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.derive import inplace_of, with_backward
from opkiln.ops.rope import rules
from opkiln.ops.rope.rotation import cached_cos_sin, check_rotation, cos_sin, flops, rotate
from opkiln.spec import (
    FLOAT,
    INDEX,
    Call,
    OpSpec,
    OutputSpec,
    ParamSpec,
    TensorSpec,
    like,
    wide_dtype,
)

Tensor = torch.Tensor


def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, pairs] over [T, H, D]
    return rotate(x, cos, sin if sign > 0 else -sin, interleaved=False)


def compute(
    x: Tensor, position_ids: Tensor, sign: int, max_position: int, base: float, rotary_dim: int
) -> Tensor:
    dtype = wide_dtype(x.dtype)
    cos, sin = cos_sin(rules.plain, position_ids, dtype, rotary_dim, base=base)
    return turn(x, cos, sin, sign)


def look_up(
    x: Tensor, position_ids: Tensor, sign: int, max_position: int, base: float, rotary_dim: int
) -> Tensor:
    if x.dtype == torch.float64:
        return compute(x, position_ids, sign, max_position, base, rotary_dim)
    tables = cached_cos_sin(rules.plain, max_position, x.device, rotary_dim, base=base)
    # Unchecked ids on a GPU: a wrong one must not abort the process inside the gather.
    row = position_ids.clamp(0, max_position - 1)
    cos, sin = (t[row] for t in tables)
    return turn(x, cos, sin, sign)


def gradient(formula: Callable[..., Any]) -> Callable[..., Any]:
    def turn_back(
        grad_out: Tensor,
        position_ids: Tensor,
        x_shape: tuple[int, ...],
        output_mask: list[bool],
        **params: Any,
    ) -> tuple[Tensor]:
        return (formula(grad_out, position_ids, -1, **params),)

    return turn_back


def check(call: Call) -> None:
    if call.params.max_position < 1:
        raise ArgumentError(
            f"{call.spec.name}: max_position must be at least 1, got {call.params.max_position}"
        )
    check_rotation(call)


def check_values(
    x: Tensor, position_ids: Tensor, max_position: int, base: float, rotary_dim: int
) -> None:
    """Every id is in [0, max_position)."""
    if position_ids.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(position_ids))
    if low < 0 or high >= max_position:
        raise ArgumentError(
            f"rope_neox_position_ids: position_ids must be in [0, {max_position}), "
            f"got values from {low} to {high}"
        )


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="RopeNeoxPositionIdsFwd",
        name="rope_neox_position_ids",
        family="rope",
        tensors=(TensorSpec("x", "T H D", FLOAT), TensorSpec("position_ids", "T", INDEX)),
        params=(
            ParamSpec("max_position", "int"),
            ParamSpec("base", "float"),
            ParamSpec("rotary_dim", "int"),
        ),
        outputs=(OutputSpec("out", like("x")),),
        reference=lambda x, position_ids, **params: compute(x, position_ids, 1, **params),
        native=lambda x, position_ids, **params: look_up(x, position_ids, 1, **params),
        flops=flops,
        check=check,
        check_values=check_values,
        autocast="fp32",
        doc="Rotary embedding, half-split pairs, a position for every token.",
    ),
    wrt=("x",),
    needs=("position_ids",),
    reference=gradient(compute),
    native=gradient(look_up),
    grad_dims="T H D",
    flops=flops,
    double="backward",
)
SPECS = (SPEC, BACKWARD, inplace_of(SPEC, {"x": "out"}))
