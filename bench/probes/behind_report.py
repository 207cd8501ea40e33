"""What behind.py says of a row: names of candidates, the best, what failed."""

import dataclasses
import statistics
from typing import Any

TOP = 3


def name_of(tiling: Any) -> str:
    if tiling is None:
        return "shipped"
    kept = [
        f"{f.name}={getattr(tiling, f.name)}"
        for f in dataclasses.fields(tiling)
        if getattr(tiling, f.name) != f.default
    ]
    return " ".join([type(tiling).__name__, *kept])


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two measurements of a row: the mean of the medians; a fault in either is kept."""
    records = []
    for first, second in zip(a["candidates"], b["candidates"], strict=True):
        if "us" in first and "us" in second:
            both = [first["us"], second["us"]]
            records.append(first | {"us": statistics.mean(both), "places": both})
        else:
            records.append(second if "us" in first else first)
    shared = a["baselines"].keys() & b["baselines"].keys()
    baselines = {k: statistics.mean([a["baselines"][k], b["baselines"][k]]) for k in shared}
    return {"candidates": records, "baselines": baselines}


def summary(row: Any, found: dict[str, Any]) -> str:
    """One line: what ships, the best, the peers."""
    timed = sorted((c for c in found["candidates"] if "us" in c), key=lambda c: c["us"])
    shipped = next((c["us"] for c in timed if c["name"] == "shipped"), float("nan"))
    others = " ".join(f"{k} {v:.2f}" for k, v in sorted(found["baselines"].items()))
    best = timed[0] if timed else {"us": float("nan"), "name": "none ran"}
    per_ns = ""
    if row.label.startswith("width"):
        per_ns = f" | {best['us'] * 1e6 / (row.rows * row.n):.3f} ps an element"
    return (
        f"{row.op:20s} {row.label:23s} {row.dtype:4s} shipped {shipped:8.2f} best "
        f"{best['us']:8.2f} {others} | {best['name']}{per_ns}"
    )


def details(found: dict[str, Any]) -> None:
    timed = sorted((c for c in found["candidates"] if "us" in c), key=lambda c: c["us"])
    for c in timed[:TOP]:
        print(f"    {c['us']:8.2f} low {c['low_us']:8.2f} {c['name']} {c.get('places', '')}")
    failed = [c for c in found["candidates"] if "us" not in c]
    for c in failed[:2]:
        print(f"    failed: {c['name']}: {c['status'][-140:]!r}")
    if len(failed) > 2:
        print(f"    {len(failed)} failed")
