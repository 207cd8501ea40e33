"""Rotary position embeddings: pairs of channels turned by an angle that grows with the position.

out = (a cos - b sin, b cos + a sin) for the pairs (a, b) of the first `rotary_dim` channels, the
others pass through. x: [S, D] or [B, S, H, D]; position s has the angle (offset + s) * frequency.
Half-split ("neox"): a is the first half of the rotated channels, b the second; interleaved:
neighbours. Angles in float64; cos, sin and products in float32, in float64 for float64. The
gradient is the rotation by the negated angle and needs nothing of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkiln.device.rope_tables import rope_tables
from opkiln.errors import ArgumentError
from opkiln.ops.derive import inplace_of, with_backward
from opkiln.ops.rope import rules
from opkiln.spec import (
    FLOAT,
    Call,
    OpSpec,
    OutputSpec,
    ParamSpec,
    TensorSpec,
    like,
    wide_dtype,
)

Tensor = torch.Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [..., D] turned by cos and sin [..., rotary_dim / 2], which broadcast; in x's dtype."""
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., : rotary_dim // 2], turned[..., rotary_dim // 2 :]
    # The products are in float32: the tables are wider than 16 bits.
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def cos_sin(
    rule: rules.Rule, position: Tensor, dtype: torch.dtype, rotary_dim: int, **numbers: Any
) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, rotary_dim / 2] in `dtype`, amplitude included."""
    freq, amplitude = rule(rotary_dim, position.device, **numbers)
    angle = position.to(torch.float64)[:, None] * freq
    return (amplitude * angle.cos()).to(dtype), (amplitude * angle.sin()).to(dtype)


def cached_cos_sin(
    rule: rules.Rule, length: int, device: torch.device, rotary_dim: int, **numbers: Any
) -> tuple[Tensor, Tensor]:
    """The shared float32 tables of positions 0 to `length` - 1 and some more."""

    def build(rows: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(rows, device=device)
        return cos_sin(rule, position, torch.float32, rotary_dim, **numbers)

    key = (rule.__name__, rotary_dim, *numbers.values())
    cos, sin = rope_tables(key, length, device, build)
    return cos, sin


def length_of(x: Tensor) -> int:
    """S of [S, D] or [B, S, H, D]."""
    return x.shape[0 if x.ndim == 2 else 1]


def formulas(
    rule: rules.Rule, interleaved: bool
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """x turned forwards (sign 1) or back (-1): by angles computed now, and by the shared tables."""

    def turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
        if x.ndim == 4:  # [S, pairs] over [B, S, H, D]
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return rotate(x, cos, sin if sign > 0 else -sin, interleaved)

    def compute(x: Tensor, sign: int, offset: int, **params: Any) -> Tensor:
        position = torch.arange(offset, offset + length_of(x), device=x.device)
        return turn(x, *cos_sin(rule, position, wide_dtype(x.dtype), **params), sign)

    def look_up(x: Tensor, sign: int, offset: int, **params: Any) -> Tensor:
        if x.dtype == torch.float64:
            return compute(x, sign, offset, **params)
        end = offset + length_of(x)
        cos, sin = (t[offset:end] for t in cached_cos_sin(rule, end, x.device, **params))
        return turn(x, cos, sin, sign)

    return compute, look_up


def check(call: Call) -> None:
    name, p = call.spec.name, call.params
    shape = call.tensors.x.shape
    if len(shape) not in (2, 4):
        raise ArgumentError(f"{name}: x has {len(shape)} dims, expected [S, D] or [B, S, H, D]")
    if p.offset < 0:
        raise ArgumentError(f"{name}: offset must not be negative, got {p.offset}")
    check_rotation(call)


def check_rotation(call: Call) -> None:
    """rotary_dim fits, and the rule's numbers make sense."""
    name, p = call.spec.name, call.params
    channels = call.tensors.x.shape[-1]
    if p.rotary_dim % 2 or not 0 <= p.rotary_dim <= channels:
        raise ArgumentError(
            f"{name}: rotary_dim must be even and at most {channels}, the channels of x, "
            f"got {p.rotary_dim}"
        )
    if not p.base > 1:
        raise ArgumentError(f"{name}: base must be greater than 1, got {p.base}")
    for what, value in vars(p).items():
        if what in POSITIVE and not value > 0:
            raise ArgumentError(f"{name}: {what} must be greater than 0, got {value}")
    factors = getattr(p, "rescale_factors", None)
    if factors is not None and (
        len(factors) != p.rotary_dim // 2 or not all(f > 0 for f in factors)
    ):
        raise ArgumentError(
            f"{name}: rescale_factors must be {p.rotary_dim // 2} positive numbers, one for each "
            f"pair, got {list(factors)}"
        )
    if getattr(p, "original_max_position_embeddings", 2) < 2:
        raise ArgumentError(f"{name}: original_max_position_embeddings must be at least 2")
    if hasattr(p, "low_freq_factor") and not p.low_freq_factor < p.high_freq_factor:
        raise ArgumentError(
            f"{name}: low_freq_factor must be below high_freq_factor, got {p.low_freq_factor} and "
            f"{p.high_freq_factor}"
        )


