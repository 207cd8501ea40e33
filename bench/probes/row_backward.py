"""Find the fastest tiling of the row norms' backward on this GPU.

    python3 bench/probes/row_backward.py --out DIR [--only TEXT] [--seconds N] [--no-compile]

Every row in several tilings, checked against the reference in float64 and timed as the bench times
(common.py), beside torch's own backward (for ops that have none the formula, eagerly),
torch.compile of the formula unless --no-compile, and quack's and liger's where they are installed.
Writes DIR/row_backward.json; rows that --seconds leave no time for are named. The last lines say
for each row the library's own choice, the best tiling, and the time of the bytes at 4.8 TB/s.
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
from common import DTYPES, ROOT

sys.path[:0] = [str(ROOT / "core/src"), str(ROOT / "packages/norm/src")]

from opkiln.device import cuda  # noqa: E402
from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_bench.peers import liger, quack  # noqa: E402
from opkiln_norm import row_backward_launch, row_backward_ring  # noqa: E402
from opkiln_norm.row_backward_plan import BackwardPlan, Tiling, plan_for  # noqa: E402
from opkiln_norm.row_backward_ring import RingTiling  # noqa: E402
from opkiln_norm.row_plan import multiprocessors  # noqa: E402

TOLERANCE = {"bf16": 2**-8, "f16": 2**-11, "f32": 2**-18}
GRADIENTS = {"rms_norm": 2, "layer_norm": 3, "fused_add_rms_norm": 2, "fused_add_layer_norm": 3,
             "ada_layer_norm": 3, "ada_layer_norm_zero": 4}  # fmt: skip
BANDWIDTH = 4.8e6  # bytes a us of an H200
RING_ONLY = bool(os.environ.get("PROBE_RING_ONLY"))  # of Triton only the rule's
COMPILE_UNTIL_S = 45  # rows measured after so long get no torch.compile baseline
NORM_SHAPES = (
    (2048, 4096), (2048, 8192), (2048, 16384), (32768, 1024), (32768, 4096),  # the bench's
    (4096, 4096), (8192, 8192), (16384, 2048), (128, 4096),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """groups: rows of scale, shift and gate; 0: one for each row of the input."""

    name: str
    label: str
    dtype: str
    rows: int
    n: int
    groups: int = 0
    bar: float = 0
    page: float = 0

    @property
    def op(self) -> str:
        return f"{self.name}_backward"

    @property
    def params(self) -> dict[str, Any]:
        mask = {"output_mask": [True] * GRADIENTS[self.name]}
        if "ada" in self.name:
            return mask | {"scale_offset": 1.0}
        eps = {"eps": 1e-5} if "fused" in self.name else {}
        return mask | eps | {"normalized_shape": (self.n,)}

    def tensors(self, device: str) -> list[torch.Tensor]:
        """In the spec's order; mean and rstd those of x."""
        shape = (self.groups, self.rows // self.groups, self.n) if self.groups else (
            self.rows, self.n
        )  # fmt: skip
        make = functools.partial(torch.randn, dtype=DTYPES[self.dtype], device=device)
        g, x = make(shape), make(shape)
        if "fused" in self.name:
            return [g, make(shape), x, make(self.n)]
        var, mean = torch.var_mean(x.float(), -1, correction=0)
        if "ada" in self.name:
            own = (self.groups, 1, self.n) if self.groups else shape
            return [g, x, *(make(own) for _ in range(3)), mean, (var + 1e-5).rsqrt()]
        if self.name == "rms_norm":
            return [g, x, make(self.n), (x.float().square().mean(-1) + 1e-5).rsqrt()]
        return [g, x, make(self.n), mean, (var + 1e-5).rsqrt()]

    def call(self, tensors: list[torch.Tensor], real: bool = True) -> Call:
        return Call.of(CATALOGUE[self.op], tensors, self.params, real=real)


def read_rows(only: str) -> list[Row]:
    rows = [
        Row(op, f"{m}x{n}", "bf16", m, n)
        for m, n in NORM_SHAPES
        for op in ("rms_norm", "layer_norm")
    ]
    rows += [
        Row(op, "8192x4096", "bf16", 8192, 4096)
        for op in ("fused_add_rms_norm", "fused_add_layer_norm", "ada_layer_norm_zero")
    ]
    rows += [Row("fused_add_rms_norm", f"2048x{n}", "bf16", 2048, n) for n in (4096, 8192, 16384)]
    rows += [Row(op, "4096x8192", "f32", 4096, 8192) for op in ("rms_norm", "layer_norm")]
    rows.append(Row("ada_layer_norm_zero", "8x1024x4096", "bf16", 8192, 4096, groups=8))
    return [row for row in rows if any(row in common.chosen(rows, o) for o in only.split(","))]


