"""Measure every candidate tiling of the pooling kernels on the rows of the benchmark pages.

    python bench/probes/pool.py --out DIR [--only SUBSTRING,...]
    python bench/probes/pool.py --write-tuning DIR/pool.json

The first writes DIR/pool.json and prints one line a row; the second puts what was measured into
packages/pool/src/opkiln_pool/tuning/sm90.json. Device time by CUPTI (torch.profiler), L2 flushed
before each call, median; a candidate whose output is wrong, on random values or on ties, NaN, -inf
and zeros of both signs, is recorded and never timed.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import (
    DTYPES,
    ROOT,
    chosen,
    flush_buffer,
    kernel_times_us,
    provenance,
    resources_of,
    warm_all,
    write_json,
)

sys.path[:0] = [str(ROOT / "core/src"), str(ROOT / "packages/pool/src")]

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_pool import mean_plan, pool_plan, window_cuda  # noqa: E402
from opkiln_pool.geometry import Geometry, geometry_of  # noqa: E402
from opkiln_pool.mean_plan import MeanTiling  # noqa: E402
from opkiln_pool.pool_plan import Tiling  # noqa: E402

TUNING = ROOT / "packages/pool/src/opkiln_pool/tuning/sm90.json"
NOT_KEY = ("label", "use", "measured")
TOLERANCE = {"bf16": 2**-7, "f16": 2**-10, "f32": 2**-19}
MEAN_TUNED, POOL_TUNED = mean_plan.tuned, pool_plan.tuned
CUDA_ROWS = window_cuda.cuda_rows
Candidate = Tiling | MeanTiling

ROWS = pathlib.Path(__file__).with_name("pool_rows.txt")


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the pages. bar, page: us to be beaten."""

    op: str
    label: str
    dtype: str
    shape: tuple[int, ...]
    bar: float
    page: float
    options: tuple[str, ...]

    @property
    def values(self) -> dict[str, tuple[int, ...]]:
        pairs = [o.split("=") for o in self.options if "=" in o]
        return {k: tuple(map(int, v.split(","))) for k, v in pairs}

    @property
    def params(self) -> dict[str, Any]:
        v = self.values
        if "out" in v:
            return {"output_size": v["out"]}
        if "chunk" in v:
            cu = v.get("cu")
            count = cu and sum(-(-(b - a) // v["chunk"][0]) for a, b in itertools.pairwise(cu))
            return {"chunk_size": v["chunk"][0], "num_chunks": count}
        found: dict[str, Any] = {"kernel_size": v["k"], "stride": v["s"], "padding": v["p"]}
        found["ceil_mode"] = "ceil" in self.options
        if self.op.startswith("max"):
            return found | {"dilation": v.get("d", (1,) * len(v["k"]))}
        found["count_include_pad"] = "inside" not in self.options
        if len(v["k"]) > 1:
            found["divisor_override"] = v["by"][0] if "by" in v else None
        return found

    def tensors(self, device: str) -> list[Any]:
        found: list[Any] = [torch.randn(self.shape, dtype=DTYPES[self.dtype], device=device)]
        if self.op == "mean_pooling":
            cu = self.values.get("cu")
            found.append(cu and torch.tensor(cu, dtype=torch.int32, device=device))
        return found

    def call(self, tensors: list[Any], real: bool = True) -> Call:
        return Call.of(CATALOGUE[self.op], tensors, self.params, real=real)


def read_rows(only: str) -> list[Row]:
    rows = []
    for line in ROWS.read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        op, label, dtype, shape, bar, page, *options = line.split()
        sizes = tuple(map(int, shape.split("x")))
        rows.append(Row(op, label, dtype, sizes, float(bar), float(page), tuple(options)))
    wanted = [r for part in only.split(",") for r in chosen(rows, part)]
    return [r for r in rows if r in wanted]


def candidates(row: Row) -> list[Candidate]:
    """What ships first, then the rule, then what may be better."""
    call = row.call(row.tensors("meta"), real=False)
    if row.op == "mean_pooling":
        shapes = itertools.product((256, 512, 1024), (4, 8, 16), (1, 2, 3, 4))
        found = [MeanTiling(n, n // 256, step, stages) for n, step, stages in shapes]
        streams = [replace(t, evict="evict_first") for t in found if t.step == 8]
        rule = mean_plan.rule(DTYPES[row.dtype].itemsize, 8192, row.values["chunk"][0], True)
        first = MEAN_TUNED(call) or rule
        return list(dict.fromkeys([first, *found, *streams]))
    g = geometry_of(call)
    shipped, ruled = POOL_TUNED(row.op, g), pool_plan.rule(g)
    return list(dict.fromkeys([shipped[0] if shipped else ruled, ruled, *variants_of(ruled, g)]))


def variants_of(first: Tiling, g: Geometry) -> list[Tiling]:
    """Candidates of the rule's kernel."""
    if first.variant == "plane":
        n = math.prod(g.sizes)
        vec = math.gcd(16 // g.itemsize, n)
        return [
            # `lanes` threads a plane, `more` planes a thread.
            Tiling("plane", 32 * w * more // lanes, w, step=vec * lanes)
            for lanes in (4, 8, 16)
            for w in (1, 2, 4)
            for more in (1, 2, 4)
            if vec * lanes <= pool_plan.power_of_two(n)
        ]
    if first.variant == "strip":
        steps = ((1, 0), (1, 1), (1, 2), (1, 4), (2, 0), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8))
        return [Tiling("strip", 1, w, step=rows) for w, rows in steps]
    shapes = ((128, 4), (256, 4), (256, 8), (64, 2), (512, 8), (1024, 8))
    hints = (("", ""), ("evict_first", ""), ("", ".cs"))
    v = pool_plan.least_v(g)
    pairs = first.pairs and g.reduce == "argmax" and g.itemsize == 2
    patches = [
        Tiling("patch", b, w, v=v * more, static=True, evict=evict, cache=cache, pairs=pairs)
        for more in (1, 2, 4)
        if v and v * more <= 8
        for b, w in (shapes[:4] if more == 1 else shapes[:3])
        for evict, cache in hints
    ]
    plain = [Tiling("taps", b, w, static=True, cache=c) for b, w in shapes for c in ("", ".cs")]
    found = patches + (plain[:4] if v else plain)
    return [*found, replace(first, static=True), replace(found[0], static=False)]


def use(tiling: Candidate) -> None:
    """Make every plan use this tiling, of a Triton kernel."""
    window_cuda.cuda_rows = list
    if isinstance(tiling, MeanTiling):
        mean_plan.tuned = lambda call: tiling
    else:
        pool_plan.tuned = lambda op, g: (tiling, "probe")


def warm(task: tuple[Row, Candidate]) -> dict[str, Any]:
    """Compile one candidate into Triton's cache on disk."""
    from opkiln_pool.mean_pooling import mean_kernel
    from opkiln_pool.variants import KERNELS

    row, tiling = task
    call = row.call(row.tensors("meta"), real=False)
    use(tiling)
    dtype = DTYPES[row.dtype]
    options = {"grid": (1,), "num_warps": tiling.num_warps}
    if isinstance(tiling, MeanTiling):
        offsets = None if call.tensors.cu_seqlens is None else torch.int32
        plan = mean_plan.plan_for(call)
        return resources_of(
            lambda: mean_kernel.warmup(dtype, offsets, dtype, *plan.arguments, **options)
        )
    found = pool_plan.plan_for(call)
    index = torch.int64 if row.op.endswith("_indices") else None
    arguments = (*found.arguments, *found.constexprs.values())
    kernel = KERNELS[tiling.variant]
    return resources_of(lambda: kernel.warmup(dtype, dtype, index, None, *arguments, **options))


def special(row: Row, tensors: list[Any]) -> list[Any]:
    """Inputs where maxima need care: ties, zeros of both signs, NaN, stretches of -inf."""
    x = torch.randint(-1, 2, row.shape, device="cuda").to(DTYPES[row.dtype])
    x = torch.where((x == 0) & (torch.rand(row.shape, device="cuda") < 0.5), -0.0, x)
    x = torch.where(torch.rand(row.shape, device="cuda") < 0.02, math.nan, x)
    if row.shape[0] > 1:
        x[0] = -math.inf
    return [x, *tensors[1:]]


def reference(row: Row, tensors: list[Any]) -> list[torch.Tensor]:
    """The outputs in float64 arithmetic, rounded to the row's dtype."""
    call = row.call(tensors)
    wide = [tensors[0].double(), *tensors[1:]]
    found = CATALOGUE[row.op].reference(*wide, **row.params)
    found = found if isinstance(found, tuple) else (found,)
    return [f.to(m.dtype) for f, m in zip(found, call.outputs, strict=False)]


def wrong_elements(got: Any, want: list[torch.Tensor], row: Row) -> int:
    """How many elements are off by more than a unit in the last place; of a maximum, at all."""
    got = got if isinstance(got, tuple) else (got,)
    wrong = 0
    for g, w in zip(got, want, strict=True):
        if row.op.startswith(("avg", "adaptive_avg", "mean")):
            close = (g.float() - w.float()).abs() <= TOLERANCE[row.dtype] * w.float().abs() + 2**-18
        else:
            close = (g == w) | (g.isnan() & w.isnan())
        wrong += close.numel() - int(close.sum())
    return wrong


def prepared(call: Call) -> Any:
    from opkiln_pool import mean_pooling, variants

    module = mean_pooling if call.spec.name == "mean_pooling" else variants
    return module.prepare(call)


def measure(row: Row, resources: dict[Candidate, Any], flush: torch.Tensor) -> dict[str, Any]:
    """Every candidate of one row: status, median and least time."""
    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    checks = [tensors]
    if not row.op.startswith(("avg", "adaptive_avg", "mean")):
        checks.append(special(row, tensors))
    wants = [reference(row, found) for found in checks]
    records: list[dict[str, Any]] = []
    calls: list[Callable[[], Any]] = []
    torch.use_deterministic_algorithms(True)  # fills outputs with NaN before the launch
    for tiling in candidates(row):
        record = {"use": dataclasses.asdict(tiling)} | resources[tiling]
        records.append(record)
        use(tiling)
        try:
            launch = prepared(row.call(tensors))
            wrong = sum(
                wrong_elements(launch(*found), want, row)
                for found, want in zip(checks, wants, strict=True)
            )
            record["status"] = f"{wrong} elements wrong" if wrong else "ok"
        except Exception as error:  # recorded; the other candidates still run
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            calls.append(functools.partial(launch, *tensors))
    torch.use_deterministic_algorithms(False)
    del wants, checks
    times = kernel_times_us(calls, flush)
    for record, samples in zip((r for r in records if r["status"] == "ok"), times, strict=True):
        record |= {"us": statistics.median(samples), "low_us": min(samples)}
    return dataclasses.asdict(row) | {"candidates": records}


def changed(tiling: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tiling that are not at their default."""
    default = dataclasses.asdict(Tiling("", 0, 0) if "variant" in tiling else MeanTiling(0, 0, 0))
    return {k: v for k, v in tiling.items() if v != default[k]}


def write_tuning(results: pathlib.Path) -> None:
    """Of each key of the table that was measured: the best tiling that does not spill."""
    data = json.loads(results.read_text("utf-8"))
    groups: dict[str, list[tuple[Row, dict[str, Any]]]] = {}
    for r in data["results"]:
        fields = {f.name: r[f.name] for f in dataclasses.fields(Row)}
        row = Row(**fields | {"shape": tuple(r["shape"]), "options": tuple(r["options"])})
        call = row.call(row.tensors("meta"), real=False)
        mean = row.op == "mean_pooling"
        key = mean_plan.key_of(call) if mean else pool_plan.key_of(row.op, geometry_of(call))
        groups.setdefault(json.dumps(key), []).append((row, r))
    table = json.loads(TUNING.read_text("utf-8"))
    rows = {json.dumps({k: v for k, v in r.items() if k not in NOT_KEY}): r for r in table["rows"]}
    for text, found in groups.items():
        score: dict[str, list[float]] = {}
        for _, r in found:
            for c in r["candidates"]:
                if "us" in c and c["spills"] == 0:
                    score.setdefault(json.dumps(c["use"]), []).append(c["us"])
        whole = {tiling: t for tiling, t in score.items() if len(t) == len(found)}
        best, times = min(whole.items(), key=lambda item: sum(item[1]))
        labels = list(dict.fromkeys(row.label for row, _ in found))
        figures = {
            row.dtype if len(labels) == 1 else f"{row.label} {row.dtype}": round(t, 3)
            for (row, _), t in zip(found, times, strict=True)
        }
        measured = {k: data[k] for k in ("gpu", "date", "commit")} | {"us": figures}
        use = changed(json.loads(best))
        rows[text] = json.loads(text) | {
            "label": " ".join(labels),
            "use": use,
            "measured": measured,
        }
    write_json(TUNING, table | {"rows": list(rows.values())})
    print(f"wrote {len(groups)} of {len(rows)} rows to {TUNING.relative_to(ROOT)}")


def line(result: dict[str, Any]) -> str:
    timed = sorted((c for c in result["candidates"] if "us" in c), key=lambda c: c["us"])
    name = f"{result['op']:27s} {result['label']:21s} {result['dtype']:4s}"
    failed = [c["status"] for c in result["candidates"] if "us" not in c]
    if not timed:
        return f"{name} no candidate ran: {failed[0]}"
    shipped = result["candidates"][0].get("us", float("nan"))
    bar, page = result["bar"], result["page"]
    best = timed[0]
    shown = " ".join(f"{k}={v}" for k, v in changed(best["use"]).items())
    return (
        f"{name} {best['us']:8.2f} shipped {shipped:8.2f} bar {bar:8.2f} page {page:7.2f} "
        f"ratio {min(bar, page) / best['us']:.2f} | {shown} regs={best['registers']}"
        + (f" | {len(failed)} failed: {failed[0][:80]}" if failed else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument(
        "--only", default="", help="rows whose 'op label dtype' contains one of these"
    )
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    rows = read_rows(options.only)
    start = time.time()
    resources = warm_all(warm, [(row, t) for row in rows for t in candidates(row)])
    failed = [(task, found) for task, found in resources.items() if "compile_error" in found]
    print(f"{len(resources)} kernels compiled in {time.time() - start:.0f} s, {len(failed)} failed")
    print(*failed[:5], sep="\n", flush=True)
    flush = flush_buffer()
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    data = provenance() | {"results": results}
    for row in rows:
        own = {tiling: found for (r, tiling), found in resources.items() if r == row}
        results.append(measure(row, own, flush))
        write_json(options.out / "pool.json", data)
        print(line(results[-1]), flush=True)
        torch.cuda.empty_cache()
    print(f"{len(results)} rows in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
