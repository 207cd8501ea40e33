"""Measure every candidate tiling of the pooling kernels on the rows of the benchmark pages.

    python bench/probes/pool.py --out DIR [--only SUBSTRING]
    python bench/probes/pool.py --write-tuning DIR/pool.json

The first writes DIR/pool.json and prints one line a row; the second turns that file into
packages/pool/src/opkiln_pool/tuning/sm90.json. Device time by CUPTI (torch.profiler), L2 flushed
before each call, median; a candidate whose output is wrong is recorded and never timed.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import time
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
from opkiln_pool import mean_plan, pool_plan  # noqa: E402
from opkiln_pool.geometry import geometry_of  # noqa: E402
from opkiln_pool.mean_plan import MeanTiling  # noqa: E402
from opkiln_pool.pool_plan import Tiling  # noqa: E402

TUNING = ROOT / "packages/pool/src/opkiln_pool/tuning/sm90.json"
TOLERANCE = {"bf16": 2**-7, "f16": 2**-10, "f32": 2**-19}
MEAN_RULE = mean_plan.rule
Candidate = Tiling | MeanTiling

# op, label, dtype, shape, fastest alternative here, best of the pages (us), window. ceil:
# ceil_mode, inside: count_include_pad=False, by: divisor_override, cu: offsets of sequences.
ROWS = """
adaptive_avg_pool2d         nondiv-7x7            bf16 2x64x55x57         6.336  6.59  out=7,7
adaptive_avg_pool2d         resnet-global         f16  8x2048x7x7         3.136  2.98  out=1,1
adaptive_avg_pool2d         spp-6x6               f16  2x128x56x56         5.28  5.41  out=6,6
adaptive_max_pool2d         global-1x1            f16  8x2048x7x7         3.136  2.91  out=1,1
adaptive_max_pool2d         nondiv-7x7            bf16 2x64x55x57          6.24   6.5  out=7,7
adaptive_max_pool2d         spp-6x6               f16  2x128x56x56         5.28  6.02  out=6,6
adaptive_max_pool2d_indices global-1x1            f16  8x2048x7x7            12  8.16  out=1,1
adaptive_max_pool2d_indices nondiv-7x7            bf16 2x64x55x57         9.952  11.5  out=7,7
adaptive_max_pool2d_indices spp-6x6               f16  2x128x56x56       12.192  14.3  out=6,6
avg_pool1d                  audio-downsample      f16  4x128x4096          2.72  4.19  k=3 s=2 p=1
avg_pool1d                  ceil                  bf16 2x128x2048         2.368   2.3  k=4 s=2 p=1 ceil inside
avg_pool1d                  long-temporal         f16  2x256x32000        15.84  17.1  k=5 s=4 p=2
avg_pool2d                  ceil-divisor          bf16 3x96x55x57         2.752  3.14  k=3,5 s=2,2 p=1,2 ceil inside by=7
avg_pool2d                  vision-3x3-s2         f16  2x64x112x112       2.912  3.97  k=3,3 s=2,2 p=1,1
avg_pool2d                  vision-5x5-s2         f16  2x128x56x56        3.696  4.03  k=5,5 s=2,2 p=2,2
avg_pool3d                  ceil-video            f16  2x64x8x28x28       3.232  4.03  k=2,3,3 s=2,2,2 p=1,1,1 ceil inside
avg_pool3d                  divisor               bf16 2x24x10x20x22      1.248  1.89  k=2,2,3 s=2,2,2 p=0,1,1 by=7
avg_pool3d                  video-2x2x2           f16  1x32x16x56x56       2.08  3.71  k=2,2,2 s=2,2,2 p=0,0,0
max_pool1d                  ecg-cnn-dilated       bf16 16x128x2048        6.816  7.84  k=5 s=2 p=2 d=2 ceil
max_pool1d                  sincnet-speaker-local f16  32x80x4096        10.416  11.4  k=3 s=3 p=0
max_pool1d                  textcnn-global        f16  64x256x128        11.264  3.71  k=128 s=1 p=0
max_pool1d_indices          ecg-cnn-dilated       bf16 16x128x2048       14.944  13.4  k=5 s=2 p=2 d=2 ceil
max_pool1d_indices          sincnet-speaker-local f16  32x80x4096          15.2    16  k=3 s=3 p=0
max_pool1d_indices          textcnn-global        f16  64x256x128         4.896   5.7  k=128 s=1 p=0
max_pool2d                  alexnet-ceil          f16  32x64x55x55        8.544  8.77  k=3,3 s=2,2 p=0,0 ceil
max_pool2d                  alexnet-ceil          bf16 32x64x55x55        8.544  8.77  k=3,3 s=2,2 p=0,0 ceil
max_pool2d                  alexnet-ceil          f32  32x64x55x55       12.496  12.6  k=3,3 s=2,2 p=0,0 ceil
max_pool2d                  resnet-stem           f16  32x64x112x112     30.784    34  k=3,3 s=2,2 p=1,1
max_pool2d                  resnet-stem           bf16 32x64x112x112     30.784    34  k=3,3 s=2,2 p=1,1
max_pool2d                  resnet-stem           f32  32x64x112x112     41.184  49.6  k=3,3 s=2,2 p=1,1
max_pool2d                  vgg-block             f16  16x128x56x56       5.504   7.2  k=2,2 s=2,2 p=0,0
max_pool2d                  vgg-block             bf16 16x128x56x56       5.504   7.2  k=2,2 s=2,2 p=0,0
max_pool2d                  vgg-block             f32  16x128x56x56      10.127  10.4  k=2,2 s=2,2 p=0,0
max_pool2d_indices          alexnet-ceil          f16  32x64x55x55       14.464  17.7  k=3,3 s=2,2 p=0,0 ceil
max_pool2d_indices          alexnet-ceil          bf16 32x64x55x55       14.464  17.4  k=3,3 s=2,2 p=0,0 ceil
max_pool2d_indices          alexnet-ceil          f32  32x64x55x55        16.32  19.4  k=3,3 s=2,2 p=0,0 ceil
max_pool2d_indices          resnet-stem           f16  32x64x112x112     56.512  69.1  k=3,3 s=2,2 p=1,1
max_pool2d_indices          resnet-stem           bf16 32x64x112x112     56.512    70  k=3,3 s=2,2 p=1,1
max_pool2d_indices          resnet-stem           f32  32x64x112x112     60.191  71.6  k=3,3 s=2,2 p=1,1
max_pool2d_indices          vgg-block             f16  16x128x56x56       8.096  10.7  k=2,2 s=2,2 p=0,0
max_pool2d_indices          vgg-block             bf16 16x128x56x56       8.096  10.6  k=2,2 s=2,2 p=0,0
max_pool2d_indices          vgg-block             f32  16x128x56x56      12.688  12.7  k=2,2 s=2,2 p=0,0
max_pool3d                  c3d-pool1             f16  8x64x16x112x112   75.424  76.3  k=1,2,2 s=1,2,2 p=0,0,0
max_pool3d                  c3d-pool2             f16  4x128x16x56x56    23.216  23.5  k=2,2,2 s=2,2,2 p=0,0,0
max_pool3d                  medicalnet-stem       bf16 2x64x32x112x112   87.664 111.3  k=3,3,3 s=2,2,2 p=1,1,1 ceil
max_pool3d_indices          c3d-pool1             f16  8x64x16x112x112  121.888 129.4  k=1,2,2 s=1,2,2 p=0,0,0
max_pool3d_indices          c3d-pool2             f16  4x128x16x56x56    27.408  32.7  k=2,2,2 s=2,2,2 p=0,0,0
max_pool3d_indices          medicalnet-stem       bf16 2x64x32x112x112  252.192 331.5  k=3,3,3 s=2,2,2 p=1,1,1 ceil
mean_pooling                dense-batched         f16  2x2048x64x128     26.336  28.6  chunk=64
mean_pooling                dense-mainstream      f16  1x8192x64x128     43.184    47  chunk=64
mean_pooling                varlen-long           f16  1x8192x64x128     320.64 138.6  chunk=64 cu=0,2048,4096,6144,8192
mean_pooling                varlen-tail           f16  1x1000x64x128    102.273  21.8  chunk=32 cu=0,100,300,600,1000
"""  # noqa: E501


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
    for line in ROWS.strip().splitlines():
        op, label, dtype, shape, bar, page, *options = line.split()
        sizes = tuple(map(int, shape.split("x")))
        rows.append(Row(op, label, dtype, sizes, float(bar), float(page), tuple(options)))
    return chosen(rows, only)


def candidates(row: Row) -> list[Candidate]:
    """What the rule says first, then what may be better."""
    call = row.call(row.tensors("meta"), real=False)
    if row.op == "mean_pooling":
        mean_plan.rule = MEAN_RULE
        first = mean_plan.plan_for(call).tiling
        shapes = itertools.product((256, 512, 1024), (4, 8, 16))
        found = [MeanTiling(n, n // 256, step) for n, step in shapes]
        split = [MeanTiling(n, 4, step) for n in (256, 512) for step in (16, 32)]
        staged = [MeanTiling(n, n // 256, 8, stages) for n in (512, 1024) for stages in (2, 3, 4)]
        streams = [replace(t, evict="evict_first") for t in (*found[3:], *split)]
        return list(dict.fromkeys([first, *found, *split, *staged, *streams]))
    g = geometry_of(call)
    first = pool_plan.rule(g)
    found = []
    if first.variant == "plane":
        found = [Tiling("plane", b, w) for b in (8, 16, 32, 64, 128) for w in (1, 2, 4, 8)]
        found = [t for t in found if t.block >= t.num_warps]
    elif first.variant == "strip":
        found = [Tiling("strip", 1, w) for w in (1, 2, 4, 8)]
    else:
        shapes = ((128, 4), (256, 4), (256, 8), (64, 2), (512, 8), (1024, 8))
        hints = (("", ""), ("evict_first", ""), ("", ".cs"))
        v = pool_plan.least_v(g)
        patches = [
            Tiling("patch", b, w, v=v * more, static=True, evict=evict, cache=cache)
            for more in (1, 2, 4)
            if v and v * more <= 8
            for b, w in (shapes[:4] if more == 1 else shapes[:3])
            for evict, cache in hints
        ]
        plain = [Tiling("taps", b, w, static=True, cache=c) for b, w in shapes for c in ("", ".cs")]
        found = patches + (plain[:4] if v else plain)
        found += [replace(first, static=True), replace(found[0], static=False)]
    return list(dict.fromkeys([first, *found]))


def use(tiling: Candidate) -> None:
    """Make every plan use this tiling."""
    if isinstance(tiling, MeanTiling):
        mean_plan.rule = lambda *_: tiling
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
            close = g == w
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
    want = reference(row, tensors)
    records: list[dict[str, Any]] = []
    calls = []
    torch.use_deterministic_algorithms(True)  # fills outputs with NaN before the launch
    for tiling in candidates(row):
        record = {"use": dataclasses.asdict(tiling)} | resources[tiling]
        records.append(record)
        use(tiling)
        try:
            launch = prepared(row.call(tensors))
            wrong = wrong_elements(launch(*tensors), want, row)
            record["status"] = f"{wrong} elements wrong" if wrong else "ok"
        except Exception as error:  # recorded; the other candidates still run
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            calls.append(lambda launch=launch: launch(*tensors))
    torch.use_deterministic_algorithms(False)
    del want
    times = kernel_times_us(calls, flush)
    for record, samples in zip((r for r in records if r["status"] == "ok"), times, strict=True):
        record |= {"us": statistics.median(samples), "low_us": min(samples)}
    return dataclasses.asdict(row) | {"candidates": records}


def changed(tiling: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tiling that are not at their default."""
    default = dataclasses.asdict(Tiling("", 0, 0) if "variant" in tiling else MeanTiling(0, 0, 0))
    return {k: v for k, v in tiling.items() if v != default[k]}


