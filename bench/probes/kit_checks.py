"""The conformance kit's checks that are no case of their own: outcome and seconds of each on a GPU.

    python bench/probes/kit_checks.py --out DIR [--jobs 16] [--op OP ...] [--kind rows torch device]

rows: row_counts.py, torch: torch_checks.py, device: cuda_checks.py. A line for each op and kind as
it ends, then all that failed and the seconds by check. Writes DIR/kit_checks.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from opkiln.conformance.checks import Outcome
from opkiln.conformance.cuda_checks import device_checks
from opkiln.conformance.row_counts import row_count_checks
from opkiln.conformance.torch_checks import torch_checks
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY

BACKEND = "opkiln"


def outcomes(op: str, kind: str) -> Iterator[Outcome]:
    device = torch.device("cuda", 0)
    if kind == "device":
        return device_checks(op, BACKEND, device, big=False)
    checks = row_count_checks if kind == "rows" else torch_checks
    return (task() for task in checks(op, BACKEND, device))


def checked(op: str, kind: str) -> list[dict[str, Any]]:
    """Of one op and kind: what each check said, and its seconds."""
    torch.empty(1, device="cuda")
    found, start = [], time.perf_counter()
    for outcome in outcomes(op, kind):
        now = time.perf_counter()
        told = {"op": op, "kind": kind, "check": outcome.features[0], "case": outcome.case}
        told |= {"status": outcome.status, "message": outcome.message}
        found.append(told | {"seconds": round(now - start, 2)})
        start = now
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument(
        "--op", nargs="+", default=[n for n in CATALOGUE if BACKEND in REGISTRY.of(n)]
    )
    parser.add_argument("--kind", nargs="+", default=["rows", "torch"])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    start = time.perf_counter()
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(checked, op, kind) for kind in given.kind for op in given.op]
        for future in as_completed(parts):
            found += (part := future.result())
            (given.out / "kit_checks.json").write_text(json.dumps(found, indent=1))
            if part:
                seconds = ", ".join(f"{p['check']} {p['status']} {p['seconds']}" for p in part)
                print(f"{part[0]['op']}: {seconds}", flush=True)
    for one in found:
        if one["status"] == "failed" or (one["status"] == "refused" and one["kind"] == "torch"):
            print(f"{one['status']} {one['op']} {one['case']}: {one['message']}")
    for check in dict.fromkeys(one["check"] for one in found):
        mine = [one for one in found if one["check"] == check]
        passed = sum(one["status"] == "passed" for one in mine)
        seconds = [one["seconds"] for one in mine]
        print(f"{check}: {passed} of {len(mine)} passed, {sum(seconds):.0f} s, most {max(seconds)}")
    print(f"{time.perf_counter() - start:.0f} s with {given.jobs} processes")


if __name__ == "__main__":
    main()
