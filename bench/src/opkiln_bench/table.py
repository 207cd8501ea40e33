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

from opkiln import own_table
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
        "us": {backend: time_of(entry) for backend, entry in timed.items()},
        "host_us": {b: e["host_us"] for b, e in timed.items() if e.get("host_us") is not None},
        **({"roofline_us": round(roofline, 3)} if roofline else {}),
        "date": row["date"],
        "commit": row["commit"],
        "run": run.name,
    }


def time_of(entry: dict[str, Any]) -> float:
    """The median, or what a search came to (opkiln_bench.tune)."""
    return float(entry.get("tuned_us") or round(median_us(times(entry)), 3))


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
            head = {"schema": SCHEMA, "gpu": gpu}
            replace_file(path, as_text(head, {"times": entries}))
            written[str(path)] = len(entries)
    return written, left_out


def write_own(
    runs: Sequence[Run], arch: str, tilings: Sequence[dict[str, Any]] = ()
) -> tuple[dict[str, int], Counter[str]]:
    """Add times, and tilings, to the user's table of the runs' machine and software.

    What it has of the same calls is replaced, the rest stays; a table that cannot be read is begun
    anew. Other processes may do the same meanwhile. RecordError where the runs differ in machine
    or software.
    """
    families, left_out = times_of(runs)
    entries = [entry for found in families.values() for entry in found]
    made_with = identity_of(runs)
    path = own_table.path_of(arch, made_with)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = earlier(path, made_with)
        head = {"schema": SCHEMA, "gpu": made_with["gpu"], "made_with": made_with}
        lists = {
            "tilings": merged(before.get("tilings", []), tilings),
            "times": merged(before.get("times", []), entries),
        }
        replace_file(path, as_text(head, lists))
    return {str(path): len(entries)}, left_out


def identity_of(runs: Sequence[Run]) -> own_table.Identity:
    """The machine and the software that all of the runs had."""
    one_gpu(runs)
    found = []
    for run in runs:
        env = run.header["environment"]
        made_with = own_table.identity(env["device"], env["driver"], env["torch"], env["versions"])
        if made_with not in found:
            found.append(made_with)
    if len(found) != 1:
        names = [n for n in found[0] if any(n not in f or f[n] != found[0][n] for f in found)]
        raise RecordError(f"your own table is of one machine, these runs differ in {names[0]}")
    return found[0]


def earlier(path: Path, made_with: own_table.Identity) -> dict[str, Any]:
    """A user's table as it is; empty where it is none, or does not serve."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        own_table.check(found, made_with)
        merged(found.get("tilings", []), found["times"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return dict(found)


def merged(before: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of both, the new ones in place of those of the same calls."""
    found = {bucket_key(entry): entry for entry in [*before, *new]}
    return [found[key] for key in sorted(found)]


def bucket_key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["op"], entry["kind"], *entry["sizes"]


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def as_text(head: dict[str, Any], lists: dict[str, Sequence[dict[str, Any]]]) -> str:
    """JSON with an entry a line, so that a diff shows which changed."""
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, entries in lists.items():
        lines = ",\n".join(json.dumps(entry) for entry in entries)
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return f"{{{', '.join(parts)}}}\n"
