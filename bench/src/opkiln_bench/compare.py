"""`opkiln-bench compare A B`: which rows became slower or faster, and how far two runs agree."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from opkiln_bench.analysis import OURS, times
from opkiln_bench.records import Key, Run
from opkiln_bench.verdict import Ratio, a_a_noise, compare_ours, median_us

Entry = dict[str, Any]

SHORT_US = 5.0  # below it a launch's jitter of 0.2 us alone is above 4 %
MEDIAN_WITHIN = 0.03
WORST_WITHIN = 0.08


@dataclass(frozen=True)
class Change:
    """One backend on one row: time in A over time in B, with its interval. Below 1: B is slower."""

    key: Key
    backend: str
    before_us: float
    after_us: float
    ratio: Ratio

    @property
    def kind(self) -> str:
        return {"ahead": "faster", "level": "level", "behind": "slower"}[self.ratio.verdict]


def in_both(before: Run, after: Run, backend: str) -> Iterator[tuple[Key, Entry, Entry]]:
    """Rows that both runs timed with `backend`, and its entries."""
    for key, row in after.rows.items():
        new = row["backends"].get(backend, {})
        old = before.rows.get(key, {}).get("backends", {}).get(backend, {})
        if new.get("status") == old.get("status") == "ok":
            yield key, old, new


def changes(before: Run, after: Run, backend: str = OURS) -> Iterator[Change]:
    """Rows that both runs timed with `backend`. Faster counts only beyond the noise too."""
    for key, old, new in in_both(before, after, backend):
        ratio = compare_ours(new["forward_us"], new["reversed_us"], times(old))
        noise = max(ratio.noise, a_a_noise(old["forward_us"], old["reversed_us"]))
        low = ratio.low if ratio.low > 1 + noise else min(ratio.low, 1.0)
        ratio = Ratio(ratio.value, low, ratio.high, noise)
        yield Change(key, backend, median_us(times(old)), median_us(times(new)), ratio)


@dataclass(frozen=True)
class Agreement:
    """Two runs of the same code: the median difference of a row, and the largest above 5 us."""

    before: str
    after: str
    rows: int
    median: float
    long_rows: int
    worst: float
    worst_row: str

    @property
    def within(self) -> bool:
        return self.median <= MEDIAN_WITHIN and self.worst <= WORST_WITHIN

    def __str__(self) -> str:
        worst = f"{self.worst:.1%} ({self.worst_row})" if self.long_rows else "none"
        return (
            f"{self.before} and {self.after} agree within {self.median:.1%} on the median of "
            f"{self.rows} rows; the largest difference of the {self.long_rows} rows above "
            f"{SHORT_US:g} us is {worst}; wanted: {MEDIAN_WITHIN:.0%} and {WORST_WITHIN:.0%}, "
            f"{'met' if self.within else 'missed'}"
        )


def agreement(before: Run, after: Run, backend: str = OURS) -> Agreement | None:
    """How far two runs agree on the times of `backend`; None where they share no row."""
    found = {
        key: (median_us(times(old)), median_us(times(new)))
        for key, old, new in in_both(before, after, backend)
    }
    if not found:
        return None
    apart = {key: max(pair) / min(pair) - 1 for key, pair in found.items()}
    long_rows = [key for key, pair in found.items() if max(pair) > SHORT_US]
    worst = max(long_rows, key=lambda key: apart[key], default=None)
    return Agreement(
        before.name,
        after.name,
        len(found),
        statistics.median(apart.values()),
        len(long_rows),
        apart[worst] if worst else 0.0,
        " ".join(worst) if worst else "",
    )
