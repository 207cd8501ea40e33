"""What a measured row says in one line, and the tuning table that follows from all of them."""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import common

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]

from opkiln_norm import row_plan  # noqa: E402
from opkiln_norm.row_cluster import ClusterTiling  # noqa: E402
from opkiln_norm.row_plan import Tiling  # noqa: E402
from row_pages import read_rows  # noqa: E402

TUNING = common.ROOT / "packages/norm/src/opkiln_norm/tuning/sm90.json"
CLUSTER_GAIN = 1.01  # less is not worth a second kernel


def short(candidate: dict[str, Any]) -> str:
    """A tiling on one line, defaults left out."""
    kept = changed(candidate)
    if kernel_of(candidate) == "row_cluster":
        size = f"cluster {kept.pop('cluster')}x{kept.pop('threads')}x{kept.pop('vectors')}"
    else:
        size = f"{kept.pop('block_m', 1)}x{kept.pop('chunks', 1)}x{kept.pop('block_n')}"
        size += f" w{kept.pop('num_warps')}"
    return " ".join([size, *(k if v is True else f"{k}={v}" for k, v in kept.items())])


def kernel_of(candidate: dict[str, Any]) -> str:
    return candidate.get("kernel", "row_norm")


def changed(candidate: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tiling that are not at their default."""
    clustered = kernel_of(candidate) == "row_cluster"
    default = dataclasses.asdict(ClusterTiling(0, 0, 0) if clustered else Tiling(0, 0))
    return {k: v for k, v in candidate["use"].items() if v != default[k]}


def write_tuning(paths: list[pathlib.Path]) -> None:
    """For each (op, element size, N, number of rows): the best tiling that does not spill.

    What the files do not measure stays as it is in the table.
    """
    groups: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for data in (json.loads(path.read_text("utf-8")) for path in paths):
        for r in data["results"]:
            key = (r["op"], r["itemsize"], r["n"], r["rows"])
            groups.setdefault(key, {}).setdefault(r["dtype"], []).append((data, r))
    table = json.loads(TUNING.read_text("utf-8"))
    new = {(*key[:3], regime(*key)[0]) for key in groups}
    for name in ("rows", "cluster_rows"):
        table[name] = [r for r in table[name] if place_of(r) not in new]
    for key, by_dtype in groups.items():
        head = dict(zip(("op", "itemsize", "n"), key, strict=False)) | {"rows": regime(*key)}
        triton, cuda = (best_of(by_dtype, k) for k in ("row_norm", "row_cluster"))
        if triton is not None:
            table["rows"].append(head | triton[1])
        if cuda is not None and (triton is None or cuda[0] * CLUSTER_GAIN <= triton[0]):
            table["cluster_rows"].append(head | cuda[1])
    for name in ("rows", "cluster_rows"):
        table[name].sort(key=place_of)
    common.write_json(TUNING, table)
    counts = {name: len(table[name]) for name in ("rows", "cluster_rows")}
    print(counts, TUNING.relative_to(common.ROOT))


def place_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    """A table row's place: op, element size, N, least number of rows."""
    return (entry["op"], entry["itemsize"], entry["n"], entry["rows"][0])


def best_of(by_dtype: dict[str, list[Any]], kernel: str) -> tuple[float, dict[str, Any]] | None:
    """Of the tiling whose worst dtype is best: that dtype's time over its target, the entry."""
    times: dict[str, dict[str, float]] = {}
    targets: dict[str, float] = {}
    spilling: set[str] = set()
    for dtype, runs in by_dtype.items():
        for _, r in runs:
            targets[dtype] = min(r["bar"], r["page"])
            for c in r["candidates"]:
                use = json.dumps(changed(c))
                if c.get("spills"):
                    spilling.add(use)
                if "us" in c and kernel_of(c) == kernel:
                    found = times.setdefault(use, {})
                    found[dtype] = min(c["us"], found.get(dtype, c["us"]))
    whole = {use: t for use, t in times.items() if len(t) == len(targets) and use not in spilling}
    if not whole:
        return None

    def worst(use: str) -> float:
        return max(us / targets[dtype] for dtype, us in whole[use].items())

    use = min(whole, key=worst)
    data, r = next(iter(by_dtype.values()))[-1]
    rounded = {dtype: round(t, 3) for dtype, t in whole[use].items()}
    measured = {k: data[k] for k in ("gpu", "date", "commit")} | {"us": rounded}
    return worst(use), {"label": r["label"], "use": json.loads(use), "measured": measured}


def regime(op: str, itemsize: int, n: int, rows: int) -> list[int | None]:
    """Numbers of rows that a measurement speaks for: up to halfway to the pages' next one."""
    if rows <= row_plan.FEW_ROWS:
        return [1, row_plan.FEW_ROWS]
    others = {r.rows for r in read_rows("") if (r.op, r.itemsize, r.n) == (op, itemsize, n)}
    above = [r for r in others if r > rows]
    below = [r for r in others if row_plan.FEW_ROWS < r < rows]
    low = max(below) * 4 if below else row_plan.FEW_ROWS + 1
    return [low, rows * 4 - 1 if above else None]


def line(result: dict[str, Any]) -> str:
    """A row's best candidate of each kind."""
    timed = sorted((c for c in result["candidates"] if "us" in c), key=lambda c: c["us"])
    failed = len(result["candidates"]) - len(timed)
    name = f"{result['op']:20s} {result['label']:23s} {result['dtype']:4s}"
    if not timed:
        return f"{name} no candidate ran: {result['candidates'][0]['status']}"
    kinds: dict[str, Any] = {}
    for c in timed:
        kinds.setdefault(kind(c), c)
    bests = " | ".join(f"{k} {c['us']:.2f} {short(c)}" for k, c in kinds.items())
    bar, page = result["bar"], result["page"]
    others = " ".join(f"{k} {v:.2f}" for k, v in result["baselines"].items())
    head = f"{name} {timed[0]['us']:8.2f} bar {bar:.2f} page {page:.2f}"
    return (
        f"{head} ratio {min(bar, page) / timed[0]['us']:.3f} | {bests} | {others} | {failed} failed"
    )


def kind(candidate: dict[str, Any]) -> str:
    """Which of the designs it is."""
    use = candidate["use"]
    if kernel_of(candidate) == "row_cluster":
        name = ClusterTiling(**use).kernel.removeprefix("row_")
        return name + "-persistent" * use["persistent"]
    if use["head"]:
        return ("twice", "looped", "tail")[min(use["chunks"], 2)]
    return "persistent" if use["programs_per_sm"] else "resident"
