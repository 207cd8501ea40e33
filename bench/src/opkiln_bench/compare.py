"""`opkiln-bench compare A B`: which rows of B became slower or faster than in A, beyond noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from opkiln_bench.analysis import OURS, times
from opkiln_bench.records import Key, Run
from opkiln_bench.verdict import Ratio, compare_ours


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


def changes(before: Run, after: Run, backend: str = OURS) -> Iterator[Change]:
    """Rows that both runs timed with `backend`. Faster counts only beyond the noise too."""
    for key, row in after.rows.items():
        new = row["backends"].get(backend, {})
        old = before.rows.get(key, {}).get("backends", {}).get(backend, {})
        if new.get("status") != "ok" or old.get("status") != "ok":
            continue
        ratio = compare_ours(new["forward_us"], new["reversed_us"], times(old))
        noise = max(ratio.noise, _a_a(old))
        low = ratio.low if ratio.low > 1 + noise else min(ratio.low, 1.0)
        ratio = Ratio(ratio.value, low, ratio.high, noise)
        yield Change(key, backend, _median(old), _median(new), ratio)


def _a_a(entry: dict[str, list[float]]) -> float:
    return compare_ours(entry["forward_us"], entry["reversed_us"], entry["forward_us"]).noise


def _median(entry: dict[str, list[float]]) -> float:
    ordered = sorted(times(entry))
    return ordered[len(ordered) // 2]
