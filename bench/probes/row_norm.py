"""Measure every candidate tiling of the row norm kernel on the rows of the benchmark pages.

    python bench/probes/row_norm.py --out DIR [--only SUBSTRING] [--no-compile]
    python bench/probes/row_norm.py --write-tuning DIR/row_norm.json

The first writes DIR/row_norm.json and prints one line a row; the second turns that file into
packages/norm/src/opkiln_norm/tuning/sm90.json. Device time by CUPTI (torch.profiler), L2 flushed
before each call, median; a candidate whose output is wrong is recorded and never timed.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import json
import multiprocessing
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "core/src"), str(ROOT / "packages/norm/src")]

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_norm import row_plan  # noqa: E402
from opkiln_norm.row_plan import Tiling, plan_for, rule  # noqa: E402

TUNING = ROOT / "packages/norm/src/opkiln_norm/tuning/sm90.json"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
TOLERANCE = {"bf16": 2**-7, "f16": 2**-10, "f32": 2**-19}
FLUSH_BYTES = 2 * 60 * 2**20  # twice the L2 of an H200
ITERATIONS = 25
COMPILE_UNTIL_S = 150  # rows measured after so long get no torch.compile baseline
FLUSH = re.compile(r"Memset|FillFunctor")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the pages. affine: 1 is a weight, 2 a bias too; bar, page: us to be beaten."""

    op: str
    label: str
    dtype: str
    rows: int
    n: int
    affine: int
    bar: float
    page: float

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def params(self) -> dict[str, Any]:
        return {"normalized_shape": (self.n,), "eps": 1e-5 if self.op == "layer_norm" else 1e-6}

    def tensors(self, device: str) -> list[Any]:
        make = {"dtype": DTYPES[self.dtype], "device": device}
        found: list[Any] = [torch.randn(self.rows, self.n, **make)]
        found += [torch.randn(self.n, **make) for _ in range(self.affine)]
        return found + [None] * (len(CATALOGUE[self.op].tensors) - len(found))


# op, label, dtype, rows, N, affine tensors, fastest alternative here, best of the pages (us)
ROWS = """
layer_norm llama-405b-decode       bf16     1  16384 2    4.448    3.94
layer_norm llama-405b-prefill      bf16  2048  16384 2   42.528      46
layer_norm llama-405b-prefill      f16   2048  16384 2   40.912    45.2
layer_norm llama-70b-decode        bf16     1   8192 2    3.104    3.01
layer_norm llama-70b-prefill       bf16  2048   8192 2   23.487    25.1
layer_norm llama-70b-prefill       f16   2048   8192 2   22.688    23.5
layer_norm llama-8b-decode         bf16     1   4096 2    2.513    2.35
layer_norm llama-8b-prefill        bf16  2048   4096 2   13.056    12.6
layer_norm llama-8b-prefill        f16   2048   4096 2    12.32    12.5
layer_norm llama-13b-prefill       f32   2048   5120 1   25.375      24
layer_norm dit-xl-2                bf16  1024   1152 0    4.608     3.1
rms_norm   llama-405b-decode       bf16     1  16384 1    2.976    2.94
rms_norm   llama-405b-prefill      bf16  2048  16384 1   35.744    36.9
rms_norm   llama-405b-prefill      f16   2048  16384 1   35.184    36.5
rms_norm   llama-70b-decode        bf16     1   8192 1      2.4    2.21
rms_norm   llama-70b-prefill       bf16  2048   8192 1   18.176      19
rms_norm   llama-70b-prefill       f16   2048   8192 1   18.111      19
rms_norm   llama-8b-decode         bf16     1   4096 1    1.744    1.92
rms_norm   llama-8b-prefill        bf16  2048   4096 1    10.96    10.8
rms_norm   llama-8b-prefill        f16   2048   4096 1    10.96    10.8
rms_norm   llama-13b-prefill       bf16  2048   5120 1   13.408    13.2
rms_norm   quack-throughput-256    f16  32768    256 1      9.6    9.82
rms_norm   quack-throughput-256    bf16 32768    256 1      9.6    9.82
rms_norm   quack-throughput-512    f16  32768    512 1   17.664    17.8
rms_norm   quack-throughput-512    bf16 32768    512 1   17.664    17.8
rms_norm   quack-throughput-1024   f16  32768   1024 1   33.728    33.9
rms_norm   quack-throughput-1024   bf16 32768   1024 1   33.728      34
rms_norm   quack-throughput-2048   f16  32768   2048 1   67.008    65.5
rms_norm   quack-throughput-2048   bf16 32768   2048 1   67.008    65.2
rms_norm   quack-throughput-4096   f16  32768   4096 1  131.505     132
rms_norm   quack-throughput-4096   bf16 32768   4096 1  131.505   132.1
rms_norm   quack-throughput-8192   f16  32768   8192 1  249.392   250.4
rms_norm   quack-throughput-8192   bf16 32768   8192 1  249.392   249.6
rms_norm   quack-throughput-16384  f16  32768  16384 1  513.281   514.1
rms_norm   quack-throughput-16384  bf16 32768  16384 1  513.281   512.9
rms_norm   quack-throughput-32768  f16  32768  32768 1 1013.665   994.8
rms_norm   quack-throughput-32768  bf16 32768  32768 1 1013.665   998.2
rms_norm   quack-throughput-65536  f16  32768  65536 1 2045.924    2100
rms_norm   quack-throughput-65536  bf16 32768  65536 1 2045.924    2171
rms_norm   quack-throughput-131072 f16  16384 131072 1 2089.524    2038
rms_norm   quack-throughput-131072 bf16 16384 131072 1 2089.524    2050
rms_norm   quack-throughput-262144 f16   8192 262144 1 2214.627    2166
rms_norm   quack-throughput-262144 bf16  8192 262144 1 2214.627    2195
rms_norm   qwen3-8b-qk-norm-decode bf16    32    128 1     1.36    1.44
rms_norm   qk-norm-head            bf16  8192    128 0    2.752    2.85
"""


