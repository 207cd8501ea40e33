"""What a finished row means: times, alternatives, ratio, verdict, floor, speed of light."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from opkiln_bench.limits import Ceiling, Limits, ceiling, limits_of
from opkiln_bench.records import Run
from opkiln_bench.regret import Regret, regret_of
from opkiln_bench.verdict import Ratio, compare_ours, median_us, spread

OURS = "opkiln"


@dataclass(frozen=True)
class Alternative:
    """Another implementation that was right and timed."""

    backend: str
    time_us: float


@dataclass(frozen=True)
class Result:
    """A row of the record, judged. Times are None where there is nothing to state."""

    record: dict[str, Any]
    run: str
    status: str
    reason: str
    ours_us: float | None
    spread: float | None
    alternatives: tuple[Alternative, ...]
    unusable: tuple[tuple[str, str], ...] = field(default=())
    ratio: Ratio | None = None
    ceiling: Ceiling | None = None
    regret: Regret | None = None

    @property
    def tflops(self) -> float | None:
        flops = self.record["cost"]["flops"]
        return flops / (self.ours_us * 1e6) if self.ours_us else None

    @property
    def sol(self) -> float | None:
        """Roofline time over ours: 1 is the speed of light."""
        return self.ceiling.roofline_us / self.ours_us if self.ceiling and self.ours_us else None

    @property
    def share_of_floor(self) -> float | None:
        return self.ceiling.floor_us / self.ours_us if self.ceiling and self.ours_us else None

    @property
    def throttled(self) -> bool:
        return bool((self.record.get("clocks") or {}).get("throttled"))


def times(entry: dict[str, Any]) -> list[float]:
    return [*entry["forward_us"], *entry["reversed_us"]]


def judge(record: dict[str, Any], run: str, limits: Limits | None) -> Result:
    """The result of one row. An absent or refusing backend of ours is `missing`."""
    backends = record["backends"]
    others = {b: e for b, e in backends.items() if b != OURS}
    alternatives = sorted(
        (Alternative(b, median_us(times(e))) for b, e in others.items() if e["status"] == "ok"),
        key=lambda a: a.time_us,
    )
    unusable = tuple((b, e["reason"]) for b, e in others.items() if e["status"] != "ok")
    ours = backends.get(OURS, {"status": "missing", "reason": ""})
    status = {"refused": "missing"}.get(ours["status"], ours["status"])
    limit = ceiling(limits, record["cost"], record["peak"], record["dtype"]) if limits else None
    if status != "ok":
        reason = ours["reason"]
        return Result(
            record, run, status, reason, None, None, tuple(alternatives), unusable, None, limit
        )
    ratio = None
    if alternatives:
        best = times(others[alternatives[0].backend])
        ratio = compare_ours(ours["forward_us"], ours["reversed_us"], best)
    samples = times(ours)
    return Result(
        record,
        run,
        status,
        "",
        median_us(samples),
        spread(samples),
        tuple(alternatives),
        unusable,
        ratio,
        limit,
        regret_of(record),
    )


def results(runs: Iterable[Run]) -> list[Result]:
    """The judged rows of runs, later runs replacing rows of earlier ones. A row of ours alone, as a
    sweep repeated for its noise has them, replaces none that others were timed in.
    """
    found: dict[Any, Result] = {}
    for run in runs:
        limits = limits_of(run.header["config"]["device"])
        for key, record in run.rows.items():
            if key not in found or len(record["backends"]) > 1 or not found[key].alternatives:
                found[key] = judge(record, run.name, limits)
    return list(found.values())
