"""`opkiln tune --from step.json`: measure the calls of a captured step, and search their tilings.

Ours and torch are timed on exactly the step's calls, as a sweep does, into a run of its own. Then
each call of ours that its family can tune is searched. Times and tilings go to the user's table
(opkiln.own_table), which the next process uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from opkiln.measured import arch_of

from opkiln_bench.analysis import OURS
from opkiln_bench.contestants import bring, chosen_backends
from opkiln_bench.environment import commit, device_name
from opkiln_bench.limits import find_profile, limits_of
from opkiln_bench.records import Recorder, RecordError, read_run
from opkiln_bench.report import publish
from opkiln_bench.row import Row
from opkiln_bench.runner import device_in_use, device_kind, make_timer
from opkiln_bench.search import Found, search
from opkiln_bench.settings import Device
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.step import read_step
from opkiln_bench.sweep import Entry, Sweep, header_of, one_line
from opkiln_bench.table import write_own
from opkiln_bench.timing import Timer
from opkiln_bench.verdict import median_us

SEARCH = {"min_samples": 10, "max_samples": 20, "budget_ms": 100.0}
BACKENDS = (OURS, "torch")

Say = Callable[[str], None]


def tune(step: Path, runs_dir: Path, say: Say) -> int:
    """Measure, search, write. Exit code 0; 1 where no call could be measured."""
    rows = read_step(step)
    if not rows:
        raise RecordError(f"{step} has no calls: nothing of opkiln ran inside opkiln.capture")
    kind = device_kind("auto")
    with device_in_use(kind, None, say) as device:
        arch = arch_of(device)
        if arch is None:
            raise RecordError("tune: no GPU here")
        folder = runs_dir / f"tune_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        tilings = tune_rows(rows, device, folder, step.name, say)
        publish([folder], folder / "pages", folder / "rows.csv")
        written, _ = write_own([read_run(folder)], arch, tilings)
    for path, entries in written.items():
        say(f"{entries} times and {len(tilings)} tilings in {path}")
    return 0 if any(written.values()) else 1


def tune_rows(
    rows: Sequence[Row], device: torch.device, folder: Path, source: str, say: Say
) -> list[dict[str, Any]]:
    """Measure each row into a record in `folder`; the tilings that are faster than those in use."""
    settings = TimerSettings()
    known = find_profile(device_name(device)) if device.type == "cuda" else None
    profile = {**vars(Device()), **(known or {})}
    timer = make_timer(settings, device)
    stamp = commit()
    recorder = Recorder(folder)
    stated = {"device": profile, "timer": vars(settings), "step": source}
    recorder.write("header", header_of(device, timer, stamp, stated, BACKENDS))
    chosen = [b for b in chosen_backends(["*"]) if b in BACKENDS]
    sweep = Sweep(device, timer, settings, chosen, stamp, limits_of(profile))
    searcher = make_timer(replace(settings, **SEARCH), device)
    tilings: list[dict[str, Any]] = []
    for number, row in enumerate(rows, 1):
        try:
            entry = sweep.measure(row)
            found = search_row(row, entry, device, searcher)
        except Exception as error:  # the other calls are still worth measuring
            say(f"[{number}/{len(rows)}] {row}  not measured: {one_line(error)}")
            continue
        entry["count"] = row.count
        if found is not None and found.tiling is not None:
            tilings.append(tiling_entry(entry, found, folder.name))
            ours = entry["backends"][OURS]
            ours |= {"tuned_us": round(found.us, 3), "tiling": dict(found.tiling)}
        recorder.write("row", entry)
        say(f"[{number}/{len(rows)}] {row}  {told(entry, found)}")
    return tilings


def search_row(row: Row, entry: Entry, device: torch.device, timer: Timer) -> Found | None:
    """What the search finds for a row whose result was right."""
    if entry["backends"].get(OURS, {}).get("status") != "ok":
        return None
    return search(bring(row, device), timer)


def tiling_entry(entry: Entry, found: Found, run: str) -> dict[str, Any]:
    """As the user's table keeps it: by the bucket of the call, with where it comes from."""
    assert found.tiling is not None
    return {
        "op": entry["name"],
        **entry["bucket"],
        "tiling": dict(found.tiling),
        "us": round(found.us, 3),
        "before_us": round(found.before_us, 3),
        "date": entry["date"],
        "commit": entry["commit"],
        "run": run,
    }


def told(entry: Entry, found: Found | None) -> str:
    """`opkiln 12.3 us, torch 20.1 us; 14 tilings tried, 10.9 us`"""
    parts = []
    for backend, seen in entry["backends"].items():
        if seen["status"] == "ok":
            us = median_us([*seen["forward_us"], *seen["reversed_us"]])
            parts.append(f"{backend} {us:.2f} us")
        else:
            parts.append(f"{backend} {seen['status']}: {seen['reason']}")
    text = ", ".join(parts)
    if found is None:
        return text
    better = f"{found.before_us:.2f} -> {found.us:.2f} us" if found.tiling else "none is faster"
    return f"{text}; {found.tried} tilings tried, {better}"
