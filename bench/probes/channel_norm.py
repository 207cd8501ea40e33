"""Measure candidate tilings of the channel norm kernels on the rows of the benchmark pages.

    python bench/probes/channel_norm.py --out DIR [--second] [--only NAME,...] [--compile]
    python bench/probes/channel_norm.py --write-tuning DIR/channel_norm.json

The first writes DIR/channel_norm.json and prints one line a row; with --second only of the rows
that take less than 5 us, with fewer candidates. The second puts what that file says of its rows
into packages/norm/src/opkiln_norm/tuning/channel_sm90.json. Timed as the bench times (common.py); a
candidate whose output is wrong is recorded and never timed. Rows that --seconds leave no time for
are named.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import torch
from common import ROOT

sys.path[:0] = [str(ROOT / "core/src"), str(ROOT / "packages/norm/src")]

from channel_rows import Row, baselines, read_rows, reference, wrong_elements  # noqa: E402
from channel_table import write_tuning  # noqa: E402
from channel_tilings import (  # noqa: E402
    AnyTiling,
    candidates,
    focused,
    in_second,
    triton_plan,
)
from opkiln.device import cuda  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_norm import channel_cuda, channel_plan  # noqa: E402
from opkiln_norm.channel_plan import Tiling  # noqa: E402

MULTIPROCESSORS = 132
LARGE_ITERATIONS = 12


def kind_of(tiling: AnyTiling) -> str:
    return "triton" if isinstance(tiling, Tiling) else type(tiling).__name__.lower()


def name_of(tiling: AnyTiling) -> str:
    """A tiling on one line, what is at its default left out."""
    kept = [
        f"{f.name}={getattr(tiling, f.name)}"
        for f in dataclasses.fields(tiling)
        if getattr(tiling, f.name) != f.default
    ]
    return " ".join([kind_of(tiling), *kept])


def keys_of(row: Row) -> dict[str, Any]:
    """What the two tables know the row by."""
    plan = triton_plan(row)
    keys: dict[str, Any] = {"itemsize": row.itemsize, "given": plan.given, "view": plan.view.key}
    call = row.call(row.tensors("meta"), real=False)
    if row.op in channel_cuda.OPS and channel_cuda.readable(call):
        s = channel_cuda.sizes_of(call)
        keys |= {"mode": s.mode, "channels": s.channels, "cols": s.cols}
    return keys


def use_only(row: Row, tiling: AnyTiling) -> None:
    """Make `tiling` the one row of the tuning tables."""
    entry = {"op": row.op, "label": row.label, "kind": kind_of(tiling), **keys_of(row)}
    entry["use"] = dataclasses.asdict(tiling)
    is_triton = isinstance(tiling, Tiling)
    channel_plan.tuning_rows = lambda: [entry] if is_triton else []
    channel_cuda.cuda_rows = lambda: [] if is_triton else [entry]


def prepare(row: Row, tiling: AnyTiling, call: Call) -> Callable[..., Any]:
    from opkiln_norm import channel_norm

    use_only(row, tiling)
    if not isinstance(tiling, Tiling):
        found = channel_cuda.prepare(call)
        if found is None:
            raise RuntimeError("not served: not resident, or no cuda-core")
        return found
    return (channel_norm.prepare_backward if row.backward else channel_norm.prepare_forward)(call)


def warm(task: tuple[Row, AnyTiling | None]) -> dict[str, Any]:
    """Compile one candidate's kernels, or None's, torch.compile's, into the caches on disk, in a
    process of its own."""
    from opkiln_norm import channel_norm

    row, tiling = task
    if tiling is None:
        with contextlib.suppress(Exception):  # the run itself reports what does not compile
            baselines(row, row.tensors("cuda"), compiled=True)["torch-compile"]()
        return {}
    tensors = row.tensors("meta")
    call = row.call(tensors, real=False)
    use_only(row, tiling)
    if not isinstance(tiling, Tiling):
        plan = channel_cuda.plan_for(call)
        assert plan is not None
        try:
            macros = channel_cuda.macros(call, plan)
            cuda.compile_cubin(channel_cuda.source(plan.kind), "sm_90a", macros)
        except Exception as error:  # a finding
            return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
        return {}
    kernels: list[tuple[Any, list[Any], dict[str, Any]]] = []

    def record(kernel: Any, grid: int, options: dict[str, Any]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            mocks = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            kernels.append((kernel, mocks, options))

        return launch

    mocked: Any = channel_norm
    mocked.launcher = record
    mocked.multiprocessors = lambda device: MULTIPROCESSORS
    prepare(row, tiling, call)(*tensors)
    found = [
        common.resources_of(functools.partial(k.warmup, *a, grid=(1,), **o)) for k, a, o in kernels
    ]
    failed = next((f for f in found if "compile_error" in f), None)
    return failed or {k: max(f[k] for f in found) for k in ("registers", "spills")}


def measure(
    row: Row, resources: dict[AnyTiling, Any], compiled: bool, flush: torch.Tensor
) -> dict[str, Any]:
    """Every candidate and baseline of one row: status, median and least time."""
    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    running = tensors[1:3] if "running" in row.flags else []
    start = [t.clone() for t in running]
    want = reference(row, tensors)
    call = row.call(tensors)

    def build(tiling: AnyTiling) -> Callable[[], Any]:
        launch = prepare(row, tiling, call)
        for t, old in zip(running, start, strict=True):
            t.copy_(old)
        return lambda: launch(*tensors)

    def fault(out: Any) -> str:
        outs = out if isinstance(out, tuple) else (out,)
        wrong = wrong_elements(row, [*outs, *running], want)
        return f"{wrong} elements wrong" if wrong else ""

    tilings = {name_of(t): t for t, r in resources.items() if "compile_error" not in r}
    runs = {name: functools.partial(build, t) for name, t in tilings.items()}
    iterations = LARGE_ITERATIONS if row.large else common.ITERATIONS
    others = baselines(row, tensors, compiled)
    found = common.measure(runs, others, fault, flush, iterations)
    for record in found["candidates"]:
        tiling = tilings[record["name"]]
        record |= {"kind": kind_of(tiling), "use": dataclasses.asdict(tiling)} | resources[tiling]
    found["candidates"] += [
        {"name": name_of(t), "status": r["compile_error"]}
        for t, r in resources.items()
        if "compile_error" in r
    ]
    return keys_of(row) | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--second", action="store_true", help="short rows, fewer candidates")
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains one")
    parser.add_argument("--compile", action="store_true", help="torch.compile baselines too")
    parser.add_argument("--seconds", type=float, default=120, help="no row starts after so long")
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # of each of many processes
    start = time.time()
    rows, chosen = read_rows(options.only), focused if options.second else candidates
    if options.second:
        rows = list(filter(in_second, rows))
    tasks = [(row, tiling) for row in rows for tiling in chosen(row)]
    compiled = [(row, None) for row in rows if options.compile and not row.large]
    resources = common.warm_all(warm, [*compiled, *tasks])
    print(f"{len(resources)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    flush = common.flush_buffer()
    results = common.Results(options.out / "channel_norm.json")
    for row in rows:
        if time.time() - start > options.seconds:
            print("no time for", row.op, row.label, row.dtype)
            continue
        own = {t: found for (r, t), found in resources.items() if r == row and t is not None}
        try:
            results.add(dataclasses.asdict(row), measure(row, own, options.compile, flush))
        except Exception as error:  # the other rows still run
            print(row.op, row.label, row.dtype, f"{type(error).__name__}: {error}"[:300])
        torch.cuda.empty_cache()
    results.show()
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