def write_tuning(results: pathlib.Path) -> None:
    """For each (op, element size, plane, window): the best tiling that does not spill."""
    data = json.loads(results.read_text("utf-8"))
    groups: dict[str, list[tuple[Row, dict[str, Any], dict[str, Any]]]] = {}
    for r in data["results"]:
        if r["op"] == "mean_pooling":
            continue  # its rule speaks for all
        fields = {f.name: r[f.name] for f in dataclasses.fields(Row)}
        row = Row(**fields | {"shape": tuple(r["shape"]), "options": tuple(r["options"])})
        key = pool_plan.key_of(row.op, geometry_of(row.call(row.tensors("meta"), real=False)))
        groups.setdefault(json.dumps(key), []).append((row, key, r))
    entries = []
    for found in groups.values():
        score: dict[str, list[float]] = {}
        for _, _, r in found:
            for c in r["candidates"]:
                if "us" in c and c["spills"] == 0:
                    score.setdefault(json.dumps(c["use"]), []).append(c["us"])
        whole = {text: t for text, t in score.items() if len(t) == len(found)}
        best, times = min(whole.items(), key=lambda item: sum(item[1]))
        figures = {row.dtype: round(t, 3) for (row, _, _), t in zip(found, times, strict=True)}
        measured = {k: data[k] for k in ("gpu", "date", "commit")} | {"us": figures}
        row, key, _ = found[0]
        entries.append(key | {"label": row.label, "use": changed(json.loads(best)),
                              "measured": measured})  # fmt: skip
    table = json.loads(TUNING.read_text("utf-8")) | {"rows": entries}
    write_json(TUNING, table)
    print(f"wrote {len(entries)} rows to {TUNING.relative_to(ROOT)}")


def line(result: dict[str, Any]) -> str:
    timed = sorted((c for c in result["candidates"] if "us" in c), key=lambda c: c["us"])
    name = f"{result['op']:27s} {result['label']:21s} {result['dtype']:4s}"
    failed = [c["status"] for c in result["candidates"] if "us" not in c]
    if not timed:
        return f"{name} no candidate ran: {failed[0]}"
    ruled = result["candidates"][0].get("us", float("nan"))
    bar, page = result["bar"], result["page"]
    best = timed[0]
    shown = " ".join(f"{k}={v}" for k, v in changed(best["use"]).items())
    return (
        f"{name} {best['us']:8.2f} rule {ruled:8.2f} bar {bar:8.2f} page {page:7.2f} "
        f"ratio {min(bar, page) / best['us']:.2f} | {shown} regs={best['registers']}"
        + (f" | {len(failed)} failed: {failed[0][:80]}" if failed else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains this")
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
        torch.cuda.empty_cache()
    print(f"{len(results)} rows in {time.time() - start:.0f} s")
    print(*map(line, results), sep="\n")


if __name__ == "__main__":
    main()