def name_of(t: Tiling | RingTiling) -> str:
    if isinstance(t, RingTiling):
        place = {1: "", 2: " shared"}[t.weight_at]
        return f"ring {t.threads}x{t.vectors} r{t.resident} s{t.stages}{place}"
    flags = f"{' kept' * t.kept}{' packed' * t.packed}{' again' * t.again}{' wide' * t.wide}"
    return (
        f"{t.block_m}x{t.block_n}x{t.chunks} w{t.num_warps} p{t.programs_per_sm} s{t.stages}{flags}"
    )


def rescaled(t: Tiling, factor: float) -> Tiling:
    """With so many times the warps, as wide a tile, and as many warps an SM."""
    warps = int(t.num_warps * factor)
    chunks = -(-t.chunks * t.num_warps // warps)
    programs = max(int(t.programs_per_sm / factor), 1)
    block_n = t.block_n * t.chunks // chunks
    return dataclasses.replace(
        t, num_warps=warps, chunks=chunks, block_n=block_n, programs_per_sm=programs
    )


def tilings(own: Tiling) -> list[Tiling]:
    """The rule's, and others around it."""
    change = functools.partial(dataclasses.replace, own)
    found = [own, *[change(stages=s) for s in (1, 2, 3, 4) if not own.again]]
    found += [change(programs_per_sm=p) for p in {max(own.programs_per_sm // 2, 1),
              own.programs_per_sm * 2}]  # fmt: skip
    for factor in (0.5, 2):
        if own.block_m == 1 and 2 <= own.num_warps * factor <= 32:
            other = rescaled(own, factor)
            found += [dataclasses.replace(other, stages=s) for s in (1, 3)[: 2 - own.again]]
    found.append(change(again=not own.again, kept=own.again, stages=1))
    found.append(change(packed=not own.packed))
    if own.block_m > 1:
        found += [change(block_m=own.block_m // 2), change(block_m=own.block_m * 2)]
    if own.again:
        found.append(change(wide=True, block_n=2048, chunks=1, num_warps=8, programs_per_sm=4,
                            stages=3, again=False, kept=True, packed=False))  # fmt: skip
        found += [change(again=False, block_n=32 * w * 8, num_warps=w, kept=k, stages=s,
                         chunks=own.chunks * own.num_warps // w, packed=p)
                  for w, k, s, p in ((32, True, 3, True), (32, True, 2, True), (32, False, 2, True),
                                     (32, True, 3, False), (16, True, 3, True))]  # fmt: skip
    return list(dict.fromkeys(found))


def ring_tilings(row: Row, plan: BackwardPlan) -> list[RingTiling]:
    """CTAs of 2 to 32 warps, as many an SM as registers allow, with as many stages as fit."""
    call = row.call(row.tensors("meta"), real=False)
    if not row_backward_ring.serves(call, plan):
        return []
    residual, found = "fused" in row.name, []
    need = -(-row.n * DTYPES[row.dtype].itemsize // 16)
    for vectors in (1, 2, 4):
        threads = -(-need // (32 * vectors)) * 32
        for resident in (1, 2, 3, 4, 6, 8):
            if not 64 <= threads <= 1024 or threads * resident * vectors > 2048:
                continue
            for weight_at in (1, 2):
                fits = [RingTiling(threads, vectors, s, resident, weight_at) for s in (1, 2, 3, 4)]
                fits = [
                    t for t in fits if resident * (t.shared_bytes(residual, 16) + 2048) < 233472
                ]
                found += fits[-1:] if weight_at == 1 or threads * vectors == 2048 else []
    return found


def plans(row: Row) -> dict[str, BackwardPlan]:
    plan = plan_for(row.call(row.tensors("meta"), real=False))
    triton_ones = [plan.tiling] if RING_ONLY else tilings(plan.tiling)
    every = [*triton_ones, *ring_tilings(row, plan)]
    return {name_of(t): dataclasses.replace(plan, tiling=t) for t in every}


def prepare(plan: BackwardPlan, call: Call) -> Callable[..., Any]:
    launch: Any = row_backward_launch
    launch.plan_for = lambda call: plan
    by_ring: Any = row_backward_ring
    by_ring.rule = lambda call, p: p.tiling if isinstance(p.tiling, RingTiling) else None
    return launch.prepare(call)


def warm(task: tuple[Row, str]) -> dict[str, Any]:
    """Compile a candidate's kernels into the cache on disk; for "compile", torch.compile's."""
    row, name = task
    if name == "compile":
        with contextlib.suppress(Exception):  # the run itself reports what does not compile
            compiled(row)(*row.tensors("cuda"))
        return {}
    tensors, kernels = row.tensors("meta"), []
    if name.startswith("ring"):
        call, plan = row.call(tensors, real=False), plans(row)[name]
        given: Any = plan.tiling
        arguments = row_backward_ring.macros(call, plan, given)
        cuda.compile_cubin(row_backward_ring.source(), "sm_90a", arguments)
        return {}

    def record(kernel: Any, grid: Any, options: dict[str, Any], fixed: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            mocks = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            kernels.append((kernel, (*mocks, *fixed), options))

        return launch

    mocked: Any = row_backward_launch
    mocked.launcher = record
    count = multiprocessors(torch.device("cuda", 0))  # says what the programs' sums are written to
    mocked.multiprocessors = lambda device: count
    prepare(plans(row)[name], row.call(tensors, real=False))(*tensors)
    found = [
        common.resources_of(functools.partial(k.warmup, *a, grid=(1,), **o)) for k, a, o in kernels
    ]
    failed = next((f for f in found if "compile_error" in f), None)
    return failed or {k: max(f[k] for f in found) for k in ("registers", "spills")}


def compiled(row: Row) -> Callable[..., Any]:
    formula = functools.partial(CATALOGUE[row.op].reference, **row.params)
    return torch.compile(lambda *t: formula(*t), dynamic=False)


def baselines(
    row: Row, call: Call, tensors: list[torch.Tensor], with_compile: bool
) -> dict[str, Callable[[], Any]]:
    spec = CATALOGUE[row.op]
    found: dict[str, Callable[[], Any]] = {
        "torch": functools.partial(spec.native or spec.reference, *tensors, **row.params)
    }
    for peer in (quack, liger):
        for i in peer.implementations():
            if i.op != row.op or i.supports(call) is not None:
                continue
            try:
                own = [t.clone() for t in tensors]  # Liger writes over the gradient that comes in
                found[i.backend] = functools.partial(i.loader()(call), *own)
            except Exception as error:  # said; the others are still measured
                print(i.backend, row.op, row.label, f"{type(error).__name__}: {error}"[:200])
    if with_compile:
        torch._dynamo.reset()
        found["torch-compile"] = functools.partial(compiled(row), *tensors)
    return found


def fault(row: Row, want: list[torch.Tensor], out: Any) -> str:
    """How many elements are off. A sum's error is that of its terms, not its own."""
    wrong = 0
    for got, w in zip(out, want, strict=True):
        terms = row.rows * row.n / w.numel()
        limit = TOLERANCE[row.dtype] * w.abs() + 4e-6 * terms**0.5 * (1 + w.abs().mean())
        wrong += w.numel() - int(((got.double() - w).abs() <= limit).sum())
    return f"{wrong} elements wrong" if wrong else ""


def measure(row: Row, resources: dict[str, Any], with_compile: bool, flush: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    want = CATALOGUE[row.op].reference(*(t.double() for t in tensors), **row.params)
    call, every = row.call(tensors), plans(row)

    def build(name: str) -> Callable[[], Any]:
        launch = prepare(every[name], call)
        return lambda: launch(*tensors)

    runs = {
        n: functools.partial(build, n) for n, r in resources.items() if "compile_error" not in r
    }
    check = functools.partial(fault, row, want)
    found = common.measure(runs, baselines(row, call, tensors, with_compile), check, flush, 15)
    for record in found["candidates"]:
        record |= {"use": dataclasses.asdict(every[record["name"]].tiling)}
        record |= resources[record["name"]]
    found["candidates"] += [
        {"name": n, "status": r["compile_error"]}
        for n, r in resources.items()
        if "compile_error" in r
    ]
    own = next((c for c in found["candidates"] if c["name"] == next(iter(every))), {})
    cost = CATALOGUE[row.op].cost(call)
    floor = (cost.bytes_read + cost.bytes_written) / BANDWIDTH
    return found | {
        "bar": min(found["baselines"].values(), default=0), "own_us": own.get("us"),
        "floor_us": floor,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument(
        "--only", default="", help="rows whose 'op label dtype' contains one of these"
    )
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile baseline")
    parser.add_argument("--seconds", type=float, default=65, help="no row starts after so long")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # of each of many processes
    start, rows = time.time(), read_rows(options.only)
    tasks = [(row, name) for row in rows for name in plans(row)]
    others = [] if options.no_compile else [(row, "compile") for row in rows]
    resources = common.warm_all(warm, [*others, *tasks])
    print(f"{len(resources)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    flush, results = common.flush_buffer(), common.Results(options.out / "row_backward.json")
    for row in rows:
        passed = time.time() - start
        if passed > options.seconds:
            print("no time for", row.op, row.label, row.dtype)
            continue
        mine = {name: r for (of, name), r in resources.items() if of == row and name != "compile"}
        with_compile = not options.no_compile and passed < COMPILE_UNTIL_S
        try:
            found = measure(row, mine, with_compile, flush)
            results.add(dataclasses.asdict(row) | {"op": row.op}, found)
        except Exception as error:  # the other rows still run
            print(row.op, row.label, row.dtype, f"{type(error).__name__}: {error}"[:300])
        torch.cuda.empty_cache()
    results.show()
    for r in results.rows:
        if r["own_us"]:
            best = min((c["us"], c["name"]) for c in r["candidates"] if "us" in c)
            print(f"{r['op']:29s} {r['label']:12s} own {r['own_us']:7.2f} best {best[0]:7.2f} "
                  f"floor {r['floor_us']:7.2f} bar {r['bar']:7.2f} | {best[1]}")  # fmt: skip
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
