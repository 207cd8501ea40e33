"""The record of a run: `records.jsonl`, one JSON object a line.

Each line states its kind: `header` (schema, environment, commit, configuration), `row` (one that
has finished), `footer` (where the time went). A resumed run appends another header and footer; a
killed one has no footer. A reader skips kinds that it does not know, so that a new one leaves the
schema's version alone. A line is written whole and flushed, so a killed run loses only the row in
flight; a torn last line is ignored.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
FILE = "records.jsonl"
RECORDS = "records"  # folder of a published report: one file a run
MULTIRUN = "multirun.yaml"  # Hydra's mark on a folder of jobs: shards, named 0, 1, ...

LEAST_SHOWN_S = 0.05

Key = tuple[str, str, str]


class RecordError(ValueError):
    """A record that cannot be read, with the reason."""


def row_key(row: dict[str, Any]) -> Key:
    return row["op"], row["label"], row["dtype"]


@dataclass
class Run:
    """A run as read back: its newest header, the newest line of each row, every footer."""

    name: str
    header: dict[str, Any]
    rows: dict[Key, dict[str, Any]]
    path: Path
    footers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def spent(self) -> list[tuple[str, float]]:
        """Seconds by phase, the longest first, of all the footers."""
        total: Counter[str] = Counter()
        for footer in self.footers:
            total.update(footer["seconds"])
        return [(name, s) for name, s in total.most_common() if s >= LEAST_SHOWN_S]

    @property
    def wall_s(self) -> float:
        return sum(footer["wall_s"] for footer in self.footers)


class Recorder:
    """Appends to a run's record."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, entry: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, **entry}, separators=(",", ":"), sort_keys=False)
        with open(self.path, "a+b") as stream:
            # a line torn by a kill must not swallow the one that is written now
            if stream.tell() and not _ends_with_newline(stream):
                stream.write(b"\n")
            stream.write(line.encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def _ends_with_newline(stream: Any) -> bool:
    stream.seek(-1, os.SEEK_END)
    return bool(stream.read(1) == b"\n")


def record_path(folder: Path) -> Path:
    """The record in a run's folder; a record itself."""
    return folder / FILE if folder.is_dir() else folder


def run_name(path: Path) -> str:
    """The name of a record's run: its folder's; `split/0` for the first shard of split."""
    if path.name != FILE:
        return path.stem
    folder = path.parent.resolve()
    is_shard = (folder.parent / MULTIRUN).is_file()
    return f"{folder.parent.name}/{folder.name}" if is_shard else folder.name


def read_run(folder: Path, name: str | None = None) -> Run:
    """A run's record. Raises RecordError if there is none or its schema is another."""
    path = record_path(folder)
    if not path.is_file():
        raise RecordError(f"{folder} holds no {FILE}")
    header: dict[str, Any] = {}
    rows: dict[Key, dict[str, Any]] = {}
    footers: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # torn by a kill
            continue
        if entry["kind"] == "header":
            if entry["schema_version"] != SCHEMA_VERSION:
                raise RecordError(
                    f"{path} has schema {entry['schema_version']}, "
                    f"this version reads {SCHEMA_VERSION}"
                )
            header = entry
        elif entry["kind"] == "row":
            rows[row_key(entry)] = entry
        elif entry["kind"] == "footer":
            footers.append(entry)
    if not header:
        raise RecordError(f"{path} has no header")
    return Run(name or run_name(path), header, rows, path, footers)


def read_runs(folder: Path) -> list[Run]:
    """The runs of a published report, the oldest first; the one run of a run's own folder."""
    records = folder / RECORDS
    kept = sorted(records.rglob("*.jsonl")) if folder.is_dir() else []
    names = [path.relative_to(records).with_suffix("").as_posix() for path in kept]
    runs = [read_run(*pair) for pair in zip(kept, names, strict=True)] or [read_run(folder)]
    return sorted(runs, key=lambda run: run.header["date"])


def collect(runs: Iterable[Run], folder: Path) -> int:
    """Fold rows and footers of several runs (shards) into one record; later runs win.

    Returns how many rows were written.
    """
    runs = list(runs)
    rows = {key: row for run in runs for key, row in run.rows.items()}
    path = folder / FILE
    if path.exists():
        raise RecordError(f"{path} exists: collect writes a new run")
    recorder = Recorder(folder)
    header = {k: v for k, v in runs[-1].header.items() if k != "kind"}
    recorder.write("header", {**header, "collected_from": [run.name for run in runs]})
    for row in rows.values():
        recorder.write("row", {k: v for k, v in row.items() if k != "kind"})
    for run in runs:
        for footer in run.footers:
            recorder.write("footer", {k: v for k, v in footer.items() if k != "kind"})
    return len(rows)