POSITIVE = (
    "scale_factor",
    "original_max_position",
    "scale",
    "beta_fast",
    "beta_slow",
    "max_position_embeddings",
)


def flops(call: Call) -> int:
    """4 a rotated channel."""
    *lead, channels = next(iter(vars(call.tensors).values())).shape
    total = 4 * call.params.rotary_dim
    for size in lead:
        total *= size
    return total if channels else 0


def rope_specs(
    op: str, name: str, rule: rules.Rule, numbers: dict[str, str], interleaved: bool = False
) -> tuple[OpSpec, ...]:
    """A rotation's spec, its backward and its in-place form. numbers: the rule's own, by kind."""
    compute, look_up = formulas(rule, interleaved)

    def gradient(formula: Callable[..., Any]) -> Callable[..., Any]:
        def turn_back(
            grad_out: Tensor, x_shape: tuple[int, ...], output_mask: list[bool], **params: Any
        ) -> tuple[Tensor]:
            return (formula(grad_out, -1, **params),)

        return turn_back

    params = {**numbers, "rotary_dim": "int", "offset": "int"}
    spec, backward = with_backward(
        OpSpec(
            op=op,
            name=name,
            family="rope",
            tensors=(TensorSpec("x", "*shape", FLOAT),),
            params=tuple(ParamSpec(n, kind) for n, kind in params.items()),
            outputs=(OutputSpec("out", like("x")),),
            reference=lambda x, **params: compute(x, 1, **params),
            native=lambda x, **params: look_up(x, 1, **params),
            flops=flops,
            check=check,
            autocast="fp32",
            doc=f"Rotary embedding, {'interleaved' if interleaved else 'half-split'} pairs, "
            f"{rule.__name__} frequencies.",
        ),
        wrt=("x",),
        needs=(),
        reference=gradient(compute),
        native=gradient(look_up),
        flops=flops,
        double="backward",
    )
    return spec, backward, inplace_of(spec, {"x": "out"})


LLAMA31 = {
    "base": "float",
    "scale_factor": "float",
    "low_freq_factor": "float",
    "high_freq_factor": "float",
    "original_max_position": "int",
}
YARN = {
    "base": "float",
    "scale": "float",
    "original_max_position": "int",
    "beta_fast": "float",
    "beta_slow": "float",
    "attn_factor": "float",
}
LONGROPE = {
    "base": "float",
    "rescale_factors": "float[]",
    "max_position_embeddings": "int",
    "original_max_position_embeddings": "int",
}
SPECS = (
    *rope_specs("RopeNeoxFwd", "rope_neox", rules.plain, {"base": "float"}),
    *rope_specs(
        "RopeNonNeoxFwd", "rope_non_neox", rules.plain, {"base": "float"}, interleaved=True
    ),
    *rope_specs("RopeLlama31Fwd", "rope_llama31", rules.llama31, LLAMA31),
    *rope_specs("RopeYarnFwd", "rope_yarn", rules.yarn, YARN),
    *rope_specs("RopeLongRopeFwd", "rope_longrope", rules.longrope, LONGROPE),
)
