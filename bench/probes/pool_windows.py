"""Measure the CUDA kernels of maxima beside what Triton's tilings and torch.compile take.

    python bench/probes/pool_windows.py --out DIR [--only SUBSTRING,...] [--seconds N]
    python bench/probes/pool_windows.py --write-tuning DIR/pool_windows.json

The first writes DIR/pool_windows.json and prints the best of each row. Outputs are compared exactly
with the reference in float64, on random values and on ties, NaN, -inf and zeros of both signs.
Lines that are kept in L2 may cost what comes next: `after` times that too. The second form puts
CUDA tilings that keep none, and are faster than the Triton tiling of their call, into
tuning/sm90.json; those that keep lines are for a reader of `after` to put there.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import common
import pool
import torch
from opkiln.device import cuda
from opkiln_bench.peers import torch_compile
from opkiln_pool import pool_plan, variants, window_cuda
from opkiln_pool.geometry import Geometry, geometry_of
from opkiln_pool.pool_plan import Tiling
from opkiln_pool.window_cuda import Flat, Pairs, Rows

WANTED = ("max_pool2d_indices vgg-block f", "max_pool3d_indices", "max_pool1d_indices sincnet",
          "max_pool3d medicalnet", "max_pool2d_indices resnet-stem f16")  # fmt: skip
COMPILED = ("vgg-block f32", "sincnet-speaker-local f16")
FOLLOWED = ("vgg-block f32", "sincnet-speaker-local f16", "c3d-pool2 f16")
Candidate = Tiling | window_cuda.Tiling


def geometry(row: pool.Row) -> Geometry:
    return geometry_of(row.call(row.tensors("meta"), real=False))


def candidates(row: pool.Row) -> list[Candidate]:
    """The Triton tiling that ships first."""
    g = geometry(row)
    found: list[Candidate] = [(pool.POOL_TUNED(row.op, g) or [pool_plan.rule(g)])[0]]
    base = (*(Rows(n, c) for n, c in ((128, 8), (64, 16), (192, 5), (128, 10), (256, 4))),
            *(make(n) for make in (Pairs, Flat) for n in (128, 256, 512)))  # fmt: skip
    fits = [t for t in base if t.fits(g)]
    return [*found, *fits, *(replace(t, keep=True) for t in fits)]


def warm(task: tuple[pool.Row, Candidate]) -> dict[str, Any]:
    """Compile one candidate into the cache on disk."""
    row, tiling = task
    if isinstance(tiling, Tiling):
        return pool.warm(task)
    try:
        macros = window_cuda.macros(geometry(row), common.DTYPES[row.dtype], tiling)
        cuda.compile_cubin(window_cuda.source(window_cuda.kind_of(tiling)), "sm_90a", macros)
    except Exception as error:  # a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {"spills": 0}


def use(row: pool.Row, tiling: Candidate) -> None:
    """Make the next plan use this tiling."""
    if isinstance(tiling, Tiling):
        return pool.use(tiling)
    entry = pool_plan.key_of(row.op, geometry(row)) | {"label": "probe"}
    entry |= {"kind": window_cuda.kind_of(tiling), "use": dataclasses.asdict(tiling)}
    entry["measured"] = {"us": {row.dtype: None}}
    window_cuda.cuda_rows = lambda: [entry]


def stated(tiling: Candidate) -> dict[str, Any]:
    """What differs from a tiling's defaults."""
    fields = dataclasses.fields(tiling)
    use = {f.name: getattr(tiling, f.name) for f in fields}
    return {f.name: use[f.name] for f in fields if use[f.name] != f.default}