def read_rows(only: str) -> list[Row]:
    kinds = (str, str, str, int, int, int, float, float)
    lines = [line.split() for line in ROWS.strip().splitlines()]
    rows = [Row(*(k(v) for k, v in zip(kinds, line, strict=True))) for line in lines]
    return [r for r in rows if only in f"{r.op} {r.label} {r.dtype}"]


def decode_tilings(row: Row) -> list[Tiling]:
    """A row or a few short ones a program: latency."""
    warp = 512 // row.itemsize
    if row.n <= warp:
        shapes = ((2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 8), (32, 16))
        return [Tiling(row.n, w, m, preload=p) for m, w in shapes for p in (True, False)]
    found = [
        Tiling(row.n, w, preload=preload)
        for w in (4, 8, 16, 32)
        if row.n >= w * warp
        for preload in (True, False)
    ]
    return found + [replace(t, packed=True) for t in found[-4:]]


def short_tilings(row: Row) -> list[Tiling]:
    """A warp for one or several rows, or a few warps a row."""
    warp = 512 // row.itemsize
    block_n = min(warp, row_plan.power_of_two(row.n))
    chunks = -(-row.n // block_n)
    found = []
    for warps in (1, 2, 4, 8):
        for depth in (1, 2, 4):  # rows of a lane in flight
            if depth * chunks <= 8 or depth == 1:
                block_m = warps * depth * (warp // block_n)
                found.append(Tiling(block_n, warps, block_m, chunks))
    streams = [replace(t, evict="evict_first", store_cache=".cs") for t in found]
    persistent = [
        replace(t, programs_per_sm=warps_per_sm // t.num_warps, stages=stages, preload=True)
        for t in found
        if t.num_warps in (1, 4)
        for warps_per_sm, stages in ((32, 1), (32, 3), (48, 2))
    ]
    block = row_plan.power_of_two(row.n)
    whole = [Tiling(block, w) for w in (1, 2, 4, 8) if w * warp <= block <= 8 * w * warp]
    return found + [replace(found[-1], preload=True), *streams, *persistent, *whole]


def resident_tilings(row: Row) -> list[Tiling]:
    """One row a program, in registers, 2 to 10 vectors a thread; some persistent."""
    warp = 512 // row.itemsize
    full = row_plan.power_of_two(row.n)
    # Chunks where the power of two above N would leave lanes idle.
    blocks = [full] if full == row.n else [full, full // 4, full // 8, full // 16]
    plain = []
    for block in blocks:
        chunks = -(-row.n // block)
        for warps in (2, 4, 8, 16, 32):
            if block >= warps * warp and 2 <= chunks * block // (warps * warp) <= 10:
                plain.append(Tiling(block, warps, chunks=chunks, evict="evict_first"))
    streams = [replace(t, store_cache=".cs") for t in plain]
    packed = [replace(t, packed=True) for t in plain if row.itemsize == 2]
    persistent = [
        replace(t, evict="", preload=True, programs_per_sm=max(w // t.num_warps, 1), stages=stages)
        for t in plain
        if t.num_warps in (4, 8)
        for w, stages in ((32, 1), (32, 2), (32, 3), (48, 2))
    ]
    preload = [replace(t, evict="", preload=True) for t in plain[:2]]
    return plain + streams + packed + persistent + preload


def long_tilings(row: Row) -> list[Tiling]:
    """Rows beyond the registers: a resident tail, and a head that is read again from L2."""
    shapes = (
        (8192, 32, 2, 4), (8192, 32, 4, 1), (8192, 32, 4, 3), (8192, 32, 4, 5), (8192, 32, 6, 1),
        (8192, 32, 6, 3), (16384, 32, 2, 1), (16384, 32, 2, 3), (4096, 16, 4, 1), (4096, 16, 4, 3),
    )  # fmt: skip
    found = [
        Tiling(block, warps, chunks=chunks, head=True, stages=stages, packed=True)
        for block, warps, chunks, stages in shapes
    ]
    if row.n * row.itemsize == 2 * row_plan.RESIDENT_BYTES:
        found.append(Tiling(row.n // 4, 32, chunks=4, packed=True))
    first = [replace(t, evict="evict_first") for t in found]
    return found + first + [replace(t, store_cache=".cs") for t in first]


def candidates(row: Row) -> list[Tiling]:
    """What the rule says first, then what may be better."""
    if row.rows <= row_plan.FEW_ROWS:
        found = decode_tilings(row)
    elif row.n * row.itemsize <= 4096:
        found = short_tilings(row)
    elif row.n * row.itemsize <= row_plan.RESIDENT_BYTES:
        found = resident_tilings(row)
    else:
        found = long_tilings(row)
    return list(dict.fromkeys([rule(row.itemsize, row.n, row.rows), *found]))


def make_call(row: Row, tensors: list[Any], tiling: Tiling, real: bool = True) -> Call:
    """The row's call, with `tiling` as the only row of the tuning table."""
    use = dataclasses.asdict(tiling)
    entry = {"op": row.op, "itemsize": row.itemsize, "n": row.n, "rows": [1, None], "use": use}
    row_plan.tuning_rows = lambda: ({**entry, "label": row.label},)
    return Call.of(CATALOGUE[row.op], tensors, row.params, real=real)


def warm(task: tuple[Row, Tiling]) -> dict[str, Any]:
    """Compile one candidate into Triton's cache on disk, in a process of its own."""
    from opkiln_norm.row_norm import row_norm_kernel

    row, tiling = task
    dtype = DTYPES[row.dtype]
    plan = plan_for(make_call(row, row.tensors("meta"), tiling, real=False))
    weight, bias = (dtype if row.affine > i else None for i in range(2))
    try:
        kernel = row_norm_kernel.warmup(
            dtype, weight, bias, dtype, None, None, plan.inner_sizes, plan.x_strides, None, None,
            None, plan.rows, plan.n // plan.align, 1e-6, grid=(1,),
            **plan.constexprs(row.op == "layer_norm"), num_warps=tiling.num_warps,
        )  # fmt: skip
        kernel._init_handles()
    except Exception as error:  # a candidate that does not compile is a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {"registers": kernel.n_regs, "spills": kernel.n_spills}


def reference(row: Row, tensors: list[Any]) -> torch.Tensor:
    """The output in float64 arithmetic, rounded to the row's dtype."""
    wide = [None if t is None else t.double() for t in tensors[1:]]
    step = max(2**26 // row.n, 1)
    want = torch.empty_like(tensors[0])
    for i in range(0, row.rows, step):
        x = tensors[0][i : i + step].double()
        want[i : i + step] = CATALOGUE[row.op].reference(x, *wide, **row.params)[0]
    return want


def wrong_elements(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> int:
    """How many elements are off by more than one unit in the last place; NaN is off."""
    wrong = 0
    step = 2**28 // got.shape[1]
    for g, w in zip(got.split(step), want.split(step), strict=True):
        close = (g.float() - w.float()).abs() <= tolerance * w.float().abs() + 2**-18
        wrong += close.numel() - int(close.sum())
    return wrong


def kernel_times_us(calls: list[Callable[[], Any]], flush: torch.Tensor) -> list[list[float]]:
    """Device time of each call, ITERATIONS times: the kernels between two flushes, summed."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            for _ in range(ITERATIONS):
                flush.zero_()
                call()
        torch.cuda.synchronize()
    events = [
        (e.start_ns(), e.duration_ns(), e.name())
        for e in profile.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    ]
    spans: list[float] = []
    for _, duration, name in sorted(events):
        if FLUSH.search(name):
            spans.append(0.0)
        elif spans:
            spans[-1] += duration / 1e3
    if len(spans) != len(calls) * ITERATIONS:
        raise RuntimeError(f"{len(spans)} flushes seen, {len(calls) * ITERATIONS} made")
    return [spans[i : i + ITERATIONS] for i in range(0, len(spans), ITERATIONS)]


def baselines(row: Row, tensors: list[Any], compiled: bool) -> dict[str, Callable[[], Any]]:
    eps = row.params["eps"]
    norm = getattr(torch.nn.functional, row.op)

    def native(*given: torch.Tensor | None) -> torch.Tensor:
        return norm(given[0], (row.n,), *given[1:], eps)

    found = {"torch": lambda: native(*tensors)}
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(native, dynamic=False)
        found["torch-compile"] = lambda: function(*tensors)
    return found


def measure(
    row: Row, resources: dict[Tiling, Any], compiled: bool, flush: torch.Tensor
) -> dict[str, Any]:
    """Every candidate and baseline of one row: status, median and least time."""
    from opkiln_norm.row_norm import prepare

    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    want = reference(row, tensors)
    records: list[dict[str, Any]] = []
    calls: list[Callable[[], Any]] = []
    torch.use_deterministic_algorithms(True)  # fills outputs with NaN before the launch
    for tiling in candidates(row):
        record = {"use": dataclasses.asdict(tiling)} | resources[tiling]
        records.append(record)
        try:
            launch = prepare(make_call(row, tensors, tiling))
            wrong = wrong_elements(launch(*tensors), want, TOLERANCE[row.dtype])
            record["status"] = f"{wrong} elements wrong" if wrong else "ok"
        except Exception as error:  # recorded; the other candidates still run
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            calls.append(lambda launch=launch: launch(*tensors))
    torch.use_deterministic_algorithms(False)
    del want
    others = baselines(row, tensors, compiled)
    for function in others.values():
        function()
    times = kernel_times_us([*calls, *others.values()], flush)
    timed = [r for r in records if r["status"] == "ok"]
    for record, samples in zip(timed, times[: len(calls)], strict=True):
        record |= {"us": statistics.median(samples), "low_us": min(samples)}
    medians = map(statistics.median, times[len(calls) :])
    found = {"candidates": records, "baselines": dict(zip(others, medians, strict=True))}
    return dataclasses.asdict(row) | {"itemsize": row.itemsize} | found


def short(use: dict[str, Any]) -> str:
    """A tiling on one line, defaults left out."""
    kept = changed(use)
    size = f"{kept.pop('block_m', 1)}x{kept.pop('chunks', 1)}x{kept.pop('block_n')}"
    flags = [k if v is True else f"{k}={v}" for k, v in kept.items() if k != "num_warps"]
    return " ".join([size, f"w{kept['num_warps']}", *flags])


def changed(use: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tiling that are not at their default."""
    default = dataclasses.asdict(Tiling(0, 0))
    return {k: v for k, v in use.items() if v != default[k]}


def commit() -> str:
    given = os.environ.get("OPKILN_COMMIT")
    if given:
        return given
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write_tuning(results: pathlib.Path) -> None:
    """For each (op, element size, N, number of rows): the best tiling that does not spill."""
    data = json.loads(results.read_text("utf-8"))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in data["results"]:
        groups.setdefault((r["op"], r["itemsize"], r["n"], r["rows"]), []).append(r)
    entries = []
    for (op, itemsize, n, rows), found in sorted(groups.items()):
        score: dict[str, list[float]] = {}
        for r in found:
            for c in r["candidates"]:
                if "us" in c and c["spills"] == 0:
                    score.setdefault(json.dumps(c["use"]), []).append(c["us"])
        whole = {use: t for use, t in score.items() if len(t) == len(found)}
        use, times = min(whole.items(), key=lambda item: sum(item[1]))
        figures = {r["dtype"]: round(t, 3) for r, t in zip(found, times, strict=True)}
        measured = {k: data[k] for k in ("gpu", "date", "commit")} | {"us": figures}
        entries.append({
            "op": op, "itemsize": itemsize, "n": n, "rows": regime(op, itemsize, n, rows, groups),
            "label": found[0]["label"], "use": changed(json.loads(use)), "measured": measured,
        })  # fmt: skip
    table = json.loads(TUNING.read_text("utf-8")) | {"rows": entries}
    TUNING.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    print(f"wrote {len(entries)} rows to {TUNING.relative_to(ROOT)}")


def regime(op: str, itemsize: int, n: int, rows: int, groups: Any) -> list[int | None]:
    """Numbers of rows that a measurement speaks for: up to halfway to the next one measured."""
    if rows <= row_plan.FEW_ROWS:
        return [1, row_plan.FEW_ROWS]
    others = [g[3] for g in groups if g[:3] == (op, itemsize, n)]
    above = [r for r in others if r > rows]
    below = [r for r in others if row_plan.FEW_ROWS < r < rows]
    low = max(below) * 4 if below else row_plan.FEW_ROWS + 1
    return [low, rows * 4 - 1 if above else None]


def line(result: dict[str, Any]) -> str:
    best = min((c for c in result["candidates"] if "us" in c), key=lambda c: c["us"], default=None)
    name = f"{result['op']:10s} {result['label']:23s} {result['dtype']:4s}"
    if best is None:
        return f"{name} no candidate ran: {result['candidates'][0]['status']}"
    ruled = result["candidates"][0].get("us", float("nan"))
    bar, page = result["bar"], result["page"]
    others = " ".join(f"{k} {v:.2f}" for k, v in result["baselines"].items())
    return (
        f"{name} {best['us']:8.2f} rule {ruled:8.2f} bar {bar:8.2f} page {page:8.2f} "
        f"ratio {min(bar, page) / best['us']:.2f} | {short(best['use'])} | {others}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains this")
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile baselines")
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    rows = read_rows(options.only)
    start = time.time()
    tasks = [(row, tiling) for row in rows for tiling in candidates(row)]
    context = multiprocessing.get_context("spawn")
    workers = max(len(os.sched_getaffinity(0)) - 1, 1)
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        resources = dict(zip(tasks, pool.map(warm, tasks, chunksize=4), strict=True))
    failed = [(task, found) for task, found in resources.items() if "compile_error" in found]
    print(f"{len(tasks)} kernels compiled in {time.time() - start:.0f} s, {len(failed)} failed")
    print(*failed[:5], sep="\n", flush=True)
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    data = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "results": results,
    }
    for row in rows:
        first = row.label not in {r["label"] for r in results if r["op"] == row.op}
        compiled = first and not options.no_compile and time.time() - start < COMPILE_UNTIL_S
        own = {tiling: found for (r, tiling), found in resources.items() if r == row}
        results.append(measure(row, own, compiled, flush))
        (options.out / "row_norm.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        torch.cuda.empty_cache()
    print(f"{len(results)} rows in {time.time() - start:.0f} s")
    print(*map(line, results), sep="\n")


if __name__ == "__main__":
    main()
