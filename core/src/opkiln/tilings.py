"""Launch parameters that `opkiln tune` found for a call, in place of those that a family chose.

A family that can be tuned offers candidates (`Implementation.tilings`) and asks `of` as it plans.
A tiling is what the family says it is, as JSON; core only keeps it.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from opkiln import own_table
from opkiln.measured import Bucket, arch_of, bucket_of
from opkiln.spec import Call

T = TypeVar("T")
Tiling = Mapping[str, Any]


class _Trial(threading.local):
    tiling: Tiling | None = None


_TRIAL = _Trial()


@contextlib.contextmanager
def trial(tiling: Tiling | None) -> Iterator[None]:
    """Inside the block, what is planned on this thread takes this tiling; None: the usual one."""
    before = _TRIAL.tiling
    _TRIAL.tiling = tiling
    try:
        yield
    finally:
        _TRIAL.tiling = before


def of(call: Call) -> Tiling | None:
    """The tiling on trial, else the user's for exactly such calls. None: the family's own choice.

    Under `batch_invariant` the family's, which is the same for any number of rows.
    """
    if _TRIAL.tiling is not None:
        return _TRIAL.tiling
    arch = arch_of(call.device)
    if arch is None or call.policy.batch_invariant:
        return None
    known = tuned(arch, own_table.folder())
    return known.get(bucket_of(call)) if known else None


def taken(call: Call, kernel: str, make: Callable[..., T]) -> T | None:
    """`make(**tiling)` of the call's tiling if it is for `kernel`; None for the family's choice."""
    tiling = of(call)
    if tiling is None or tiling.get("kernel") != kernel:
        return None
    values = {name: value for name, value in tiling.items() if name != "kernel"}
    try:
        return make(**values)
    except TypeError:  # written by hand
        return None


@cache
def tuned(arch: str, where: Path) -> dict[Bucket, Tiling]:
    """The tilings of the user's table; read once."""
    try:
        return {
            Bucket(row["op"], row["kind"], tuple(row["sizes"])): dict(row["tiling"])
            for row in own_table.document(arch).get("tilings", ())
        }
    except (KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        warnings.warn(f"opkiln: tilings of your table for {arch}: {told}; not used", stacklevel=4)
        return {}


def stated(kernel: str, tiling: Any) -> dict[str, Any]:
    """A family's tiling, a dataclass, as `taken` reads it."""
    return {"kernel": kernel, **asdict(tiling)}


def beside(value: int, low: int, high: int) -> list[int]:
    """Half and twice a power of two, within bounds."""
    return [n for n in (value // 2, value * 2) if low <= n <= high]
