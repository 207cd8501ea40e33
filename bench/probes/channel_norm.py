"""Measure every candidate tiling of the channel norm kernels on the rows of the benchmark pages.

    python bench/probes/channel_norm.py --out DIR [--only SUBSTRING] [--no-compile]
    python bench/probes/channel_norm.py --write-tuning DIR/channel_norm.json

The first writes DIR/channel_norm.json and prints one line a row; the second turns that file into
packages/norm/src/opkiln_norm/tuning/channel_sm90.json. Device time by CUPTI (torch.profiler), L2
flushed before each call, median; a candidate whose output is wrong is recorded and never timed.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from common import (
    DTYPES,
    ROOT,
    flush_buffer,
    kernel_times_us,
    provenance,
    resources_of,
    warm_all,
    write_json,
)

sys.path[:0] = [str(ROOT / "core/src"), str(ROOT / "packages/norm/src")]

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_norm import channel_plan  # noqa: E402
from opkiln_norm.channel_plan import ChannelPlan, Tiling, backward_plan, forward_plan  # noqa: E402
from opkiln_norm.row_plan import power_of_two  # noqa: E402

TUNING = ROOT / "packages/norm/src/opkiln_norm/tuning/channel_sm90.json"
TOLERANCE = {"bf16": 2**-7, "f16": 2**-10, "f32": 2**-18}
MULTIPROCESSORS = 132
LARGE = 2**24  # elements, above which a row is bound by bandwidth
COMPILE_UNTIL_S = 150  # rows measured after so long get no torch.compile baseline


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the pages. flags: affine, running, eval, cl (channels_last), gN (N groups)."""

    op: str
    label: str
    dtype: str
    shape: tuple[int, ...]
    flags: tuple[str, ...]
    bar: float
    page: float

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def backward(self) -> bool:
        return self.op == "batch_norm_backward"

    @property
    def groups(self) -> int:
        return next((int(f[1:]) for f in self.flags if f[0] == "g"), 0)

    @property
    def params(self) -> dict[str, Any]:
        if self.backward:
            return {"training": True, "output_mask": (True, True, True)}
        if self.op == "group_norm":
            return {"num_groups": self.groups, "eps": 1e-5}
        statistics = "training" if self.op == "batch_norm" else "use_input_stats"
        return {statistics: "eval" not in self.flags, "momentum": 0.1, "eps": 1e-5}

    def tensors(self, device: str) -> list[Any]:
        def data() -> torch.Tensor:
            t = torch.randn(self.shape, dtype=DTYPES[self.dtype], device=device)
            return t.to(memory_format=torch.channels_last) if "cl" in self.flags else t

        def channel(dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.rand(self.shape[1], dtype=dtype, device=device) + 0.5

        if self.backward:
            return [data(), data(), channel(), channel() - 1, channel()]
        own = torch.float32 if self.op == "batch_norm" else DTYPES[self.dtype]
        affine = [channel(own) if "affine" in self.flags else None for _ in range(2)]
        running = [channel() if "running" in self.flags else None for _ in range(2)]
        return [data(), *affine] if self.op == "group_norm" else [data(), *running, *affine]


# op, label, dtype, shape, flags, fastest alternative here, best of the pages (us; 0: not known)
ROWS = """
batch_norm_backward large-spatial   f16  4x128x1024x1024 -              1217.729 1206
batch_norm_backward resnet50-fc     f16  32x64           -              1.696 1.95
batch_norm_backward resnet50-stage1 f16  8x64x32x32      -              3.007 3.39
batch_norm_backward resnet50-stage2 f16  4x128x32x32     -              2.528 2.94
batch_norm_backward resnet50-stage3 f16  4x256x28x28     -              3.168 4.19
batch_norm_backward resnet50-stage1 bf16 8x64x32x32      -              3.007 3.33
batch_norm_backward resnet50-stage3 f32  4x256x28x28     -              0 5.47
batch_norm_backward stage1-channels-last f16 8x64x32x32  cl             0 0
group_norm image-g32-affine         bf16 8x128x32x32     affine,g32     3.2 3.3
group_norm image-g32-affine         f16  8x128x32x32     affine,g32     3.2 3.27
group_norm image-g32                bf16 8x128x32x32     g32            5.888 3.17
group_norm image-g32                f16  8x128x32x32     g32            5.088 3.17
group_norm image-channels-last      f16  8x128x32x32     affine,g32,cl  0 0
group_norm tail-spatial-g16-affine  f16  4x128x30x30     affine,g16     3.52 3.91
group_norm tail-spatial-g16         f16  4x128x30x30     g16            4.353 3.17
group_norm wider-channel-g32-affine f16  4x256x28x28     affine,g32     3.472 3.94
group_norm wider-channel-g32        f16  4x256x28x28     g32            4.527 3.49
group_norm wider-channel-g32-affine f32  4x256x28x28     affine,g32     0 4.8
group_norm wider-channel-g32        f32  4x256x28x28     g32            3.328 4.42
instance_norm image-affine          bf16 8x128x32x32     affine         2.736 2.94
instance_norm image-affine          f16  8x128x32x32     affine         2.736 2.91
instance_norm image                 bf16 8x128x32x32     -              2.689 2.88
instance_norm image                 f16  8x128x32x32     -              2.751 2.85
instance_norm image-channels-last   f16  8x128x32x32     affine,cl      0 0
instance_norm tail-spatial-affine   f16  4x64x30x30      affine         2.177 2.37
instance_norm tail-spatial          f16  4x64x30x30      -              2.112 2.24
instance_norm wider-channel-affine  f16  4x256x28x28     affine         2.592 2.72
instance_norm wider-channel         f16  4x256x28x28     -              2.528 2.66
instance_norm wider-channel-affine  f32  4x256x28x28     affine         0 3.42
instance_norm wider-channel         f32  4x256x28x28     -              3.28 3.42
instance_norm image-track-stats     f16  8x128x32x32     running        0 2.94
instance_norm image-eval            f16  8x128x32x32     affine,running,eval 0 2.82
batch_norm large-spatial            f16  4x128x1024x1024 affine,running 746.192 750.4
batch_norm resnet50-fc              f16  32x64           affine,running 1.568 1.82
batch_norm resnet50-stage1          f16  8x64x32x32      affine,running 2.896 2.82
batch_norm resnet50-stage2          f16  4x128x32x32     affine,running 2.432 2.59
batch_norm resnet50-stage3          f16  4x256x28x28     affine,running 3.456 3.49
batch_norm resnet50-stage1          bf16 8x64x32x32      affine,running 2.896 2.75
batch_norm resnet50-stage3          f32  4x256x28x28     affine,running 3.424 4.45
batch_norm resnet-stage3-eval       f16  4x256x28x28     affine,running,eval 2.497 2.66
batch_norm resnet-stem              bf16 8x64x56x56      -              7.68 6.46
batch_norm stage1-channels-last     f16  8x64x32x32      affine,running,cl 0 0
"""


def read_rows(only: str) -> list[Row]:
    rows = []
    for line in ROWS.strip().splitlines():
        op, label, dtype, shape, flags, bar, page = line.split()
        dims = tuple(int(n) for n in shape.split("x"))
        rows.append(Row(op, label, dtype, dims, tuple(flags.split(",")), float(bar), float(page)))
    return [r for r in rows if only in f"{r.op} {r.label} {r.dtype}"]


def plan_for(row: Row, call: Call) -> ChannelPlan:
    return backward_plan(call) if row.backward else forward_plan(call)


def warps_for(elements: int, vector: int, depths: tuple[int, ...]) -> Iterator[int]:
    """Numbers of warps that give each thread so many vectors."""
    for depth in depths:
        warps = elements // (32 * vector * depth)
        if 1 <= warps <= 32:
            yield warps


def resident_tilings(row: Row, plan: ChannelPlan) -> list[Tiling]:
    """Sets in registers: rows a program, columns whole or in chunks, vectors a thread."""
    view, vector = plan.view, 16 // row.itemsize
    full = power_of_two(view.cols)
    fixed = view.pool or view.averaged
    if fixed:
        heights = [power_of_two(view.rows)]
    elif view.steps[0].dense == 0:
        heights = [m for m in (4, 8, 16, 32, 64) if m <= view.rows and m >= view.per_group]
    else:
        heights = [m for m in (1, 2, 4, 8) if m <= view.rows]
    found = []
    for m in heights:
        for parts in (1, 2, 4, 8):
            block, chunks = full // parts, -(-view.cols // max(full // parts, 1))
            if block < 1 or (parts > 1 and chunks == parts and parts > 2):
                continue
            for warps in warps_for(m * block, vector, (1, 2, 4, 8)):
                depth = m * block * chunks // (32 * vector * warps)
                if depth <= 16:
                    found.append(Tiling(m, block, warps, chunks=chunks))
    deep = [t for t in found if t.block_m * t.block_n * t.chunks >= 128 * vector * t.num_warps]
    packed = [replace(t, packed=True) for t in deep if row.itemsize == 2]
    streams = [replace(t, store_cache=".cs") for t in found[:3]]
    return found + packed[:4] + streams


def given_tilings(row: Row, plan: ChannelPlan) -> list[Tiling]:
    """Nothing to reduce: how many rows and columns a program, in how many slices."""
    view, vector = plan.view, 16 // row.itemsize
    full = power_of_two(view.cols)
    found = []
    for m in (1, 2, 4, 8):
        for block in (full, full // 2):
            for warps in warps_for(m * block, vector, (1, 2, 4)):
                items = -(-view.cols // block)
                found += [Tiling(m, block, warps, slices=s) for s in sorted({1, items})]
    return found + [replace(t, evict="evict_first", store_cache=".cs") for t in found[:12]]


def sliced_tilings(row: Row, plan: ChannelPlan) -> list[Tiling]:
    """Two passes, in two kernels or in one that streams."""
    if row.shape[2] < 1024:
        return []
    vector = 16 // row.itemsize
    found = []
    for warps in (4, 8, 16):
        for chunks in (1, 2, 4):
            block = 32 * vector * warps
            for slices in (32, 128, 512):
                found.append(Tiling(1, block, warps, chunks=chunks, slices=slices))
    found += [replace(t, evict="evict_last", store_cache=".cs") for t in found if t.chunks == 4]
    for per_sm, warps, chunks in (
        (1, 16, 1), (1, 16, 2), (1, 16, 4), (1, 32, 1), (1, 32, 2), (1, 32, 4), (2, 8, 4),
        (2, 16, 1), (2, 16, 2), (2, 16, 4), (4, 8, 1), (4, 8, 2), (3, 8, 4), (4, 4, 4), (6, 4, 4),
    ):  # fmt: skip
        t = Tiling(1, 32 * vector * warps, warps, chunks=chunks, slices=1, stream=per_sm)
        found += [t, replace(t, store_cache=".cs")]
    return found


def narrow_tilings(row: Row, plan: ChannelPlan) -> list[Tiling]:
    """Channels side by side in memory, in slices."""
    view, vector = plan.view, 16 // row.itemsize
    if view.steps[0].dense != 0 or view.cols < 1024 or plan.given:
        return []
    found = []
    for m in (32, 64):
        for warps in (4, 8):
            for chunks in (1, 4):
                n = 32 * vector * warps // m
                for slices in (32, 64):
                    if view.cols // (n * chunks) >= slices:
                        found.append(Tiling(m, n, warps, chunks=chunks, slices=slices))
    return found


def candidates(row: Row) -> list[Tiling]:
    """What the rule says first, then what may be better."""
    channel_plan.tuning_rows = tuple
    plan = plan_for(row, Call.of(CATALOGUE[row.op], row.tensors("meta"), row.params, real=False))
    found = [plan.tiling]
    if plan.given:
        found += given_tilings(row, plan)
    elif math.prod(row.shape) >= LARGE:
        found += sliced_tilings(row, plan)
    else:
        if plan.view.count <= 32768:
            found += resident_tilings(row, plan)
        found += narrow_tilings(row, plan)
    return list(dict.fromkeys(found))


def make_call(row: Row, tensors: list[Any], tiling: Tiling, real: bool = True) -> Call:
    """The row's call, with `tiling` as the only row of the tuning table."""
    call = Call.of(CATALOGUE[row.op], tensors, row.params, real=real)
    channel_plan.tuning_rows = tuple
    plan = plan_for(row, call)
    entry = {
        "op": row.op, "itemsize": row.itemsize, "given": plan.given, "view": plan.view.key,
        "label": row.label, "use": dataclasses.asdict(tiling),
    }  # fmt: skip
    channel_plan.tuning_rows = lambda: (entry,)
    return call


def prepare(row: Row, call: Call) -> Callable[..., Any]:
    from opkiln_norm import channel_norm

    return (channel_norm.prepare_backward if row.backward else channel_norm.prepare_forward)(call)


def warm(task: tuple[Row, Tiling]) -> dict[str, Any]:
    """Compile one candidate's kernels into Triton's cache on disk, in a process of its own."""
    from opkiln_norm import channel_norm

    row, tiling = task
    kernels: list[tuple[Any, list[Any], dict[str, Any]]] = []

    def record(kernel: Any, grid: int, options: dict[str, Any]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            mocks = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            kernels.append((kernel, mocks, options))

        return launch

    channel_norm.launcher = record
    channel_norm.multiprocessors = lambda device: MULTIPROCESSORS
    tensors = row.tensors("meta")
    prepare(row, make_call(row, tensors, tiling, real=False))(*tensors)
    found = [
        resources_of(lambda k=k, a=a, o=o: k.warmup(*a, grid=(1,), **o)) for k, a, o in kernels
    ]
    failed = next((f for f in found if "compile_error" in f), None)
    return failed or {k: max(f[k] for f in found) for k in ("registers", "spills")}


def reference(row: Row, tensors: list[Any]) -> list[torch.Tensor]:
    """Outputs and running statistics in float64, some channels at a time."""
    channels = row.shape[1]
    if math.prod(row.shape) < LARGE or (row.op != "batch_norm" and not row.backward):
        return reference_part(row, tensors)
    parts = []
    for c in range(0, channels, 8):
        cut = [None if t is None else t[c : c + 8] if t.ndim == 1 else t[:, c : c + 8]
               for t in tensors]  # fmt: skip
        parts.append([p.cpu() for p in reference_part(row, cut)])
    dims = [1 if p.ndim > 1 else 0 for p in parts[0]]
    return [torch.cat([p[i] for p in parts], d).to(tensors[0].device) for i, d in enumerate(dims)]


def reference_part(row: Row, tensors: list[Any]) -> list[torch.Tensor]:
    wide = [None if t is None else t.double() for t in tensors]
    outs = CATALOGUE[row.op].reference(*wide, **row.params)
    visible = outs if row.backward else outs[:1]
    running = wide[1:3] if "running" in row.flags else []
    dtypes = [DTYPES[row.dtype]] + [torch.float32] * 4
    return [t.to(d) for t, d in zip([*visible, *running], dtypes, strict=False)]


def wrong_elements(row: Row, got: list[torch.Tensor], want: list[torch.Tensor]) -> int:
    """How many elements are off by more than one unit in the last place; NaN is off."""
    wrong = 0
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        # A sum over millions of products is off by its terms' rounding, not by its own.
        count = math.prod(row.shape) // row.shape[1]
        sums = row.backward and k > 0
        rtol = TOLERANCE[row.dtype] if k == 0 else 1e-4 if sums else 1e-5
        atol = 1e-6 * math.sqrt(count) * 4 if sums else 2**-18
        for a, b in zip(g.flatten().split(2**27), w.flatten().split(2**27), strict=True):
            close = (a.float() - b.float()).abs() <= rtol * b.float().abs() + atol
            wrong += close.numel() - int(close.sum())
    return wrong


def check(row: Row, launch: Callable[..., Any], tensors: list[Any], want: list[Any]) -> int:
    """Launch once, running statistics on a copy."""
    given = list(tensors)
    running = [t.clone() for t in tensors[1:3]] if "running" in row.flags else []
    if running:
        given[1:3] = running
    out = launch(*given)
    return wrong_elements(row, [*(out if isinstance(out, tuple) else (out,)), *running], want)


def baselines(row: Row, tensors: list[Any], compiled: bool) -> dict[str, Callable[[], Any]]:
    native = CATALOGUE[row.op].native
    params = row.params
    formula = {
        "batch_norm": torch.nn.functional.batch_norm,
        "instance_norm": torch.nn.functional.instance_norm,
        "group_norm": lambda x, w, b, num_groups, eps: torch.nn.functional.group_norm(
            x, num_groups, w, b, eps
        ),
        "batch_norm_backward": native,
    }[row.op]
    found = {"torch": lambda: formula(*tensors, **params)}
    if compiled and not row.backward:
        torch._dynamo.reset()
        function = torch.compile(lambda *t: formula(*t, **params), dynamic=False)
        found["torch-compile"] = lambda: function(*tensors)
    return found


def measure(
    row: Row, resources: dict[Tiling, Any], compiled: bool, flush: torch.Tensor
) -> dict[str, Any]:
    """Every candidate and baseline of one row: status, median and least time."""
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
            launch = prepare(row, make_call(row, tensors, tiling))
            wrong = check(row, launch, tensors, want)
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
    channel_plan.tuning_rows = tuple
    plan = plan_for(row, Call.of(CATALOGUE[row.op], tensors, row.params))
    view = {"given": plan.given, "view": plan.view.key}
    return dataclasses.asdict(row) | {"itemsize": row.itemsize} | view | found


def changed(use: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tiling that are not at their default."""
    default = dataclasses.asdict(Tiling(0, 0, 0))
    return {k: v for k, v in use.items() if v != default[k]}


def short(use: dict[str, Any]) -> str:
    """A tiling on one line, defaults left out."""
    kept = changed(use)
    size = f"{kept.pop('block_m')}x{kept.pop('chunks', 1)}x{kept.pop('block_n')}"
    flags = [k if v is True else f"{k}={v}" for k, v in kept.items() if k != "num_warps"]
    return " ".join([size, f"w{kept['num_warps']}", *flags])


def write_tuning(results: pathlib.Path) -> None:
    """For each (op, element size, given, view): the best tiling that does not spill."""
    data = json.loads(results.read_text("utf-8"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in data["results"]:
        key = json.dumps([r["op"], r["itemsize"], r["given"], r["view"]])
        groups.setdefault(key, []).append(r)
    entries = []
    for key, found in sorted(groups.items()):
        score: dict[str, list[float]] = {}
        for r in found:
            for c in r["candidates"]:
                if "us" in c and c["spills"] == 0:
                    score.setdefault(json.dumps(c["use"]), []).append(c["us"])
        whole = {use: t for use, t in score.items() if len(t) == len(found)}
        use, times = min(whole.items(), key=lambda item: sum(item[1]))
        figures = {
            f"{r['label']} {r['dtype']}": round(t, 3) for r, t in zip(found, times, strict=True)
        }
        op, itemsize, given, view = json.loads(key)
        measured = {k: data[k] for k in ("gpu", "date", "commit")} | {"us": figures}
        entries.append({
            "op": op, "itemsize": itemsize, "given": given, "view": view,
            "label": found[0]["label"], "use": changed(json.loads(use)), "measured": measured,
        })  # fmt: skip
    table = json.loads(TUNING.read_text("utf-8")) | {"rows": entries}
    write_json(TUNING, table)
    print(f"wrote {len(entries)} rows to {TUNING.relative_to(ROOT)}")


def line(result: dict[str, Any]) -> str:
    timed = sorted((c for c in result["candidates"] if "us" in c), key=lambda c: c["us"])
    name = f"{result['op']:19s} {result['label']:24s} {result['dtype']:4s}"
    if not timed:
        return f"{name} no candidate ran: {result['candidates'][0]['status']}"
    best = timed[0]
    ruled = result["candidates"][0].get("us", float("nan"))
    known = [t for t in (result["bar"], result["page"]) if t]
    ratio = f"{min(known) / best['us']:.2f}" if known else "-"
    others = " ".join(f"{k} {v:.2f}" for k, v in result["baselines"].items())
    bad = len(result["candidates"]) - len(timed)
    return (
        f"{name} us {best['us']:8.2f} rule_us {ruled:8.2f} bar_us {result['bar']:8.2f} "
        f"page_best_us {result['page']:8.2f} ratio {ratio} | {short(best['use'])} "
        f"(low {best['low_us']:.2f}) | {others}" + (f" | {bad} not ok" if bad else "")
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
    resources = warm_all(warm, tasks)
    failed = [(task, found) for task, found in resources.items() if "compile_error" in found]
    print(f"{len(tasks)} candidates compiled in {time.time() - start:.0f} s, {len(failed)} failed")
    print(*failed[:5], sep="\n", flush=True)
    flush = flush_buffer()
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    data = provenance() | {"results": results}
    for row in rows:
        first = row.label not in {r["label"] for r in results if r["op"] == row.op}
        compiled = first and not options.no_compile and time.time() - start < COMPILE_UNTIL_S
        own = {tiling: found for (r, tiling), found in resources.items() if r == row}
        results.append(measure(row, own, compiled, flush))
        write_json(options.out / "channel_norm.json", data)
        torch.cuda.empty_cache()
    print(f"{len(results)} rows in {time.time() - start:.0f} s")
    print(*map(line, results), sep="\n")


if __name__ == "__main__":
    main()
