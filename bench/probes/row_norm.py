"""Measure every candidate tiling of the row norm kernels on the rows of the benchmark pages.

    python bench/probes/row_norm.py --out DIR [--only NAME,...] [--dtypes bf16,...] [--no-compile]
    python bench/probes/row_norm.py --write-tuning DIR/row_norm.json ...

The first writes DIR/row_norm.json and prints one line a row; the second turns such files, together,
into packages/norm/src/opkiln_norm/tuning/sm90.json. Device time by CUPTI (torch.profiler), L2
flushed before each call, median; a candidate whose output is wrong is recorded and never timed.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import torch
from common import DTYPES

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]

from opkiln.device import cuda  # noqa: E402
from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_norm import row_cluster, row_plan  # noqa: E402
from opkiln_norm.row_cluster import ClusterTiling  # noqa: E402
from opkiln_norm.row_plan import Tiling, plan_for  # noqa: E402
from row_tilings import AnyTiling, candidates  # noqa: E402

TUNING = common.ROOT / "packages/norm/src/opkiln_norm/tuning/sm90.json"
TOLERANCE = {"bf16": 2**-7, "f16": 2**-10, "f32": 2**-19}
COMPILE_UNTIL_S = 150  # rows measured after so long get no torch.compile baseline
CLUSTER_GAIN = 1.01  # less is not worth a second kernel


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
    def warp(self) -> int:
        """Columns that a warp loads at once."""
        return 512 // self.itemsize

    @property
    def adds(self) -> bool:
        return self.op.startswith("fused_add")

    @property
    def params(self) -> dict[str, Any]:
        if self.op.startswith("ada"):
            return {"eps": 1e-5, "scale_offset": 0.0}
        return {"normalized_shape": (self.n,), "eps": 1e-5 if "layer" in self.op else 1e-6}

    def tensors(self, device: str) -> list[Any]:
        make = {"dtype": DTYPES[self.dtype], "device": device}
        whole = {"ada_layer_norm": 3, "ada_layer_norm_zero": 4}.get(self.op, 1 + self.adds)
        found: list[Any] = [torch.randn(self.rows, self.n, **make) for _ in range(whole)]
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
ada_layer_norm       dit-xl-2               bf16  1024   1152 0    4.832    5.31
ada_layer_norm       dit-xl-2               f16   1024   1152 0      4.8    5.22
ada_layer_norm       llama-8b-decode        bf16     1   4096 0    2.048    2.66
ada_layer_norm       llama-8b-prefill       bf16  2048   4096 0   19.072    19.7
ada_layer_norm       llama-8b-prefill       f16   2048   4096 0   19.424    19.7
ada_layer_norm       dit-xl-2               f32   1024   1152 0    6.847    7.33
ada_layer_norm_zero  dit-xl-2               bf16  1024   1152 0    5.728    6.24
ada_layer_norm_zero  dit-xl-2               f16   1024   1152 0    5.664    6.18
ada_layer_norm_zero  llama-8b-decode        bf16     1   4096 0     2.56    2.83
ada_layer_norm_zero  llama-8b-prefill       bf16  2048   4096 0   23.584    24.4
ada_layer_norm_zero  llama-8b-prefill       f16   2048   4096 0   23.456    24.6
ada_layer_norm_zero  dit-xl-2               f32   1024   1152 0    8.224    9.25
fused_add_layer_norm llama-70b-decode       bf16     1   8192 2     3.84    3.62
fused_add_layer_norm llama-70b-prefill      bf16  2048   8192 2    38.16    41.5
fused_add_layer_norm llama-70b-prefill      f16   2048   8192 2    37.52      39
fused_add_layer_norm llama-8b-decode        bf16     1   4096 2    2.831    2.63
fused_add_layer_norm llama-8b-prefill       bf16  2048   4096 2   20.449      21
fused_add_layer_norm llama-8b-prefill       f16   2048   4096 2   20.064    20.2
fused_add_layer_norm llama-13b-prefill      f32   2048   5120 2   44.063    44.2
fused_add_rms_norm   llama-405b-decode      bf16     1  16384 1    3.743    2.85
fused_add_rms_norm   llama-405b-prefill     bf16  2048  16384 1   66.592    68.3
fused_add_rms_norm   llama-405b-prefill     f16   2048  16384 1   66.368    68.3
fused_add_rms_norm   llama-70b-decode       bf16     1   8192 1      2.4    2.11
fused_add_rms_norm   llama-70b-prefill      bf16  2048   8192 1   34.368    35.3
fused_add_rms_norm   llama-70b-prefill      f16   2048   8192 1   34.128    34.9
fused_add_rms_norm   llama-8b-decode        bf16     1   4096 1    1.887    1.92
fused_add_rms_norm   llama-8b-prefill       bf16  2048   4096 1   18.272    18.5
fused_add_rms_norm   llama-8b-prefill       f16   2048   4096 1   18.176    18.5
fused_add_rms_norm   llama-13b-prefill      bf16  2048   5120 1   22.992    22.4
"""


