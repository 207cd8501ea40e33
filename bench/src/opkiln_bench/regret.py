"""What the automatic choice costs: the time of what `auto` picks over the fastest it may pick.

The choice is made again from the record: the candidates are the row's backends that dispatch may
pick by itself and that took the call (ours and torch, a peer never), ordered by priority and by
the tables that the installed families ship for the row's architecture. The user's own table has no
part in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from opkiln.measured import Bucket, Entry, by_time, nearest, shipped
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY, Implementation

from opkiln_bench.verdict import median_us

CONTESTANTS = ("opkiln", "torch")  # whose times the tables hold
ARCH = {"NVIDIA H200": "sm90"}  # of records that do not state it
PAGES_TARGET = 0.02  # on every row of the pages
HELD_BACK_TARGET = 0.05  # on shapes that no table was made from


@dataclass(frozen=True)
class Regret:
    """picked: by `auto`. value: its time over that of the fastest contestant, minus 1."""

    picked: str
    value: float


def regret_of(record: Mapping[str, Any]) -> Regret | None:
    """The regret of a row; None with fewer than two contestants timed, or a pick that was not."""
    timed = {
        backend: median_us([*entry["forward_us"], *entry["reversed_us"]])
        for backend in CONTESTANTS
        if (entry := record["backends"].get(backend, {})).get("status") == "ok"
    }
    implementations = REGISTRY.of(record["name"]) if record["name"] in CATALOGUE else {}
    if len(timed) < 2 or not timed.keys() <= implementations.keys():  # a family is not installed
        return None
    picked = pick(record, implementations)
    if picked not in timed:
        return None
    return Regret(picked, timed[picked] / min(timed.values()) - 1)


def pick(record: Mapping[str, Any], implementations: Mapping[str, Implementation]) -> str | None:
    """What `auto` picks for the row's call; None where nobody that it may pick takes the call."""
    candidates = [
        implementations[backend]
        for backend in CONTESTANTS
        if record["backends"].get(backend, {}).get("status") not in (None, "refused", "missing")
        and backend in implementations
        and implementations[backend].auto
    ]
    candidates.sort(key=lambda impl: (-impl.priority, impl.backend))
    ordered = by_time(candidates, shipped_entry(record))
    return ordered[0][0].backend if ordered else None


def shipped_entry(record: Mapping[str, Any]) -> Entry | None:
    """What the shipped tables know of the row's call."""
    arch = record.get("arch") or ARCH.get(record["gpu"])
    stated = record.get("bucket")
    if arch is None or stated is None:
        return None
    bucket = Bucket(record["name"], stated["kind"], tuple(stated["sizes"]))
    return nearest(tables(arch).get((bucket.op, bucket.kind), ()), bucket)


@cache
def tables(arch: str) -> dict[tuple[str, str], list[Entry]]:
    """The shipped tables, read once."""
    return shipped(arch)


def summary(regrets: Sequence[tuple[str, Regret | None]], target: float) -> str:
    """`Regret of auto on 200 rows: median 0.0 %, largest 3.1 % (row), 1 above 2 %`.

    regrets: a row's name, and its regret. Empty text where no row has one.
    """
    known = [(name, regret.value) for name, regret in regrets if regret is not None]
    if not known:
        return ""
    worst, most = max(known, key=lambda pair: pair[1])
    above = sum(value > target for _, value in known)
    median = tenths(statistics.median(value for _, value in known))
    where = f" ({worst})" if most > 0 else ""
    return (
        f"Regret of auto on {len(known)} rows: median {median}, largest {tenths(most)}{where}, "
        f"{above} above {100 * target:g} %"
    )


def tenths(value: float) -> str:
    """`3.1 %`"""
    return f"{100 * value:.1f} %"
