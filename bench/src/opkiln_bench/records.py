"""The record of a run: `records.jsonl`, one JSON object a line.

The first line is a header (schema, environment, commit, configuration); a resumed run appends
another. Every other line is one finished row. A line is written whole and flushed, so a killed run
loses only the row in flight; a torn last line is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
FILE = "records.jsonl"
RECORDS = "records"  # folder of a published report: one file a run

Key = tuple[str, str, str]


class RecordError(ValueError):
    """A record that cannot be read, with the reason."""


def row_key(row: dict[str, Any]) -> Key:
    return row["op"], row["label"], row["dtype"]


@dataclass
class Run:
    """A run as read back: its newest header and the newest line of each row."""

    name: str
    header: dict[str, Any]
    rows: dict[Key, dict[str, Any]]
    path: Path


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


def read_run(folder: Path) -> Run:
    """A run's record. Raises RecordError if there is none or its schema is another."""
    path = record_path(folder)
    if not path.is_file():
        raise RecordError(f"{folder} holds no {FILE}")
    header: dict[str, Any] = {}
    rows: dict[Key, dict[str, Any]] = {}
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
        else:
            rows[row_key(entry)] = entry
    if not header:
        raise RecordError(f"{path} has no header")
    name = path.parent.name if path.name == FILE else path.stem
    return Run(name, header, rows, path)


def read_runs(folder: Path) -> list[Run]:
    """The runs of a published report, the oldest first; the one run of a run's own folder."""
    kept = sorted((folder / RECORDS).glob("*.jsonl")) if folder.is_dir() else []
    runs = [read_run(path) for path in kept] or [read_run(folder)]
    return sorted(runs, key=lambda run: run.header["date"])


def collect(runs: Iterable[Run], folder: Path) -> int:
    """Fold the rows of several runs (shards) into one record; later runs win. Rows written."""
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
    return len(rows)
