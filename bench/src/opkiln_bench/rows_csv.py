"""`rows.csv`: one line a row of the catalogue. A sweep replaces exactly the rows it measured."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from opkiln_bench.analysis import OURS, Result
from opkiln_bench.records import Key

COLUMNS = (
    "op",
    "label",
    "dtype",
    "ours_ms",
    "best_alt",
    "best_alt_ms",
    "ratio",
    "ratio_lo",
    "ratio_hi",
    "verdict",
    "floor_ms",
    "share_of_floor",
    "sol",
    "bound",
    "status",
    "gpu",
    "date",
    "commit",
    "run",
    "spread",
    "host_us",
    "kernels",
    "first_call_ms",
    "peak_mbytes",
    "throttled",
    "auto",
    "regret",
)


def number(value: float | None, digits: int = 6) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def csv_line(result: Result) -> dict[str, str]:
    """One row as text; what was not measured is empty."""
    record = result.record
    ours = record["backends"].get(OURS, {})
    best = result.alternatives[0] if result.alternatives else None
    ratio, limit = result.ratio, result.ceiling
    peak = ours.get("peak_bytes")
    return {
        "op": record["op"],
        "label": record["label"],
        "dtype": record["dtype"],
        "ours_ms": number(result.ours_us and result.ours_us / 1e3),
        "best_alt": best.backend if best else "",
        "best_alt_ms": number(best.time_us / 1e3) if best else "",
        "ratio": number(ratio.value, 5) if ratio else "",
        "ratio_lo": number(ratio.low, 5) if ratio else "",
        "ratio_hi": number(ratio.high, 5) if ratio else "",
        "verdict": ratio.verdict if ratio else "",
        "floor_ms": number(limit.floor_us / 1e3) if limit else "",
        "share_of_floor": number(result.share_of_floor, 4),
        "sol": number(result.sol, 4),
        "bound": limit.bound if limit else "",
        "status": result.status,
        "gpu": record["gpu"],
        "date": record["date"],
        "commit": record["commit"],
        "run": result.run,
        "spread": number(result.spread, 3),
        "host_us": number(ours.get("host_us"), 4),
        "kernels": "" if ours.get("kernels") is None else str(ours["kernels"]),
        "first_call_ms": number(ours.get("first_call_ms"), 4),
        "peak_mbytes": number(peak / 1e6 if peak is not None else None, 5),
        "throttled": "yes" if result.throttled else "",
        "auto": result.regret.picked if result.regret else "",
        "regret": number(result.regret.value, 4) if result.regret else "",
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def update_csv(path: Path, results: Iterable[Result], order: Sequence[Key] = ()) -> int:
    """Replace or add the lines of `results`; every other line stays as it is. Lines written.

    order: keys in the order of the catalogue; lines outside it follow, as they were.
    """
    lines = {(r["op"], r["label"], r["dtype"]): r for r in read_csv(path)}
    for result in results:
        line = csv_line(result)
        lines[line["op"], line["label"], line["dtype"]] = line
    rank = {key: i for i, key in enumerate(order)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".csv.part")
    with open(partial, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(lines[k] for k in sorted(lines, key=lambda k: rank.get(k, len(rank))))
    partial.replace(path)
    return len(lines)
