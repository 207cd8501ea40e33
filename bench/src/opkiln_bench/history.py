"""`opkiln-bench history ROW`: one row's numbers through every run, the oldest first."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opkiln_bench.analysis import Result, results
from opkiln_bench.records import FILE, RECORDS, RecordError, Run, read_run, read_runs
from opkiln_bench.verify import name_of, row_matches


def runs_under(path: Path) -> list[Run]:
    """A run, a published report, or every run in a folder (shards too)."""
    if path.is_file() or (path / FILE).is_file() or (path / RECORDS).is_dir():
        return read_runs(path)
    return [read_run(record.parent) for record in sorted(path.rglob(FILE))]


def lines(paths: Sequence[Path], wanted: str) -> Iterator[str]:
    """A heading a row, a line a run. RecordError if nothing is found."""
    found = {(r.name, r.header["date"]): r for p in paths for r in runs_under(p)}
    runs = sorted(found.values(), key=lambda r: r.header["date"])
    if not runs:
        raise RecordError(f"no runs in {', '.join(str(p) for p in paths)}")
    by_name: dict[str, list[Result]] = {}
    known: dict[str, dict[str, Any]] = {}
    for run in runs:
        for result in results([run]):
            name = name_of(result.record)
            known[name] = result.record
            if row_matches(result.record, wanted):
                by_name.setdefault(name, []).append(result)
    if not by_name:
        near = difflib.get_close_matches(wanted, known, n=4, cutoff=0.3) or list(known)[:4]
        raise RecordError(f"no run has a row {wanted}; the nearest are {', '.join(near)}")
    for name, times in by_name.items():
        yield name
        yield from (f"  {line_of(result)}" for result in times)


def line_of(result: Result) -> str:
    """date, commit, our time, the best alternative and the ratio."""
    record = result.record
    ours = f"{result.ours_us:.2f} us" if result.ours_us else result.status
    best = result.alternatives[0] if result.alternatives else None
    rest = f", {best.backend} {best.time_us:.2f} us" if best else ""
    ratio = f", {result.ratio.value:.2f}x {result.ratio.verdict}" if result.ratio else ""
    return f"{record['date']} {record['commit']} {result.run}: {ours}{rest}{ratio}"
