"""Find the fastest tilings of the backwards of FFT, MHC pre and MHC post on this GPU.

    python3 bench/probes/misc_backward.py --out DIR [--only TEXT] [--seconds N] [--no-compile]

The rows of rows/backward.yaml, and MHC rows of a training step (thousands of tokens, on no page).
Every row in several tilings, checked against the reference in float64 and timed as the bench times
(common.py), beside torch's autograd of the forward's formula, eager and, unless --no-compile, of
the compiled forward (not for 20 rounds of Sinkhorn): the forward has run and is not timed. FFT:
beside torch.fft's inverse. Writes DIR/misc_backward.json. The last lines say for each row the
library's own choice, the best tilings, and the time of the bytes at 4.3 TB/s.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import common
import torch
from misc_backward_rows import ROWS, Row, named
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_misc import fft
from opkiln_misc.sources import source

TOLERANCE = {"bf16": 2**-8, "f16": 2**-11, "f32": 2**-20}
BANDWIDTH = 4.3e6  # bytes a us


def compiles(row: Row) -> bool:
    return row.op != "fft_backward" and row.repeat == 1


def module_of(row: Row) -> Any:
    name = "fft" if row.op == "fft_backward" else row.op
    return importlib.import_module(f"opkiln_misc.{name}")


def warm(task: tuple[Row, str]) -> dict[str, Any]:
    """Compile a candidate's kernels into the cache on disk."""
    row, name = task
    if name == "compiled":
        with contextlib.suppress(Exception):  # the run itself reports what does not compile
            backward_of(row, *row.call("cuda")[1:], True)()
        return {}
    call, tensors, _ = row.call("meta")
    tiling, module = named(row)[name], module_of(row)
    if row.op == "fft_backward":
        for step in fft.plan_for(call, tiling):
            cuda.compile_cubin(source("fft"), "sm_90a", step.macros)
        return {}
    kernels: list[Any] = []

    def record(kernel: Any, grid: Any, options: dict[str, Any], fixed: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            mocks = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            kernels.append((kernel, (*mocks, *fixed), options))

        return launch

    module.launcher = record
    try:
        module.prepare(call, tiling)(*tensors)
    except ValueError as error:  # no such plan
        return {"compile_error": str(error)}
    found = [
        common.resources_of(functools.partial(k.warmup, *a, grid=(1,), **o)) for k, a, o in kernels
    ]
    failed = next((f for f in found if "compile_error" in f), None)
    return failed or {k: max(f[k] for f in found) for k in ("registers", "spills")}


def backward_of(row: Row, tensors: list[torch.Tensor], given: list[torch.Tensor],
                compiled: bool) -> Callable[[], Any]:  # fmt: skip
    """torch's autograd of the forward's formula, which has run."""
    forward = CATALOGUE[row.op.removesuffix("_backward")]
    params = row.forward("meta")[1]
    inputs = [t.clone().requires_grad_() for t in given]
    formula = functools.partial(forward.reference, **params)
    if compiled:
        torch._dynamo.reset()
        formula = torch.compile(lambda *t: forward.reference(*t, **params), dynamic=False)
    outs = formula(*inputs)
    outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o is not None]
    grads = tensors[: len(outs)]
    return lambda: torch.autograd.grad(outs, inputs, grads, retain_graph=True)


def baselines(row: Row, call: Call, tensors: list[torch.Tensor], given: list[torch.Tensor],
              with_compile: bool) -> dict[str, Callable[[], Any]]:  # fmt: skip
    if row.op == "fft_backward":
        native = call.spec.native
        return {"torch": functools.partial(native, *tensors, **vars(call.params))}
    found = {"autograd": backward_of(row, tensors, given, False)}
    if with_compile:
        try:
            found["compiled"] = backward_of(row, tensors, given, True)
        except Exception as error:  # said; the others are still measured
            print(row.op, row.label, f"{type(error).__name__}: {error}"[:200])
    return found


