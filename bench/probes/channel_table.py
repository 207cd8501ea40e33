"""What the channel norms' probe found, as rows of their tuning table."""

import dataclasses
import json
import pathlib
from typing import Any

import common
from opkiln_norm.channel_plan import Tiling

TUNING = common.ROOT / "packages/norm/src/opkiln_norm/tuning/channel_sm90.json"
GAIN = 0.995  # of Triton's time, above which a CUDA tiling does not displace it
KEYS = {
    "rows": ("op", "itemsize", "given", "view"),
    "cuda_rows": ("op", "itemsize", "mode", "channels", "cols"),
}


def changed(use: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Triton tiling that are not at their default."""
    default = dataclasses.asdict(Tiling(0, 0, 0))
    return {k: v for k, v in use.items() if v != default[k]}


def best_of(found: list[dict[str, Any]], triton: bool) -> tuple[dict[str, Any], list[float]] | None:
    """Of all rows of a key, the candidate that comes closest to the goal where it is farthest from
    it, then the fastest; a Triton one that spills is out."""
    goals = [min((v for v in (r["bar"], r["page"]) if v), default=1.0) for r in found]
    times: dict[str, list[float]] = {}
    candidate: dict[str, dict[str, Any]] = {}
    for r in found:
        for c in r["candidates"]:
            if "us" in c and (c["kind"] == "triton") == triton and not c.get("spills"):
                times.setdefault(c["name"], []).append(c["us"])
                candidate[c["name"]] = c
    whole = {name: t for name, t in times.items() if len(t) == len(found)}
    if not whole:
        return None

    def distance(name: str) -> tuple[float, float]:
        times = whole[name]
        return max(t / goal for t, goal in zip(times, goals, strict=True)), sum(times)

    name = min(whole, key=distance)
    return candidate[name], whole[name]


def grouped(results: list[dict[str, Any]], table: str) -> dict[str, list[dict[str, Any]]]:
    """The results by what the table knows them by."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        if set(KEYS[table]) <= set(r):
            groups.setdefault(json.dumps([r[n] for n in KEYS[table]]), []).append(r)
    return groups


def entry_of(table: str, found: list[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any] | None:
    """The best Triton tiling; of the CUDA ones the best, where it is faster than Triton's."""
    best, rival = best_of(found, triton=table == "rows"), best_of(found, triton=True)
    if best is None:
        return None
    chosen, times = best
    if table == "cuda_rows" and rival and sum(times) > GAIN * sum(rival[1]):
        return None
    labels = (f"{r['label']} {r['dtype']}" for r in found)
    figures = {label: round(t, 3) for label, t in zip(labels, times, strict=True)}
    entry = {n: found[0][n] for n in KEYS[table]} | {"label": found[0]["label"]}
    entry |= {"kind": chosen["kind"]} if table == "cuda_rows" else {}
    use = changed(chosen["use"]) if table == "rows" else chosen["use"]
    return entry | {"use": use, "measured": run | {"us": figures}}


def write_tuning(results: pathlib.Path) -> None:
    """Put the rows that were measured into the table; the others stay as they are."""
    data, old = (json.loads(p.read_text("utf-8")) for p in (results, TUNING))
    run = {k: data[k] for k in ("gpu", "date", "commit")}
    for table in KEYS:
        measured = grouped(data["results"], table)
        entries = {key: found[0] for key, found in grouped(old[table], table).items()}
        for key, found in measured.items():
            entry = entry_of(table, found, run)
            entries.pop(key, None)
            if entry is not None:
                entries[key] = entry
        old[table] = [entries[key] for key in sorted(entries)]
        print(table, len(measured), "measured,", len(entries), "in", TUNING.name)
    common.write_json(TUNING, old)