def read_rows(only: str, dtypes: str = "bf16,f16,f32") -> list[Row]:
    kinds = (str, str, str, int, int, int, float, float)
    lines = [line.split() for line in ROWS.strip().splitlines()]
    rows = [Row(*(k(v) for k, v in zip(kinds, line, strict=True))) for line in lines]
    wanted = only.split(",")
    rows = [r for r in rows if r.dtype in dtypes.split(",")]
    return [r for r in rows if any(w in f"{r.op} {r.label}" for w in wanted)]


def make_call(row: Row, tensors: list[Any], tiling: AnyTiling, real: bool = True) -> Call:
    """The row's call, with `tiling` as the only row of the tuning table."""
    use = dataclasses.asdict(tiling)
    entry = {"op": row.op, "itemsize": row.itemsize, "n": row.n, "rows": [1, None], "use": use}
    table = [{**entry, "label": row.label}]
    clustered = isinstance(tiling, ClusterTiling)
    row_plan.tuning_rows = lambda: [] if clustered else table
    row_cluster.cluster_rows = lambda: table if clustered else []
    return Call.of(CATALOGUE[row.op], tensors, row.params, real=real)


def warm(task: tuple[Row, AnyTiling]) -> dict[str, Any]:
    """Compile one candidate into the cache on disk, in a process of its own."""
    row, tiling = task
    call = make_call(row, row.tensors("meta"), tiling, real=False)
    if isinstance(tiling, ClusterTiling):
        return warm_cluster(call)
    return common.resources_of(lambda: warm_triton(call, tiling))


def warm_triton(call: Call, tiling: Tiling) -> Any:
    from opkiln_norm.row_norm import OPERANDS, RESULTS, row_norm_kernel

    plan = plan_for(call)
    metas = [
        next((getattr(call.tensors, n) for n in group if hasattr(call.tensors, n)), None)
        for group in OPERANDS
    ]
    names = [o.name for o in call.spec.returns]
    outputs = [call.outputs[names.index(n)] if n in names else None for n in RESULTS]
    dtypes = [None if m is None else m.dtype for m in (*metas, *outputs)]
    return row_norm_kernel.warmup(
        *dtypes, *plan.arguments(call.params), grid=(1,), **plan.constexprs(call),
        num_warps=tiling.num_warps,
    )  # fmt: skip


def warm_cluster(call: Call) -> dict[str, Any]:
    plan = row_cluster.plan_for(call)
    if plan is None:
        return {"compile_error": "the plan refuses this call"}
    macros = plan.macros(call)
    try:
        kernel = cuda.load(row_cluster.source(), "row_cluster", torch.device("cuda", 0), macros)
        attributes = kernel.handle.attributes
        return {"registers": attributes.num_regs, "spills": attributes.local_size_bytes}
    except Exception as error:  # whatever NVRTC and the driver raise: a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}


