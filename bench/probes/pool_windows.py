"""Measure kernels for maxima with indices beside what ships and torch.compile.

    python bench/probes/pool_windows.py --out DIR [--only SUBSTRING,...] [--seconds N]

Writes DIR/pool_windows.json and prints the best of each row. Outputs are compared exactly with the
reference in float64, on random values and on ties, NaN, -inf and zeros of both signs.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import pool
import torch
from opkiln.device import cuda
from opkiln_bench.peers import torch_compile
from opkiln_pool import pool_plan, variants
from opkiln_pool.geometry import geometry_of
from opkiln_pool.pool_plan import Tiling

CSRC = common.ROOT / "packages/pool/src/opkiln_pool/csrc"
TYPES = {"f16": 0, "bf16": 1, "f32": 2}
ROWS = ("indices vgg-block f", "indices c3d", "medicalnet", "max_pool1d_indices sincnet")
COMPILED, STREAMED = ("vgg-block",), ("vgg-block", "sincnet-speaker-local", "medicalnet-stem")


def source(kind: str) -> str:
    return "".join((CSRC / n).read_text("utf-8") for n in ("window.cuh", f"window_{kind}.cu"))


def geometry(row: pool.Row) -> Any:
    return geometry_of(row.call(row.tensors("meta"), real=False))


def cuda_candidates(row: pool.Row) -> list[tuple[str, dict[str, int]]]:
    g = geometry(row)
    found: list[tuple[str, dict[str, int]]] = []
    base = {"TYPE": TYPES[row.dtype], "LOAD": 0, "STORE": 0}
    hints = [(1, 0), (2, 0), (4, 0), (5, 0), (6, 0), (0, 1), (0, 2), (0, 4)]
    if row.label == "sincnet-speaker-local":
        base |= {"SW": g.sizes[2], "OW": g.outs[2], "THREADS": 256, "ITEMS": 1, "STAGED": 0}
        found += [("flat", base | {"LOAD": a, "STORE": b}) for a, b in ((0, 0), (1, 0), (2, 0),
                                                                     (0, 2))]  # fmt: skip
    elif row.label == "medicalnet-stem" or row.label == "resnet-stem":
        sizes = zip(("SD", "SH", "SW", "OD", "OH", "OW"), (*g.sizes, *g.outs), strict=True)
        base |= dict(sizes) | {"KD": g.kernel[0], "INDEX": int("indices" in row.op)}
        base |= {"ROWS": 2, "THREADS": 128, "CTAS": 8}
        shapes = ((2, 128, 8), (1, 128, 8), (1, 128, 10), (1, 256, 4), (2, 64, 16), (2, 128, 6),
                  (2, 256, 4), (4, 128, 4))  # fmt: skip
        found += [("rows", base | {"ROWS": r, "THREADS": t, "CTAS": c}) for r, t, c in shapes]
        found += [("rows", base | {"LOAD": a, "STORE": b}) for a, b in hints]
    else:
        sizes = zip(("SD", "SH", "SW"), g.sizes, strict=True)
        base |= dict(sizes) | {"KD": g.kernel[0], "KH": g.kernel[1]}
        base |= {"V": 2, "ITEMS": 1, "THREADS": 256}
        shapes = ((2, 1, 128), (2, 1, 256), (2, 1, 512), (2, 2, 128), (2, 2, 256), (2, 4, 128),
                  (4, 1, 128), (4, 1, 256), (4, 2, 128))  # fmt: skip
        found += [("pairs", base | {"V": v, "ITEMS": i, "THREADS": t}) for v, i, t in shapes]
        found += [("pairs", base | {"LOAD": a, "STORE": b}) for a, b in hints]
    return list({json.dumps(f): f for f in found}.values())


def triton_candidates(row: pool.Row) -> list[Tiling]:
    g = geometry(row)
    shipped = (pool.POOL_TUNED(row.op, g) or [pool_plan.rule(g)])[0]
    found = [shipped]
    if "indices" in row.op:
        found.append(dataclasses.replace(shipped, cache="evict_last"))
        least = 4 // math.gcd(4, g.stride[2])
        if row.dtype != "f32" and least <= 2 and not pool_plan.past_the_end(g, 2, 4):
            found += [dataclasses.replace(shipped, v=2, vec=4, block=b, num_warps=4)
                      for b in (128, 256)]  # fmt: skip
    return list(dict.fromkeys(found))


def tasks_of(row: pool.Row) -> list[tuple[str, Any]]:
    return [("triton", (row, t)) for t in triton_candidates(row)] + [
        ("cuda", (kind, tuple(m.items()))) for kind, m in cuda_candidates(row)
    ]


def warm(task: tuple[str, Any]) -> dict[str, Any]:
    how, what = task
    if how == "triton":
        return pool.warm(what)
    try:
        cuda.compile_cubin(source(what[0]), "sm_90a", dict(what[1]))
    except Exception as error:
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {}


def cuda_run(row: pool.Row, kind: str, m: dict[str, int], call: Any) -> Callable[..., Any]:
    g = geometry_of(call)
    kernel = cuda.load(source(kind), f"{kind}_kernel", torch.device("cuda"), m)
    if kind == "rows":
        items = g.planes * g.outs[0] * -(-g.outs[1] // m["ROWS"])
        each = m["THREADS"] // 16
    else:
        items = g.outputs // (m["V"] if kind == "pairs" else 2)
        each = m["THREADS"] * m["ITEMS"]
    launch = kernel.configure((-(-items // each), 1, 1), (m["THREADS"], 1, 1))
    shapes = [(o.shape, o.dtype) for o in call.outputs]

    def run(x: torch.Tensor) -> Any:
        outs = [torch.empty(s, dtype=d, device="cuda") for s, d in shapes]
        launch(x, outs[0], outs[-1], items)
        return tuple(outs) if len(outs) > 1 else outs[0]

    return run


def measure(row: pool.Row, failed: dict[Any, str], flush: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    call = row.call(tensors)
    checks = [tensors, pool.special(row, tensors)]
    wants = [pool.reference(row, found) for found in checks]
    records, calls = [], []
    torch.use_deterministic_algorithms(True)
    for task in tasks_of(row):
        how, what = task
        name = pool.changed(dataclasses.asdict(what[1])) if how == "triton" else dict(what[1])
        record: dict[str, Any] = {"how": how if how == "triton" else what[0], "use": name}
        records.append(record)
        if task in failed:
            record["status"] = failed[task]
            continue
        try:
            if how == "triton":
                pool.use(what[1])
                launch = variants.prepare(call)
            else:
                launch = cuda_run(row, what[0], dict(what[1]), call)
            wrong = sum(pool.wrong_elements(launch(*c), w, row)
                        for c, w in zip(checks, wants, strict=True))  # fmt: skip
            record["status"] = f"{wrong} elements wrong" if wrong else "ok"
        except Exception as error:
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            calls.append(functools.partial(launch, *tensors))
    torch.use_deterministic_algorithms(False)
    del wants, checks
    more = []
    if row.label in COMPILED:
        torch._dynamo.reset()
        more.append(functools.partial(torch_compile.prepare(call), *tensors))
        more[0]()
    times = common.kernel_times_us([*calls, *more], flush, 15)
    timed = [r for r in records if r["status"] == "ok"]
    for r, samples in zip(timed, times, strict=False):
        r |= {"us": statistics.median(samples), "low_us": min(samples)}
    streams(row, tensors, timed, calls, flush)
    return dataclasses.asdict(row) | {
        "candidates": records, "compile_us": statistics.median(times[-1]) if more else 0
    }  # fmt: skip


def streams(row: pool.Row, tensors: Any, timed: Any, calls: Any, flush: torch.Tensor) -> None:
    """What hints cost others: the call before a copy of 64 MB, 8 calls on inputs of their own."""
    if row.label not in STREAMED:
        return
    keep = [i for i, r in enumerate(timed) if r["how"] != "triton" and r["use"]["LOAD"] in (0, 2)
            and r["use"]["STORE"] in (0, 2)]  # fmt: skip
    best = {}
    for i in (0, *keep):
        key = (timed[i]["how"], timed[i]["use"].get("LOAD"), timed[i]["use"].get("STORE"))
        if key not in best or timed[i]["us"] < timed[best[key]]["us"]:
            best[key] = i
    chosen = [(timed[i], calls[i].func) for i in best.values()]
    source, target = (torch.zeros(2**24, device="cuda") for _ in range(2))
    inputs = [tensors[0].clone() for _ in range(8)]

    def before_copy(launch: Any) -> None:
        launch(tensors[0])
        target.copy_(source)

    def before_use(launch: Any) -> None:
        for out in launch(tensors[0]):
            out.add_(1)

    def many(launch: Any) -> None:
        for x in inputs:
            launch(x)

    def many_apart(launch: Any) -> None:
        for x in inputs:
            launch(x)
            target.copy_(source)

    ways = (before_copy, before_use, many, many_apart)
    runs = [functools.partial(way, launch) for way in ways for _, launch in chosen]
    runs.append(functools.partial(target.copy_, source))
    times = [statistics.median(t) for t in common.kernel_times_us(runs, flush, 9)]
    for k, way in enumerate(ways):
        for j, (r, _) in enumerate(chosen):
            r[way.__name__ + "_us"] = times[k * len(chosen) + j]
    for r, _ in chosen:
        shown = {w.__name__: round(r[w.__name__ + "_us"], 2) for w in ways}
        print("  stream", r["how"], r["use"].get("LOAD"), r["use"].get("STORE"), r["us"], shown)
    print("  copy alone", times[-1], flush=True)


def show(r: dict[str, Any]) -> None:
    timed = sorted((c for c in r["candidates"] if "us" in c), key=lambda c: c["us"])
    bad = [c for c in r["candidates"] if "us" not in c]
    print(f"{r['op']} {r['label']} {r['dtype']} shipped {r['candidates'][0].get('us', 0):.2f} "
          f"compile {r['compile_us']:.2f} page {r['page']} bar {r['bar']} | {len(bad)} failed",
          [(c["how"], c["status"][-90:]) for c in bad[:2]])  # fmt: skip
    for how in ("triton", "pairs", "flat", "rows"):
        for c in [c for c in timed if c["how"] == how][:3]:
            short = {k: v for k, v in c["use"].items() if k not in ("TYPE", "KD", "KH", "SD", "SH",
                     "SW", "OD", "OH", "OW", "static", "variant", "INDEX")}  # fmt: skip
            print(f"   {c['us']:8.2f} {how} {short}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--seconds", type=float, default=45, help="no row starts after so long")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    start = time.time()
    rows = pool.read_rows(options.only)
    tasks = list(dict.fromkeys(t for row in rows for t in tasks_of(row)))
    resources = common.warm_all(warm, tasks)
    failed = {t: r["compile_error"] for t, r in resources.items() if "compile_error" in r}
    print(f"{len(tasks)} compiled in {time.time() - start:.0f} s, {len(failed)} failed", flush=True)
    flush = common.flush_buffer()
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for row in rows:
        print(f"{time.time() - start:.1f} s", flush=True)
        if time.time() - start > options.seconds:
            print("no time for", row.op, row.label, row.dtype)
            continue
        try:
            results.append(measure(row, failed, flush))
        except Exception as error:
            print(row, f"{type(error).__name__}: {error}"[:300], flush=True)
            continue
        common.write_json(options.out / "pool_windows.json",
                          common.provenance() | {"results": results})  # fmt: skip
        show(results[-1])
        torch.cuda.empty_cache()
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
