"""Measure candidate tilings of the channel norm kernels on the rows of the benchmark pages.

    python bench/probes/channel_norm.py --out DIR [--only NAME,...] [--compile] [--seconds N]
    python bench/probes/channel_norm.py --write-tuning DIR/channel_norm.json

The first writes DIR/channel_norm.json and prints one line a row; the second turns that file into
packages/norm/src/opkiln_norm/tuning/channel_sm90.json. Timed as the bench times (common.py); a
candidate whose output is wrong is recorded and never timed. Rows that --seconds leave no time for
are named.
"""

import argparse
import dataclasses
import functools
import json
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
from channel_tilings import AnyTiling, candidates, triton_plan  # noqa: E402
from opkiln.device import cuda  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_norm import channel_cuda, channel_plan  # noqa: E402
from opkiln_norm.channel_plan import Tiling  # noqa: E402

TUNING = ROOT / "packages/norm/src/opkiln_norm/tuning/channel_sm90.json"
MULTIPROCESSORS = 132
LARGE_ITERATIONS = 12
GAIN = 0.995  # of Triton's time, above which a CUDA tiling does not displace it


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
    if row.op in channel_cuda.OPS:
        s = channel_cuda.sizes_of(row.call(row.tensors("meta"), real=False))
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


def warm(task: tuple[Row, AnyTiling]) -> dict[str, Any]:
    """Compile one candidate's kernels into the caches on disk, in a process of its own."""
    from opkiln_norm import channel_norm

    row, tiling = task
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


def changed(use: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Triton tiling that are not at their default."""
    default = dataclasses.asdict(Tiling(0, 0, 0))
    return {k: v for k, v in use.items() if v != default[k]}


def best_of(found: list[dict[str, Any]], triton: bool) -> tuple[dict[str, Any], list[float]] | None:
    """The candidate that is fastest over all rows of a key; a Triton one that spills is out."""
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
    name = min(whole, key=lambda n: sum(whole[n]))
    return candidate[name], whole[name]


def write_tuning(results: pathlib.Path) -> None:
    """For each key: the best Triton tiling, and the best CUDA one where it is faster still."""
    data = json.loads(results.read_text("utf-8"))
    run = {k: data[k] for k in ("gpu", "date", "commit")}
    tables: dict[str, list[dict[str, Any]]] = {"rows": [], "cuda_rows": []}
    keys = {
        "rows": ("op", "itemsize", "given", "view"),
        "cuda_rows": ("op", "itemsize", "mode", "channels", "cols"),
    }
    for table, names in keys.items():
        groups: dict[str, list[dict[str, Any]]] = {}
        for r in data["results"]:
            if set(names) <= set(r) and not (table == "cuda_rows" and "cl" in r["flags"]):
                groups.setdefault(json.dumps([r[n] for n in names]), []).append(r)
        for key, found in sorted(groups.items()):
            best = best_of(found, triton=table == "rows")
            if best is None:
                continue
            chosen, times = best
            rival = best_of(found, triton=True)
            if table == "cuda_rows" and rival and sum(times) > GAIN * sum(rival[1]):
                continue
            labels = (f"{r['label']} {r['dtype']}" for r in found)
            figures = {label: round(t, 3) for label, t in zip(labels, times, strict=True)}
            entry = dict(zip(names, json.loads(key), strict=True)) | {"label": found[0]["label"]}
            use = changed(chosen["use"]) if table == "rows" else chosen["use"]
            entry |= {"kind": chosen["kind"]} if table == "cuda_rows" else {}
            tables[table].append(entry | {"use": use, "measured": run | {"us": figures}})
    common.write_json(TUNING, json.loads(TUNING.read_text("utf-8")) | tables)
    print({k: len(v) for k, v in tables.items()}, TUNING.relative_to(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains one")
    parser.add_argument("--compile", action="store_true", help="torch.compile baselines too")
    parser.add_argument("--seconds", type=float, default=120, help="no row starts after so long")
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    start = time.time()
    rows = read_rows(options.only)
    tasks = [(row, tiling) for row in rows for tiling in candidates(row)]
    resources = common.warm_all(warm, tasks)
    print(f"{len(tasks)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    flush = common.flush_buffer()
    results = common.Results(options.out / "channel_norm.json")
    for row in rows:
        if time.time() - start > options.seconds:
            print("no time for", row.op, row.label, row.dtype)
            continue
        own = {tiling: found for (r, tiling), found in resources.items() if r == row}
        try:
            results.add(dataclasses.asdict(row), measure(row, own, options.compile, flush))
        except Exception as error:  # the other rows still run
            print(row.op, row.label, row.dtype, f"{type(error).__name__}: {error}"[:300])
        torch.cuda.empty_cache()
    results.show()
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