def references(row: Row, tensors: list[Any]) -> list[torch.Tensor]:
    """The outputs in float64 arithmetic, rounded to the row's dtype."""
    spec = CATALOGUE[row.op]
    step = max(2**26 // row.n, 1)
    wants = [torch.empty_like(tensors[0]) for _ in spec.returns]
    for i in range(0, row.rows, step):
        part = [t[i : i + step] if t is not None and t.ndim > 1 else t for t in tensors]
        wide = [None if t is None else t.double() for t in part]
        for want, got in zip(wants, spec.reference(*wide, **row.params), strict=False):
            want[i : i + step] = got
    return wants


def wrong_elements(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> int:
    """How many elements are off by more than one unit in the last place; NaN is off."""
    wrong = 0
    step = 2**28 // got.shape[1]
    for g, w in zip(got.split(step), want.split(step), strict=True):
        close = (g.float() - w.float()).abs() <= tolerance * w.float().abs() + 2**-18
        wrong += close.numel() - int(close.sum())
    return wrong


def status_of(launch: Callable[..., Any], tensors: list[Any], wants: Any, row: Row) -> str:
    got = launch(*tensors)
    got = got if isinstance(got, tuple) else (got,)
    wrong = [wrong_elements(g, w, TOLERANCE[row.dtype]) for g, w in zip(got, wants, strict=True)]
    return f"{sum(wrong)} elements wrong" if any(wrong) else "ok"


def baselines(row: Row, tensors: list[Any], compiled: bool) -> dict[str, Callable[[], Any]]:
    spec = CATALOGUE[row.op]

    def native(*given: torch.Tensor | None) -> Any:
        return spec.native(*given, **row.params)

    found = {"torch": lambda: native(*tensors)}
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(native, dynamic=False)
        found["torch-compile"] = lambda: function(*tensors)
    return found


def measure(
    row: Row, resources: dict[AnyTiling, Any], compiled: bool, flush: torch.Tensor
) -> dict[str, Any]:
    """Every candidate and baseline of one row: status, median and least time."""
    from opkiln_norm.row_norm import prepare

    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    wants = references(row, tensors)
    records: list[dict[str, Any]] = []
    calls: list[Callable[[], Any]] = []
    torch.use_deterministic_algorithms(True)  # fills outputs with NaN before the launch
    for tiling in candidates(row):
        kernel = "row_cluster" if isinstance(tiling, ClusterTiling) else "row_norm"
        record = {"kernel": kernel, "use": dataclasses.asdict(tiling)} | resources[tiling]
        records.append(record)
        if "compile_error" in record:
            record["status"] = record["compile_error"]
            continue
        try:
            launch = prepare(make_call(row, tensors, tiling))
            record["status"] = status_of(launch, tensors, wants, row)
        except Exception as error:  # recorded; the other candidates still run
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            calls.append(lambda launch=launch: launch(*tensors))
    torch.use_deterministic_algorithms(False)
    del wants
    others = baselines(row, tensors, compiled)
    for function in others.values():
        function()
    times = common.kernel_times_us([*calls, *others.values()], flush)
    timed = [r for r in records if r["status"] == "ok"]
    for record, samples in zip(timed, times[: len(calls)], strict=True):
        record |= {"us": statistics.median(samples), "low_us": min(samples)}
    medians = map(statistics.median, times[len(calls) :])
    found = {"candidates": records, "baselines": dict(zip(others, medians, strict=True))}
    return dataclasses.asdict(row) | {"itemsize": row.itemsize} | found


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
    """For each (op, element size, N, number of rows): the best tiling that does not spill."""
    files = [json.loads(path.read_text("utf-8")) for path in paths]
    groups: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for data in files:
        for r in data["results"]:
            key = (r["op"], r["itemsize"], r["n"], r["rows"])
            groups.setdefault(key, {}).setdefault(r["dtype"], []).append((data, r))
    tables: dict[str, list[Any]] = {"rows": [], "cluster_rows": []}
    for key, by_dtype in sorted(groups.items()):
        best = {k: best_of(by_dtype, k) for k in ("row_norm", "row_cluster")}
        for kernel, table in (("row_norm", "rows"), ("row_cluster", "cluster_rows")):
            if best[kernel] is None:
                continue
            own, other = (best[k]["measured"]["us"][min(by_dtype)] for k in (kernel, "row_norm"))
            if kernel == "row_norm" or own * CLUSTER_GAIN <= other:
                head = dict(zip(("op", "itemsize", "n"), key, strict=False))
                head["rows"] = regime(*key, groups)
                tables[table].append(head | best[kernel])
    table = json.loads(TUNING.read_text("utf-8")) | tables
    common.write_json(TUNING, table)
    print({name: len(found) for name, found in tables.items()}, TUNING.relative_to(common.ROOT))


def best_of(by_dtype: dict[str, list[Any]], kernel: str) -> dict[str, Any] | None:
    """The fastest tiling and its measurement; bf16 decides where several dtypes were measured."""
    times: dict[str, dict[str, float]] = {}
    sources: dict[str, Any] = {}
    spilling: set[str] = set()
    for dtype, runs in by_dtype.items():
        for data, r in runs:
            for c in r["candidates"]:
                use = json.dumps(changed(c))
                if c.get("spills"):
                    spilling.add(use)
                if "us" in c and kernel_of(c) == kernel:
                    found = times.setdefault(use, {})
                    found[dtype] = min(c["us"], found.get(dtype, c["us"]))
                    sources[use] = (data, r)
    lead = min(by_dtype)
    whole = {use: t for use, t in times.items() if lead in t and use not in spilling}
    if not whole:
        return None
    use, us = min(whole.items(), key=lambda item: item[1][lead])
    data, r = sources[use]
    rounded = {dtype: round(t, 3) for dtype, t in us.items()}
    measured = {k: data[k] for k in ("gpu", "date", "commit")} | {"us": rounded}
    return {"label": r["label"], "use": json.loads(use), "measured": measured}


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
    name = f"{result['op']:20s} {result['label']:23s} {result['dtype']:4s}"
    if best is None:
        return f"{name} no candidate ran: {result['candidates'][0]['status']}"
    ruled = result["candidates"][0].get("us", float("nan"))
    bar, page = result["bar"], result["page"]
    others = " ".join(f"{k} {v:.2f}" for k, v in result["baselines"].items())
    return (
        f"{name} {best['us']:8.2f} rule {ruled:8.2f} bar {bar:8.2f} page {page:8.2f} "
        f"ratio {min(bar, page) / best['us']:.2f} | {short(best)} | {others}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose 'op label' contains one")
    parser.add_argument("--dtypes", default="bf16,f32", help="f16 behaves as bf16")
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile baselines")
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS", nargs="+")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    rows = read_rows(options.only, options.dtypes)
    start = time.time()
    tasks = [(row, tiling) for row in rows for tiling in candidates(row)]
    resources = common.warm_all(warm, tasks)
    failed = [(task, found) for task, found in resources.items() if "compile_error" in found]
    print(f"{len(tasks)} kernels compiled in {time.time() - start:.0f} s, {len(failed)} failed")
    print(*failed[:5], sep="\n", flush=True)
    flush = common.flush_buffer()
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    data = common.provenance() | {"results": results}
    for row in rows:
        first = row.label not in {r["label"] for r in results if r["op"] == row.op}
        compiled = first and not options.no_compile and time.time() - start < COMPILE_UNTIL_S
        own = {tiling: found for (r, tiling), found in resources.items() if r == row}
        results.append(measure(row, own, compiled, flush))
        common.write_json(options.out / "row_norm.json", data)
        torch.cuda.empty_cache()
    print(f"{len(results)} rows in {time.time() - start:.0f} s")
    print(*map(line, results), sep="\n")


if __name__ == "__main__":
    main()
