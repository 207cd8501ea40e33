"""User arguments -> canonical parameters. One-line errors in torch's exception types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops import CATALOGUE
from opkiln.road import Bound


def bind(name: str, *tensors: Any, **params: Any) -> Bound:
    """A canonical call of the op of that name."""
    return Bound(CATALOGUE[name], tensors, params)


def integer(op: str, name: str, value: Any) -> int:
    """One int (or SymInt). TypeError for anything else, bools included."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    return value  # type: ignore[return-value]  # a SymInt counts as an int


def ints(op: str, name: str, value: Any, n: int) -> tuple[int, ...]:
    """`n` ints from one int, a sequence of one, or a sequence of `n`."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        values = tuple(integer(op, name, v) for v in value)
        if len(values) == 1:
            return values * n
        if len(values) != n:
            raise ArgumentError(f"{op}: {name} must be one int or {n}, got {list(values)}")
        return values
    return (integer(op, name, value),) * n


def shape(op: str, name: str, value: Any) -> tuple[int, ...]:
    """An int or a non-empty sequence of ints, as a tuple."""
    values = value if isinstance(value, Sequence) else (value,)
    if not values:
        raise ArgumentError(f"{op}: {name} must name at least one dim, got {list(values)}")
    return tuple(integer(op, name, v) for v in values)


def real(op: str, name: str, value: Any) -> float:
    """A float from a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    return float(value)


def tensor(op: str, name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(value).__name__}")
    return value