def measure(row: pool.Row, resources: dict[Candidate, Any], flush: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    call = row.call(tensors)
    checks = [tensors, pool.special(row, tensors)]
    wants = [pool.reference(row, found) for found in checks]
    records: list[dict[str, Any]] = []
    launches: list[Callable[..., Any]] = []
    torch.use_deterministic_algorithms(True)  # fills outputs with NaN before the launch
    for tiling in candidates(row):
        kind = "triton" if isinstance(tiling, Tiling) else window_cuda.kind_of(tiling)
        record = {"kind": kind, "use": stated(tiling)} | resources[tiling]
        records.append(record)
        use(row, tiling)
        try:
            launch = variants.prepare(call)
            wrong = sum(pool.wrong_elements(launch(*c), w, row)
                        for c, w in zip(checks, wants, strict=True))  # fmt: skip
            record["status"] = f"{wrong} elements wrong" if wrong else "ok"
        except Exception as error:  # recorded; the other candidates still run
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            launches.append(launch)
    torch.use_deterministic_algorithms(False)
    del wants, checks
    name = f"{row.label} {row.dtype}"
    timed = [r for r in records if r["status"] == "ok"]
    if name in COMPILED:
        torch._dynamo.reset()
        launches.append(torch_compile.prepare(call))
        launches[-1](*tensors)
        timed.append({"kind": "compile", "use": {}})
    calls = [functools.partial(launch, *tensors) for launch in launches]
    times = common.kernel_times_us(calls, flush, 15)
    for r, samples in zip(timed, times, strict=True):
        r |= {"us": statistics.median(samples), "low_us": min(samples)}
    if name in FOLLOWED:
        after(tensors[0], timed, launches, flush)
    rest = [r for r in timed if r["kind"] == "compile"]
    return dataclasses.asdict(row) | {"candidates": records, "others": rest}


def after(x: torch.Tensor, timed: Any, launches: Any, flush: torch.Tensor) -> None:
    """Times of a call, or 8 whose outputs live on, and what comes after: a copy of 64 MB, the use
    of the outputs, 32 MB summed 8 times (they fit in L2), a matmul of 4096.
    """
    best: dict[Any, int] = {}
    for i, r in enumerate(timed):
        key = r["kind"], r["use"].get("keep", False)
        if key not in best or r["us"] < timed[best[key]]["us"]:
            best[key] = i
    source, target = (torch.zeros(2**24, device="cuda") for _ in range(2))
    again = torch.zeros(2**23, device="cuda")
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inputs = [x.clone() for _ in range(8)]
    sums = [functools.partial(torch.sum, again)] * 8
    nexts: dict[str, tuple[int, list[Callable[[], Any]]]] = {
        "one": (1, []),
        "copy": (1, [lambda: target.copy_(source)]),
        "sums": (1, sums),
        "eight": (8, []),
        "eight, copy": (8, [lambda: target.copy_(source)]),
        "eight, sums": (8, sums),
        "eight, matmul": (8, [lambda: a @ b]),
    }

    def run(launch: Any, count: int, following: Any) -> None:
        kept = [launch(found) for found in inputs[:count]]
        for call in following:
            call()
        del kept

    def use_outputs(launch: Any) -> None:
        for out in launch(x):
            out.add_(1)

    chosen = [(timed[i], launches[i]) for i in best.values()]
    runs = [functools.partial(run, f, *n) for n in nexts.values() for _, f in chosen]
    runs += [functools.partial(use_outputs, f) for _, f in chosen]
    times = [statistics.median(t) for t in common.kernel_times_us(runs, flush, 9)]
    for k, name in enumerate((*nexts, "use")):
        for j, (r, _) in enumerate(chosen):
            r.setdefault("after", {})[name] = round(times[k * len(chosen) + j], 2)
    for r, _ in chosen:
        print("  after", r["kind"], r["use"], r["after"], flush=True)


def write_tuning(results: pathlib.Path) -> None:
    """Of each key, over the dtypes that were measured."""
    data = json.loads(results.read_text("utf-8"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in data["results"]:
        row = pool.Row(**{f.name: r[f.name] for f in dataclasses.fields(pool.Row)})
        key = pool_plan.key_of(row.op, geometry(row))
        groups.setdefault(json.dumps(key), []).append(r)
    table = json.loads(pool.TUNING.read_text("utf-8"))
    for text, found in groups.items():
        scores: dict[str, list[float]] = {}
        for c in (c for r in found for c in r["candidates"] if "us" in c and not c["spills"]):
            if not c["use"].get("keep"):
                scores.setdefault(json.dumps([c["kind"], c["use"]]), []).append(c["us"])
        whole = [(sum(us), name, us) for name, us in scores.items() if len(us) == len(found)]
        _, name, times = min(whole)
        kind, use = json.loads(name)
        key = json.loads(text)
        here = [r for r in table["cuda_rows"] if key.items() <= r.items()]
        if any(r["use"].get("keep") for r in here):
            continue
        kept = [r for r in table["cuda_rows"] if r not in here]
        if kind != "triton":
            us = {r["dtype"]: round(t, 3) for r, t in zip(found, times, strict=True)}
            measured = {k: data[k] for k in ("gpu", "date", "commit")} | {"us": us}
            kept.append(key | {"label": found[0]["label"], "kind": kind, "use": use,
                               "measured": measured})  # fmt: skip
        table["cuda_rows"] = kept
    common.write_json(pool.TUNING, table)
    print(f"{len(table['cuda_rows'])} CUDA rows in {pool.TUNING.relative_to(common.ROOT)}")


def show(r: dict[str, Any]) -> None:
    timed = sorted((c for c in r["candidates"] if "us" in c), key=lambda c: c["us"])
    bad = [c for c in r["candidates"] if "us" not in c]
    others = " ".join(f"{c['kind']} {c['us']:.2f}" for c in r["others"])
    print(f"{r['op']} {r['label']} {r['dtype']} shipped {r['candidates'][0].get('us', 0):.2f} "
          f"{others} page {r['page']} bar {r['bar']} | {len(bad)} failed",
          [(c["kind"], c["status"][-90:]) for c in bad[:2]])  # fmt: skip
    for c in timed[:6]:
        print(f"   {c['us']:8.2f} {c['kind']} {c['use']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default=",".join(WANTED))
    parser.add_argument("--seconds", type=float, default=45, help="no row starts after so long")
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    start = time.time()
    rows = pool.read_rows(options.only)
    resources = common.warm_all(warm, [(row, t) for row in rows for t in candidates(row)])
    print(f"{len(resources)} compiled in {time.time() - start:.0f} s", flush=True)
    flush = common.flush_buffer()
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for row in rows:
        if time.time() - start > options.seconds:
            print("no time for", row.op, row.label, row.dtype)
            continue
        own = {t: found for (r, t), found in resources.items() if r == row}
        try:
            results.append(measure(row, own, flush))
        except Exception as error:  # the other rows still run
            print(row, f"{type(error).__name__}: {error}"[:300], flush=True)
            continue
        common.write_json(options.out / "pool_windows.json",
                          common.provenance() | {"results": results})  # fmt: skip
        show(results[-1])
        torch.cuda.empty_cache()
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
