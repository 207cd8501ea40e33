"""`opkiln-bench verify RUN --row N`: measure one published row again, and say if it comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from opkiln_bench.analysis import OURS, Result, judge
from opkiln_bench.catalogue import load_rows
from opkiln_bench.compare import SHORT_US, WORST_WITHIN
from opkiln_bench.contestants import chosen_backends
from opkiln_bench.environment import commit, device_name
from opkiln_bench.held_back import every_row
from opkiln_bench.records import RecordError, Run
from opkiln_bench.report import ordered
from opkiln_bench.rows_csv import read_csv
from opkiln_bench.settings import Timer as TimerSettings

JITTER_US = 0.3  # of a launch; what two runs of a row below 5 us may differ by


def name_of(record: dict[str, Any]) -> str:
    return f"{record['op']}/{record['label']}/{record['dtype']}"


def row_matches(record: dict[str, Any], wanted: str) -> bool:
    """`op`, `op/workload` or `op/workload/dtype`, as patterns; the op by either name."""
    op, *rest = wanted.split("/")
    names = [record["label"], record["dtype"]]
    return any(fnmatchcase(record[k], op) for k in ("op", "name")) and all(
        fnmatchcase(name, pattern) for name, pattern in zip(names, rest, strict=False)
    )


def published_row(runs: Sequence[Run], wanted: str, rows_csv: Path) -> Result:
    """The row with this number (its line in rows.csv, from 1) or name. RecordError if not one."""
    rows = ordered(runs, [row.key for row in load_rows(mode="all")])
    if wanted.isdecimal():
        return numbered(rows, int(wanted), rows_csv)
    found = [r for r in rows if row_matches(r.record, wanted)]
    if len(found) != 1:
        some = ", ".join(name_of(r.record) for r in (found or rows)[:4])
        raise RecordError(f"--row {wanted} names {len(found)} rows; such as {some}")
    return found[0]


def numbered(rows: Sequence[Result], number: int, rows_csv: Path) -> Result:
    """The row on this line of `rows_csv`, which may hold rows of other runs; of `rows` without."""
    by_key = {published_key(row): row for row in rows}
    lines = [(r["op"], r["label"], r["dtype"]) for r in read_csv(rows_csv)] or list(by_key)
    if not 1 <= number <= len(lines):
        raise RecordError(f"--row must be 1 to {len(lines)}, or op/workload/dtype, got {number}")
    key = lines[number - 1]
    if key not in by_key:
        raise RecordError(
            f"row {number} of {rows_csv} is {'/'.join(key)}, which no record here has"
        )
    return by_key[key]


@dataclass(frozen=True)
class Figure:
    """One number as published and as measured again."""

    name: str
    before: float
    after: float
    within: float

    @property
    def difference(self) -> float:
        return max(self.before, self.after) / min(self.before, self.after) - 1

    @property
    def reproduced(self) -> bool:
        return self.difference <= self.within

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.before:.4g}, now {self.after:.4g}: {self.difference:.1%} apart, "
            f"{'within' if self.reproduced else 'more than'} {self.within:.0%}"
        )


def figures(before: Result, after: Result, within: float = WORST_WITHIN) -> list[Figure]:
    """Our time, the best alternative's and the ratio. Below 5 us a launch's jitter is allowed."""

    def time(name: str, old: float, new: float) -> Figure:
        allowed = max(within, JITTER_US / old) if old < SHORT_US else within
        return Figure(f"{name} us", old, new, allowed)

    found = []
    if before.ours_us and after.ours_us:
        found.append(time(OURS, before.ours_us, after.ours_us))
    now = {a.backend: a.time_us for a in after.alternatives}
    for best in before.alternatives[:1]:
        if best.backend in now:
            found.append(time(best.backend, best.time_us, now[best.backend]))
    if len(found) == 2 and before.ratio and before.ours_us:
        ratio = found[1].after / found[0].after
        allowed = max(f.within for f in found)
        found.append(Figure("ratio", before.ratio.value, ratio, allowed))
    return found


def measure_again(published: Result, run: Run, say: Callable[[str], None]) -> Result:
    """The row measured now as the run measured it: its timer's settings, the same backends."""
    from opkiln_bench.runner import device_in_use, device_kind, make_timer
    from opkiln_bench.sweep import Sweep

    rows = [row for row in every_row() if row.key == published_key(published)]
    if not rows:
        raise RecordError(f"{name_of(published.record)} is no row of this opkiln-bench")
    known = {f.name for f in fields(TimerSettings)}
    stated = run.header["config"]["timer"]
    settings = TimerSettings(**{k: v for k, v in stated.items() if k in known})
    kind = device_kind("cpu" if published.record["timer"]["name"] == "wall" else "cuda")
    timed = [OURS, *(a.backend for a in published.alternatives[:1])]
    with device_in_use(kind, None, say) as device:
        here = device_name(device)
        if here != published.record["gpu"]:
            raise RecordError(f"published on {published.record['gpu']}, this machine has {here}")
        timer = make_timer(settings, device)
        sweep = Sweep(device, timer, settings, chosen_backends(timed), commit())
        return judge(sweep.measure(rows[0]), "now", None)


def published_key(result: Result) -> tuple[str, str, str]:
    record = result.record
    return record["op"], record["label"], record["dtype"]
