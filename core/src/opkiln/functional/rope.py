"""Rotary position embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opkiln.functional.arguments import bind, flag, integer, real, tensor
from opkiln.ops import CATALOGUE
from opkiln.road import Bound, run

Tensor = torch.Tensor
READ = {"float": real, "int": integer}


def _number(op: str, name: str, value: Any) -> Any:
    """A parameter of the kind that the spec names."""
    kind = next(p.kind for p in CATALOGUE[op].params if p.name == name)
    if kind == "float[]":
        return tuple(real(op, name, v) for v in value)
    return READ[kind](op, name, value)


def _rope(
    x: Tensor, op: str, numbers: tuple[Any, ...], rotary_dim: Any, offset: Any, inplace: bool
) -> Bound:
    """`numbers`: the rule's parameters in the spec's order."""
    names = CATALOGUE[op].param_names
    params = {n: _number(op, n, v) for n, v in zip(names, numbers, strict=False)}
    params["rotary_dim"] = _rotary_dim(op, x, rotary_dim)
    params["offset"] = integer(op, "offset", offset)
    return bind(f"{op}_inplace" if flag(op, "inplace", inplace) else op, x, **params)


def _rotary_dim(op: str, x: Tensor, rotary_dim: Any) -> int:
    """None: all channels."""
    channels = tensor(op, "x", x).shape[-1:]
    if rotary_dim is not None:
        return integer(op, "rotary_dim", rotary_dim)
    return channels[0] if channels else 0  # no dims: refused with the op's other shapes


def _run(x: Tensor, args: tuple[Any, ...], inplace: bool, backend: str | None) -> Tensor:
    out = run(_rope, (x,), (*args, inplace), backend)
    return x if inplace else out


def rope_neox(
    x: Tensor,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    offset: int = 0,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Turn the channel pairs (i, i + rotary_dim/2) of x by (offset + s) * base^(-2i / rotary_dim).

    x: [S, D] or [B, S, H, D], float16, bfloat16, float32 or float64; s: its place along S.
    rotary_dim: how many of the first channels are rotated, even; None: all. Others pass through.
    Angles are exact to float32 at any position, products in float32; result in x's dtype,
    contiguous. inplace: written over x, which is returned; no gradient, no expanded x.
    Gradient: x; nothing is kept for it. Raises ArgumentError for an odd or too large rotary_dim or
    a negative offset.
    Source: Su et al., "RoFormer", 2021.
    """
    return _run(x, ("rope_neox", (base,), rotary_dim, offset), inplace, backend)


def rope_non_neox(
    x: Tensor,
    *,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    offset: int = 0,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    """rope_neox with neighbouring channels as pairs: (2i, 2i + 1)."""
    return _run(x, ("rope_non_neox", (base,), rotary_dim, offset), inplace, backend)


def rope_llama31(
    x: Tensor,
    *,
    base: float = 10000.0,
    scale_factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position: int = 8192,
    rotary_dim: int | None = None,
    offset: int = 0,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    """rope_neox with Llama 3.1's frequencies.

    Pairs that turn more than high_freq_factor times in original_max_position tokens are unchanged,
    those that turn less than low_freq_factor times are slowed by scale_factor, the others blended.
    Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024.
    """
    numbers = (base, scale_factor, low_freq_factor, high_freq_factor, original_max_position)
    return _run(x, ("rope_llama31", numbers, rotary_dim, offset), inplace, backend)


def rope_yarn(
    x: Tensor,
    *,
    base: float = 10000.0,
    scale: float = 16.0,
    original_max_position: int = 4096,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attn_factor: float = 1.0,
    rotary_dim: int | None = None,
    offset: int = 0,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    """rope_neox with YaRN's frequencies; cos and sin are multiplied by attn_factor.

    Pairs that turn more than beta_fast times in original_max_position tokens are unchanged, those
    that turn less than beta_slow times are slowed by scale, a ramp with rounded ends lies between.
    Source: Peng et al., "YaRN", 2023.
    """
    numbers = (base, scale, original_max_position, beta_fast, beta_slow, attn_factor)
    return _run(x, ("rope_yarn", numbers, rotary_dim, offset), inplace, backend)


def rope_longrope(
    x: Tensor,
    *,
    base: float = 10000.0,
    rescale_factors: Sequence[float] | Tensor | None = None,
    max_position_embeddings: int = 4096,
    original_max_position_embeddings: int = 4096,
    rotary_dim: int | None = None,
    offset: int = 0,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    """rope_neox with every pair's frequency divided by its own factor.

    rescale_factors: rotary_dim / 2 positive numbers, a list or a 1-D tensor (read at every call:
    one sync if it is on a GPU; torch.compile takes a list); None: ones. The caller chooses between
    a model's short and long factors. cos and sin are multiplied by sqrt(1 + ln s / ln L),
    L = original_max_position_embeddings, s = max_position_embeddings / L, where s > 1.
    Source: Ding et al., "LongRoPE", 2024.
    """
    if rescale_factors is None:
        width = _rotary_dim("rope_longrope", x, rotary_dim)
        rescale_factors = (1.0,) * (width // 2)
    elif isinstance(rescale_factors, torch.Tensor) and rescale_factors.ndim == 1:
        rescale_factors = rescale_factors.tolist()
    elif not isinstance(rescale_factors, tuple | list):
        raise TypeError(
            "rope_longrope: rescale_factors must be a list or a 1-D tensor, got "
            f"{type(rescale_factors).__name__}"
        )
    numbers = (
        base,
        rescale_factors,
        max_position_embeddings,
        original_max_position_embeddings,
    )
    return _run(x, ("rope_longrope", numbers, rotary_dim, offset), inplace, backend)


def _rope_neox_position_ids(
    x: Tensor, position_ids: Tensor, max_position: Any, base: Any, rotary_dim: Any, inplace: bool
) -> Bound:
    op = "rope_neox_position_ids"
    return bind(
        f"{op}_inplace" if flag(op, "inplace", inplace) else op,
        x,
        position_ids,
        max_position=integer(op, "max_position", max_position),
        base=real(op, "base", base),
        rotary_dim=_rotary_dim(op, x, rotary_dim),
    )


def rope_neox_position_ids(
    x: Tensor,
    position_ids: Tensor,
    *,
    max_position: int,
    base: float = 10000.0,
    rotary_dim: int | None = None,
    inplace: bool = False,
    backend: str | None = None,
) -> Tensor:
    """rope_neox for x [T, H, D] with a position for every token.

    position_ids: [T] int32 or int64 in [0, max_position). An id outside raises ArgumentError on the
    CPU; on a GPU only with use(checks=True) or OPKILN_CHECKS=1, which waits for the device; without
    them that token's result is undefined.
    """
    args = (max_position, base, rotary_dim, inplace)
    out = run(_rope_neox_position_ids, (x, position_ids), args, backend)
    return x if inplace else out
