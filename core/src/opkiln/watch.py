"""Looks on as calls are served: every road to a kernel goes through a plan's launch.

While something looks on, plans are made anew, so that the usual launch costs nothing more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opkiln.registry import REGISTRY, Launch
from opkiln.spec import Call

Observer = Callable[[Call, Sequence[torch.Tensor | None]], None]

_OBSERVERS: list[Observer] = []  # of all threads: a backward runs on one of its own


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """`observer(call, tensors)` before every launch, on any thread, inside the block."""
    _OBSERVERS.append(observer)
    REGISTRY.generation += 1
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)
        REGISTRY.generation += 1


def watched(call: Call, launch: Launch) -> Launch:
    """The launch of a new plan, seen by those who look on."""
    if not _OBSERVERS:
        return launch
    observers = tuple(_OBSERVERS)

    def seen(*tensors: torch.Tensor | None) -> Any:
        for observer in observers:
            observer(call, tensors)
        return launch(*tensors)

    return seen
