"""`opkiln-bench table RUN...`: the measured times that dispatch chooses by, from records.

Of opkiln and of torch alone: a peer is never picked, so its time decides nothing. Never of the
held-back sample, which says how well the tables do where they know nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from opkiln.measured import SCHEMA
from opkiln.ops import CATALOGUE

from opkiln_bench.analysis import OURS, times
from opkiln_bench.held_back import PAGE as HELD_BACK
from opkiln_bench.limits import ceiling, limits_of
from opkiln_bench.records import RecordError, Run
from opkiln_bench.verdict import median_us

BACKENDS = (OURS, "torch")
FAMILY = "{family}"  # in --out: a file for each family


NO_BUCKET = "their record states no bucket; measure them again"
IN_SAMPLE = "they are of the held-back sample, which no table is made from"


def times_of(runs: Iterable[Run]) -> tuple[dict[str, list[dict[str, Any]]], Counter[str]]:
    """Family -> its entries in the order of ops and sizes; how many rows were left out, by reason.

    Later runs win. RecordError where the runs are not of one GPU.
    """
    runs = sorted(runs, key=lambda run: run.header["date"])
    one_gpu(runs)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    left_out: Counter[str] = Counter()
    for run in runs:
        for row in run.rows.values():
            if HELD_BACK in row["pages"]:
                left_out[IN_SAMPLE] += 1
            elif "bucket" not in row:
                left_out[NO_BUCKET] += 1
            elif entry := entry_of(row, run):
                found[bucket_key(entry)] = entry
    families: dict[str, list[dict[str, Any]]] = {}
    for key in sorted(found):
        families.setdefault(CATALOGUE[key[0]].family, []).append(found[key])
    return families, left_out


def one_gpu(runs: Sequence[Run]) -> str:
    gpus = sorted({row["gpu"] for run in runs for row in run.rows.values()})
    if len(gpus) != 1:
        raise RecordError(f"a table is of one GPU, these runs have {', '.join(gpus) or 'no rows'}")
    return str(gpus[0])


def entry_of(row: dict[str, Any], run: Run) -> dict[str, Any] | None:
    """One row's entry; None where neither backend has a time, or the op is gone."""
    timed = {
        backend: entry
        for backend in BACKENDS
        if (entry := row["backends"].get(backend, {})).get("status") == "ok"
    }
    if not timed or row["name"] not in CATALOGUE:
        return None
    limits = limits_of(run.header["config"]["device"])
    roofline = limits and ceiling(limits, row["cost"], row["peak"], row["dtype"]).roofline_us
    return {
        "op": row["name"],
        **row["bucket"],
        "us": {backend: round(median_us(times(entry)), 3) for backend, entry in timed.items()},
        "host_us": {b: e["host_us"] for b, e in timed.items() if e.get("host_us") is not None},
        **({"roofline_us": round(roofline, 3)} if roofline else {}),
        "date": row["date"],
        "commit": row["commit"],
        "run": run.name,
    }


def write_tables(runs: Sequence[Run], out: str) -> tuple[dict[str, int], Counter[str]]:
    """Write the tables. Path -> entries; how many rows were left out, by reason.

    out: a path; `{family}` in it stands for each family that has entries.
    """
    families, left_out = times_of(runs)
    if FAMILY not in out:
        families = {"": [entry for entries in families.values() for entry in entries]}
    gpu = one_gpu(runs)
    written = {}
    for family, entries in families.items():
        if entries:
            path = Path(out.replace(FAMILY, family))
            replace_file(path, as_text(gpu, entries))
            written[str(path)] = len(entries)
    return written, left_out


def write_own(runs: Sequence[Run], path: Path) -> tuple[dict[str, int], Counter[str]]:
    """Add the times to a user's table: those of the same calls are replaced, the others stay.

    RecordError where the table is of another GPU.
    """
    families, left_out = times_of(runs)
    gpu, entries = one_gpu(runs), [entry for found in families.values() for entry in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if before.get("gpu", gpu) != gpu:
            raise RecordError(f"{path} is of {before['gpu']}, these runs are of {gpu}")
        merged = {bucket_key(e): e for e in [*before.get("times", []), *entries]}
        replace_file(path, as_text(gpu, [merged[key] for key in sorted(merged)]))
    return {str(path): len(entries)}, left_out


def bucket_key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["op"], entry["kind"], *entry["sizes"]


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def as_text(gpu: str, entries: Sequence[dict[str, Any]]) -> str:
    """JSON with an entry a line, so that a diff shows which changed."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    return f'{{"schema": {SCHEMA}, "gpu": {json.dumps(gpu)}, "times": [\n{lines}\n]}}\n'
