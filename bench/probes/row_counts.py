"""Batch invariance on a GPU: every op that promises it, each plain case, 35 row counts to 4,096.

    python bench/probes/row_counts.py --out DIR [--jobs 12] [--op OP ...]

The checks are the conformance kit's own (opkiln.conformance.row_counts), without its other cases: a
line for each op as it ends, then what failed. Writes DIR/row_counts.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from opkiln.conformance.row_counts import row_count_checks
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY

BACKEND = "opkiln"


def promised() -> list[str]:
    return [
        name
        for name, spec in CATALOGUE.items()
        if spec.forward_op is None and "batch_invariant" in REGISTRY.of(name)[BACKEND].traits
    ]


def checked(op: str) -> dict[str, Any]:
    """Of one op: seconds, and case -> [status, message]."""
    start = time.perf_counter()
    outcomes = list(row_count_checks(op, BACKEND, torch.device("cuda", 0)))
    cases = {o.case: [o.status, o.message] for o in outcomes}
    return {"op": op, "seconds": round(time.perf_counter() - start, 1), "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--op", action="append")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, context) as pool:
        for future in as_completed([pool.submit(checked, op) for op in given.op or promised()]):
            found.append(future.result())
            (given.out / "row_counts.json").write_text(json.dumps(found, indent=1))
            statuses = [status for status, _ in found[-1]["cases"].values()]
            counts = {s: statuses.count(s) for s in sorted(set(statuses))}
            print(f"{found[-1]['op']}: {counts}, {found[-1]['seconds']} s", flush=True)
            for case, (status, message) in found[-1]["cases"].items():
                if status == "failed" or (status == "refused" and "float64" not in message):
                    print(f"  {status} {case}: {message}", flush=True)
    statuses = [status for op in found for status, _ in op["cases"].values()]
    print(f"{len(found)} ops: { ({s: statuses.count(s) for s in sorted(set(statuses))}) }")


if __name__ == "__main__":
    main()
