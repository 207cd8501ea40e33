"""Find the fastest tilings of the pools' backwards on this GPU.

    python3 bench/probes/pool_backward.py --out DIR [--only TEXT] [--seconds N] [--compile]
    python3 bench/probes/pool_backward.py --write-tuning DIR/pool_backward.json

The pools of rows/backward.yaml and four rows of other layouts, each in several tilings, checked
against the reference in float64 and timed as the bench times (common.py), beside what torch runs in
backward() and, with --compile, Inductor's kernel. Writes DIR/pool_backward.json. The last lines say
for each row the library's own choice, the best tilings, and the time of the bytes at 4.3 TB/s. The
second form puts tilings that are 3 % faster than the rule's into tuning/sm90.json.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import common
import torch
from common import ROOT

sys.path[:0] = [str(ROOT / "core/src"), str(ROOT / "packages/pool/src")]

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_bench import contestants  # noqa: E402
from opkiln_bench.catalogue import load_rows  # noqa: E402
from opkiln_bench.peers import torch_autograd, torch_compile  # noqa: E402
from opkiln_pool import backward_plan, mean_backward, pool_backward  # noqa: E402
from opkiln_pool.backward_plan import BackwardTiling, cells_fit, gradient_of  # noqa: E402
from opkiln_pool.pool_plan import key_of  # noqa: E402

TUNING = ROOT / "packages/pool/src/opkiln_pool/tuning/sm90.json"
TOLERANCE = {"bf16": 2**-8, "f16": 2**-11, "f32": 2**-20}
BANDWIDTH = 4.3e6  # bytes a us
GAIN = 0.97
LAYOUTS = (
    ("max_pool2d_backward", "resnet-stem", "f16", "channels_last"),
    ("avg_pool2d_backward", "vision-3x3-s2", "f16", "channels_last"),
    ("max_pool2d_backward", "resnet-stem", "f16", "expanded"),
    ("mean_pooling_backward", "dense-mainstream", "f16", "expanded"),
)
Tensors = list[torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Row:
    op: str
    label: str
    dtype: str
    layout: str = ""

    def subject(self) -> contestants.Subject:
        """The row of the bench, on the GPU."""
        return contestants.bring(catalogue()[self.op, self.label, self.dtype], torch.device("cuda"))

    def call(self) -> tuple[Call, Tensors]:
        s = self.subject()
        tensors = self.laid_out(s.tensors)
        return Call.of(s.spec, tensors, s.params), tensors

    def laid_out(self, tensors: Tensors) -> Tensors:
        if self.layout == "expanded" and tensors[0] is not None:
            return [tensors[0].flatten()[:1].view([1] * tensors[0].ndim).expand_as(tensors[0]),
                    *tensors[1:]]  # fmt: skip
        if self.layout:
            form = torch.channels_last
            return [t if t is None else t.contiguous(memory_format=form) for t in tensors]
        return tensors

    def planned(self) -> tuple[Call, Tensors]:
        """The call and its tensors without data."""
        row = catalogue()[self.op, self.label, self.dtype]
        given = {
            n: torch.empty(t.shape, dtype=getattr(torch, contestants.TORCH_NAMES[t.dtype]),
                           device="meta")
            for n, t in row.tensors.items()
        }  # fmt: skip
        spec, tensors, params = contestants.canonical(row.function, {**given, **row.args})
        forward = Call.of(spec, tensors, params, needs_grad=True, real=False)
        outs = [m.empty() for m in forward.outputs]
        kept = tensors[1:] if self.op.startswith("mean") else outs[-1:] if "max" in self.op else []
        back = CATALOGUE[self.op]
        rest = params | {"input_shape": tuple(tensors[0].shape), "output_mask": [True]}
        found = self.laid_out([outs[0], *kept])
        return Call.of(back, found, {n: rest[n] for n in back.param_names}, real=False), found


@functools.cache
def catalogue() -> dict[tuple[str, str, str], Any]:
    """The bench's rows of pools' gradients."""
    rows = load_rows(["opkiln_bench.conf"], "bwd")
    return {(r.name, r.label, r.dtype): r for r in rows if "pool" in r.name}


def read_rows(only: str) -> list[Row]:
    return common.chosen([*[Row(*key) for key in catalogue()], *[Row(*r) for r in LAYOUTS]], only)


def mean_tilings(call: Call) -> list[Any]:
    g, p = call.tensors.grad_out, call.params
    longest = min(p.chunk_size, p.input_shape[1])
    own = mean_backward.rule(g.dtype.itemsize, g.shape[2] * g.shape[3], longest)
    found = [own]
    for tokens in (4, 8, 16, 32, 64):
        found += [replace(own, tokens=tokens), replace(own, tokens=tokens, cache=".cs")]
        found.append(replace(own, tokens=tokens, block_n=own.block_n // 2,
                             num_warps=max(own.num_warps // 2, 1)))  # fmt: skip
    return [*found, replace(own, block_n=own.block_n * 2, num_warps=own.num_warps * 2)]


def small_tilings(call: Call, ruled: BackwardTiling) -> list[Any]:
    """Of pools whose windows cover planes or large parts of them."""
    found = [backward_plan.plan_for(call).tiling, ruled, replace(ruled, cache=".cs")]
    if ruled.variant == "bands":
        found += [BackwardTiling("bands", r, w) for r in (1, 2, 4, 8, 16) for w in (1, 2, 4)]
    else:
        many = [max(ruled.block * m // 4, 1) for m in (1, 2, 4, 8, 16)]
        found += [BackwardTiling("spread", m, w) for m in many for w in (1, 2, 4)]
    return [*found, BackwardTiling("gather", 512, 4, static=True)]


def tilings(call: Call) -> list[Any]:
    """The library's own, the rule's, and others of both kernels."""
    if call.spec.name.startswith("mean"):
        return list(dict.fromkeys(mean_tilings(call)))
    b = gradient_of(call)
    ruled = backward_plan.rule(b)
    if ruled.variant in ("bands", "spread"):
        return list(dict.fromkeys(small_tilings(call, ruled)))
    found = [backward_plan.plan_for(call).tiling, ruled, replace(ruled, static=not ruled.static)]
    widths = [v for v in (1, 2, 4, 8) if cells_fit(b.pool, v, backward_plan.channel_lanes(b))]
    found += [BackwardTiling("cells", 128, 4, v=v, static=True) for v in widths]
    if ruled.variant == "cells":
        here = replace(ruled, static=True)
        sizes = ((64, 2), (256, 8), (256, 4), (512, 4))
        found += [replace(here, block=b, num_warps=w) for b, w in sizes]
        found += [replace(here, cache=".cs"), replace(here, block=256, num_warps=8, cache=".cs")]
    blocks = ((64, 2), (128, 4), (256, 4), (512, 4), (256, 8))
    few = blocks[1:3] if ruled.variant == "cells" else blocks
    found += [BackwardTiling("gather", n, w, static=True) for n, w in few]
    return list(dict.fromkeys(found))


def name_of(t: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in dataclasses.asdict(t).items() if v not in ("", False))


def module_of(row: Row) -> Any:
    return mean_backward if row.op.startswith("mean") else pool_backward


def warm(task: tuple[Row, Any]) -> dict[str, Any]:
    """Compile a candidate's kernel into the cache on disk; None: Inductor's."""
    row, tiling = task
    if tiling is None:
        with contextlib.suppress(Exception):  # the run itself reports what does not compile
            call, tensors = row.call()
            torch_compile.prepare(call)(*tensors)
        return {}
    call, tensors = row.planned()
    module, kernels = module_of(row), []

    def record(kernel: Any, grid: Any, options: dict[str, Any], fixed: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            mocks = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            kernels.append((kernel, (*mocks, *fixed), options))

        return launch

    module.launcher = record
    module.prepare(call, tiling)(*tensors)
    ((kernel, args, options),) = kernels
    return common.resources_of(functools.partial(kernel.warmup, *args, grid=(1,), **options))


def baselines(row: Row, call: Call, tensors: Tensors, compiled: bool) -> dict[str, Any]:
    made = {i.op: i for i in torch_autograd.implementations()}
    found = {"autograd": functools.partial(made[row.op].loader()(call), *tensors)}
    if compiled:
        torch._dynamo.reset()
        found["compile"] = functools.partial(torch_compile.prepare(call), *tensors)
    return found


def measure(row: Row, resources: dict[Any, Any], flush: torch.Tensor, compiled: bool) -> dict:
    call, tensors = row.call()
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
    (want,) = call.spec.reference(*wide, **vars(call.params))

    def fault(out: torch.Tensor) -> str:
        wrong = common.wrong_elements(out, want, TOLERANCE[row.dtype])
        return f"{wrong} elements wrong" if wrong else ""

    def build(tiling: Any) -> Callable[[], Any]:
        launch = module_of(row).prepare(call, tiling)
        return lambda: launch(*tensors)

    good = {t: r for t, r in resources.items() if "compile_error" not in r}
    runs = {name_of(t): functools.partial(build, t) for t in good}
    found = common.measure(runs, baselines(row, call, tensors, compiled), fault, flush, 15)
    for record, (tiling, r) in zip(found["candidates"], good.items(), strict=True):
        record |= {"use": dataclasses.asdict(tiling)} | r
    for tiling, r in resources.items():
        if "compile_error" in r:
            found["candidates"].append({"name": name_of(tiling), "status": r["compile_error"]})
    cost = call.spec.cost(call)
    floor = (cost.bytes_read + cost.bytes_written) / BANDWIDTH
    bar = min(found["baselines"].values(), default=0)
    own = found["candidates"][0].get("us")
    return found | {"bar": bar, "page": 0, "own_us": own, "floor_us": floor}


def last_line(r: dict[str, Any]) -> str:
    timed = sorted((c["us"], c["name"]) for c in r["candidates"] if "us" in c)
    own = r["own_us"] or float("nan")
    others = " ".join(f"{k} {v:.2f}" for k, v in r["baselines"].items())
    more = ", ".join(f"{us:.2f} {name}" for us, name in timed[:3])
    name = f"{r['op'].removesuffix('_backward')} {r['label']} {r['dtype']} {r['layout']}"
    return f"{name:48s} own {own:7.2f} floor {r['floor_us']:6.2f} {others} | {more}"


def write_tuning(results: pathlib.Path) -> None:
    """Of each key, the fastest tiling without spills, where it beats the rule by enough."""
    data = json.loads(results.read_text("utf-8"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in data["results"]:
        if not r["layout"] and not r["op"].startswith("mean"):
            call, _ = Row(r["op"], r["label"], r["dtype"]).planned()
            groups.setdefault(json.dumps(key_of(r["op"], gradient_of(call).pool)), []).append(r)
    table = json.loads(TUNING.read_text("utf-8"))
    new = [json.loads(key) for key in groups]
    kept = [r for r in table["rows"] if not any(key.items() <= r.items() for key in new)]
    for key, found in groups.items():
        scores: dict[str, list[float]] = {}
        for c in (c for r in found for c in r["candidates"] if "us" in c and not c["spills"]):
            scores.setdefault(json.dumps(c["use"]), []).append(c["us"])
        whole = {use: us for use, us in scores.items() if len(us) == len(found)}
        best, times = min(whole.items(), key=lambda item: sum(item[1]))
        call, _ = Row(found[0]["op"], found[0]["label"], found[0]["dtype"]).planned()
        ruled = json.dumps(dataclasses.asdict(backward_plan.rule(gradient_of(call))))
        if sum(times) > GAIN * sum(whole.get(ruled, [float("inf")])):
            continue
        us = {r["dtype"]: round(t, 3) for r, t in zip(found, times, strict=True)}
        measured = {k: data[k] for k in ("gpu", "date", "commit")} | {"us": us}
        use = {k: v for k, v in json.loads(best).items() if v not in ("", False)}
        kept.append(json.loads(key) | {"label": found[0]["label"], "use": use,
                                       "measured": measured})  # fmt: skip
    common.write_json(TUNING, table | {"rows": kept})
    print(f"{len(kept)} rows in {TUNING.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--write-tuning", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains this")
    parser.add_argument("--compile", action="store_true", help="torch.compile beside it")
    parser.add_argument("--seconds", type=float, default=80, help="no row starts after so long")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    start, rows = time.time(), read_rows(options.only)
    tasks = [(row, t) for row in rows for t in tilings(row.planned()[0])]
    others = [(row, None) for row in rows if options.compile]
    resources = common.warm_all(warm, [*others, *tasks])
    print(f"{len(resources)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    flush, results = common.flush_buffer(), common.Results(options.out / "pool_backward.json")
    for row in rows:
        if time.time() - start > options.seconds:
            print("no time for", row)
            continue
        mine = {t: r for (of, t), r in resources.items() if of == row and t is not None}
        try:
            results.add(dataclasses.asdict(row), measure(row, mine, flush, options.compile))
        except Exception as error:  # the other rows still run
            print(row, f"{type(error).__name__}: {error}"[:300], flush=True)
        torch.cuda.empty_cache()
    results.show()
    for r in results.rows:
        print(last_line(r)[:300])
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