def fault(row: Row, want: list[torch.Tensor], out: Any) -> str:
    """How many elements are off: by their rounding, and 2e-5 of the largest (FFT: 1e-6)."""
    out = out if isinstance(out, tuple) else (out,)
    wrong, worst = 0, 0.0
    for got, w in zip(out, want, strict=True):
        scale = float(w.abs().max())
        relative = 2e-5 if row.dtype in TOLERANCE else 1e-6
        limit = TOLERANCE.get(row.dtype, 0) * w.abs() + relative * scale
        off = (got.to(w.dtype) - w).abs()
        wrong += off.numel() - int((off <= limit).sum())
        worst = max(worst, float(off.max()) / max(scale, 1e-30))
    return f"{wrong} elements wrong, by up to {worst:.2g} of the largest" if wrong else ""


def expected(call: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    wide = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in tensors)
    return list(call.spec.reference(*wide, **vars(call.params)))


def measure(row: Row, resources: dict[str, Any], with_compile: bool, flush: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    call, tensors, given = row.call("cuda")
    every, module = named(row), module_of(row)

    def build(name: str) -> Callable[[], Any]:
        launch = module.prepare(call, every[name])
        return lambda: launch(*tensors)

    runs = {
        n: functools.partial(build, n) for n, r in resources.items() if "compile_error" not in r
    }
    check = functools.partial(fault, row, expected(call, tensors))
    others = baselines(row, call, tensors, given, with_compile)
    found = common.measure(runs, others, check, flush, 15)
    for record in found["candidates"]:
        record |= {"use": dataclasses.asdict(every[record["name"]])} | resources[record["name"]]
    for name, r in resources.items():
        if "compile_error" in r:
            found["candidates"].append({"name": name, "status": r["compile_error"]})
    own = next((c for c in found["candidates"] if c["name"] == "own"), {})
    cost = call.spec.cost(call)
    floor = (cost.bytes_read + cost.bytes_written) / BANDWIDTH
    bar = min(found["baselines"].values(), default=0)
    return found | {"bar": bar, "own_us": own.get("us"), "floor_us": floor}


def last_lines(row: dict[str, Any]) -> str:
    timed = sorted((c["us"], c["name"]) for c in row["candidates"] if "us" in c)
    if not timed:
        return f"{row['op']:18s} {row['label']:20s} {row['dtype']:4s} nothing ran"
    others = " ".join(f"{k} {v:.2f}" for k, v in row["baselines"].items())
    own = row["own_us"] or float("nan")
    more = ", ".join(f"{us:.2f} {name}" for us, name in timed[:4])
    return (f"{row['op']:18s} {row['label']:20s} {row['dtype']:4s} own {own:7.2f} floor "
            f"{row['floor_us']:7.2f} {others} | {more}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains this")
    parser.add_argument("--no-compile", action="store_true", help="no compiled baseline")
    parser.add_argument("--seconds", type=float, default=75, help="no row starts after so long")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    start, rows = time.time(), common.chosen(ROWS, options.only)
    tasks = [(row, name) for row in rows for name in named(row)]
    others = [] if options.no_compile else [(row, "compiled") for row in rows if compiles(row)]
    resources = common.warm_all(warm, [*others, *tasks])
    print(f"{len(resources)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    flush, results = common.flush_buffer(), common.Results(options.out / "misc_backward.json")
    for row in rows:
        passed = time.time() - start
        if passed > options.seconds:
            print("no time for", row.op, row.label, row.dtype)
            continue
        mine = {name: r for (of, name), r in resources.items() if of == row and name != "compiled"}
        with_compile = not options.no_compile and compiles(row)
        try:
            found = measure(row, mine, with_compile, flush)
            results.add(dataclasses.asdict(row), found)
        except Exception as error:  # the other rows still run
            print(row.op, row.label, row.dtype, f"{type(error).__name__}: {error}"[:300])
        torch.cuda.empty_cache()
    results.show()
    for r in results.rows:
        print(last_lines(r)[:300])
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
