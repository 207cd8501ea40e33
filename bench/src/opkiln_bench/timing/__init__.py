"""How a call is timed: CUPTI activity on a GPU, wall clock on a CPU.

A timer takes the contestants of one row and times them in rounds, every second round in reversed
order, so that drift hits all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from opkiln_bench.settings import Timer as TimerSettings

Thunk = Callable[[], Any]


class MeasureError(RuntimeError):
    """A measurement that cannot be trusted, with the reason."""


@dataclass
class Samples:
    """Times of one contestant on one row.

    forward_us, reversed_us: device (or wall) time of each call, by the order of its round.
    kernels: launched by one call, copies and fills included; None where that is not known.
    """

    forward_us: list[float] = field(default_factory=list)
    reversed_us: list[float] = field(default_factory=list)
    kernels: int | None = None

    @property
    def all_us(self) -> list[float]:
        return self.forward_us + self.reversed_us


class Timer(Protocol):
    """`name` is written into the record; `title` onto the page."""

    name: str
    title: str

    def measure(self, calls: Mapping[str, Thunk]) -> dict[str, Samples | MeasureError]: ...

    def synchronize(self) -> None: ...


def round_count(slowest_ms: float, settings: TimerSettings) -> int:
    """Rounds for a row: an even number between min_samples and max_samples that fits the budget."""
    fit = int(settings.budget_ms / max(slowest_ms, 1e-6))
    rounds = min(max(fit, settings.min_samples), settings.max_samples)
    return rounds + rounds % 2


def schedule(names: list[str], rounds: int) -> list[tuple[str, bool]]:
    """(contestant, whether its round is a reversed one), in the order of the calls."""
    order = []
    for index in range(rounds):
        is_reversed = index % 2 == 1
        order += [(n, is_reversed) for n in (reversed(names) if is_reversed else names)]
    return order
