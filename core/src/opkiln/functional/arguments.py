"""User arguments -> canonical parameters. One-line errors in torch's exception types."""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops import CATALOGUE
from opkiln.road import Bound


def bind(name: str, *tensors: Any, **params: Any) -> Bound:
    """A canonical call of the op of that name. TypeError for what is no tensor."""
    spec = CATALOGUE[name]
    for t_spec, t in zip(spec.tensors, tensors, strict=True):
        if not isinstance(t, torch.Tensor) and not (t is None and t_spec.optional):
            allowed = "a Tensor or None" if t_spec.optional else "a Tensor"
            raise TypeError(f"{name}: {t_spec.name} must be {allowed}, got {type(t).__name__}")
    return Bound(spec, tensors, params)


def shown(value: Any) -> str:
    """A value in one line of a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_int(value: Any) -> int | None:
    """What torch takes for an int: also NumPy's ints and integer tensors without dims; no bool."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | torch.SymInt):
        return value  # type: ignore[return-value]  # a SymInt counts as an int
    if isinstance(value, torch.Tensor) and (value.ndim > 0 or value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integer(op: str, name: str, value: Any) -> int:
    """One int. TypeError for anything else."""
    found = as_int(value)
    if found is None:
        raise TypeError(f"{op}: {name} must be an int, got {shown(value)}")
    return found


def ints(op: str, name: str, value: Any, n: int) -> tuple[int, ...]:
    """`n` ints from one int, a tuple or list of one, or one of `n`."""
    if not isinstance(value, tuple | list):
        found = as_int(value)
        if found is None:
            raise TypeError(f"{op}: {name} must be one int or a tuple of {n}, got {shown(value)}")
        return (found,) * n
    values = tuple(integer(op, name, v) for v in value)
    if len(values) == 1:
        return values * n
    if len(values) != n:
        raise ArgumentError(f"{op}: {name} must be one int or {n}, got {list(values)}")
    return values


def shape(op: str, name: str, value: Any) -> tuple[int, ...]:
    """An int or a non-empty tuple or list of ints, as a tuple."""
    values = value if isinstance(value, tuple | list) else (value,)
    if not values:
        raise ArgumentError(f"{op}: {name} must name at least one dim, got {list(values)}")
    return tuple(integer(op, name, v) for v in values)


def real(op: str, name: str, value: Any) -> float:
    """A float from a number, one of NumPy's, or a real tensor without dims. TypeError for others"""
    fits = isinstance(value, (int, float, Real))
    if isinstance(value, torch.Tensor):
        fits = value.ndim == 0 and value.dtype != torch.bool and not value.is_complex()
    if isinstance(value, bool) or not fits:
        raise TypeError(f"{op}: {name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ArgumentError(f"{op}: {name} must fit a float, got {shown(value)}") from error


def flag(op: str, name: str, value: Any) -> bool:
    """True or False. TypeError for anything else: 'False' and 0 are no flags, as in torch."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a bool, got {shown(value)}")
    return value


def tensor(op: str, name: str, value: Any) -> torch.Tensor:
    """A tensor whose shape or dtype is read before `bind` checks them all."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")
    return value
