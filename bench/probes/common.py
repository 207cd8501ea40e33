"""What the probes share: rows' dtypes, compiling in parallel, device times, provenance."""

import argparse
import concurrent.futures
import datetime
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
FLUSH_BYTES = 2 * 60 * 2**20  # twice the L2 of an H200
ITERATIONS = 25

sys.path.insert(0, str(ROOT / "bench/src"))

from opkiln_bench.timing import MeasureError  # noqa: E402
from opkiln_bench.timing.cupti import (  # noqa: E402
    ATTEMPTS,
    MARKER,
    forget_kept_lines,
    mark,
    recorded,
)
from opkiln_bench.timing.intervals import Activity, Span, attribute  # noqa: E402


def flush_buffer() -> torch.Tensor:
    """What is zeroed before every call, so that none finds its input in L2."""
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")


def kernel_times_us(
    calls: list[Callable[[], Any]], flush: torch.Tensor, iterations: int = ITERATIONS
) -> list[list[float]]:
    """Device time of each call, `iterations` times, as the bench times it: between two markers.

    Rounds over all calls, every second one reversed, so that drift hits all alike. A call that
    cannot be timed (nothing launched, work on another stream) takes infinitely long.
    """
    rounds = [list(range(len(calls)))[:: -1 if r % 2 else 1] for r in range(iterations)]
    order = [index for indices in rounds for index in indices]
    for attempt in range(ATTEMPTS):
        activities: list[Activity] = []
        with recorded(activities):
            for index in order:
                forget_kept_lines()
                flush.zero_()
                mark()
                calls[index]()
                mark()
        try:
            spans = attribute(activities, MARKER, len(order))
            break
        except MeasureError:  # dropped records
            if attempt == ATTEMPTS - 1:
                raise
    times: list[list[float]] = [[] for _ in calls]
    for index, span in zip(order, spans, strict=True):
        times[index].append(span.busy_ns / 1e3 if isinstance(span, Span) else math.inf)
    return times


def warm_all(warm: Callable[[Any], dict[str, Any]], tasks: Sequence[Any]) -> dict[Any, Any]:
    """warm(task) for every task, each kernel compiled once, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    workers = max(len(os.sched_getaffinity(0)) - 1, 1)
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        found = dict(zip(tasks, pool.map(warm, tasks, chunksize=4), strict=True))
    if os.environ.get("PROBE_COMPILE_ONLY"):  # so that it can go on beside another that measures
        sys.exit(f"{len(found)} compiled")
    return found


def resources_of(compiled: Callable[[], Any]) -> dict[str, Any]:
    """Registers and spills of a kernel, or why it does not compile: a finding, not a failure."""
    try:
        kernel = compiled()
        kernel._init_handles()
    except Exception as error:  # whatever the compiler raises
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {"registers": kernel.n_regs, "spills": kernel.n_spills}


def commit() -> str:
    given = os.environ.get("OPKILN_COMMIT")
    if given:
        return given
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def provenance() -> dict[str, Any]:
    """Where and on what a probe ran."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
    }


def write_json(path: pathlib.Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def options(doc: str, *flags: str) -> argparse.Namespace:
    """The command line of a probe: --out, --only and switches of its own."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains this")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def chosen(rows: Sequence[Any], only: str) -> list[Any]:
    return [r for r in rows if only in f"{r.op} {r.label} {r.dtype}"]


def wrong_elements(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> int:
    """How many elements are off by more than `tolerance` of their value; NaN is off."""
    g, w = (t.double() if t.is_floating_point() else t for t in (got, want))
    close = (g - w).abs() <= tolerance * w.abs() + 2**-18
    return close.numel() - int(close.sum())


def measure(
    runs: Mapping[str, Callable[[], Callable[[], Any]]],
    others: Mapping[str, Callable[[], Any]],
    fault: Callable[[Any], str],
    flush: torch.Tensor,
    iterations: int = ITERATIONS,
) -> dict[str, Any]:
    """Every candidate, built by its entry of `runs`, and every other implementation, timed.

    A candidate whose output has a fault is recorded and not timed; nor is another implementation
    that does not run.
    """
    records: list[dict[str, Any]] = []
    calls: list[Callable[[], Any]] = []
    torch.use_deterministic_algorithms(True, warn_only=True)  # outputs start as NaN
    for name, build in runs.items():
        record: dict[str, Any] = {"name": name}
        records.append(record)
        try:
            call = build()
            record["status"] = fault(call()) or "ok"
        except Exception as error:  # recorded; the other candidates still run
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            calls.append(call)
    torch.use_deterministic_algorithms(False)
    baselines: dict[str, Callable[[], Any]] = {}
    for name, call in others.items():
        try:
            call()
        except Exception as error:
            print(f"{name} does not run: {type(error).__name__}: {error}"[:300], flush=True)
        else:
            baselines[name] = call
    times = kernel_times_us([*calls, *baselines.values()], flush, iterations)
    timed = [r for r in records if r["status"] == "ok"]
    for record, samples in zip(timed, times[: len(calls)], strict=True):
        record |= {"us": statistics.median(samples), "low_us": min(samples)}
    medians = map(statistics.median, times[len(calls) :])
    return {"candidates": records, "baselines": dict(zip(baselines, medians, strict=True))}


def line(r: dict[str, Any]) -> str:
    """What the table says about a row."""
    name = f"{r['op']:24s} {r['label']:28s} {r['dtype']:4s}"
    timed = sorted((c for c in r["candidates"] if "us" in c), key=lambda c: c["us"])
    failed = len(r["candidates"]) - len(timed)
    if not timed:
        return f"{name} no candidate ran: {r['candidates'][0]['status'] if failed else 'none'}"
    best, bar, page = timed[0], r["bar"], r["page"]
    known = [t for t in (bar, page) if t]
    ratio = f"{min(known) / best['us']:.2f}" if known else "-"
    others = " ".join(f"{k} {v:.2f}" for k, v in r["baselines"].items())
    return (
        f"{name} {best['us']:8.2f} bar {bar:8.2f} page {page:8.2f} "
        f"ratio {ratio} | {best['name']} | {others}" + (f" | {failed} failed" if failed else "")
    )


class Results:
    """What a probe found, written and printed after every row."""

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.data = provenance() | {"results": self.rows}

    def add(self, row: dict[str, Any], found: dict[str, Any]) -> None:
        self.rows.append(row | found)
        write_json(self.path, self.data)
        print(line(self.rows[-1]), flush=True)

    def show(self) -> None:
        """The failures, one line each, last."""
        failed = [(r, c) for r in self.rows for c in r["candidates"] if "us" not in c]
        for r, c in failed[:20]:
            print(f"{r['op']} {r['label']} {r['dtype']} {c['name']}: {c['status'][-160:]!r}")
        print(f"{len(self.rows)} rows, {len(failed)} candidates failed, {self.path}")
