"""Find the fastest tiling of group_norm_backward and instance_norm_backward on this GPU.

    python3 bench/probes/channel_backward.py --out DIR [--only TEXT] [--compile] [--seconds N]

Every row in several tilings, checked against the reference in float64 and timed as the bench times
(common.py), beside torch's autograd of the same norm, aten's group norm backward with statistics of
the input's dtype, and, with --compile, torch.compile of the formula. Writes
DIR/channel_backward.json; rows that --seconds leave no time for are named.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
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

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_norm import channel_plan, channel_planes_launch  # noqa: E402
from opkiln_norm.channel_plan import ChannelPlan, Tiling, planes_plan  # noqa: E402

TOLERANCE = {"bf16": 2**-8, "f16": 2**-11, "f32": 2**-18}
ALL = (True, True, True)
RESIDENT_WARPS = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Row:
    """groups 0: instance_norm. flags: cl (channels_last), eval (given statistics)."""

    op: str
    label: str
    dtype: str
    shape: tuple[int, ...]
    groups: int
    flags: tuple[str, ...]
    bar: float = 0
    page: float = 0

    @property
    def params(self) -> dict[str, Any]:
        own = {"num_groups": self.groups} if self.groups else {
            "use_input_stats": "eval" not in self.flags
        }  # fmt: skip
        return own | {"output_mask": ALL}

    def tensors(self, device: str) -> list[torch.Tensor]:
        """grad_out, input, weight, mean and rstd, these two of the input."""
        dtype, (n, c) = DTYPES[self.dtype], self.shape[:2]
        g, x = (torch.randn(self.shape, dtype=dtype, device=device) for _ in range(2))
        groups = x.float().reshape(n, self.groups or c, -1)
        rstd = (groups.var(2, correction=0) + 1e-5).rsqrt()
        w = torch.rand(c, device=device).to(dtype) + 0.5
        if "cl" in self.flags:
            g, x = (t.contiguous(memory_format=torch.channels_last) for t in (g, x))
        return [g, x, w, groups.mean(2), rstd]

    def call(self, tensors: list[torch.Tensor], real: bool = True) -> Call:
        return Call.of(CATALOGUE[self.op], tensors, self.params, real=real)


# label, dtype, shape, groups (0: instance norm), flags. No page gives times for these.
ROWS = """
unet-320     f16  2x320x64x64    32 -
unet-320-cl  f16  2x320x64x64    32 cl
unet-640     f16  2x640x32x32    32 -
unet-1280    f16  2x1280x16x16   32 -
unet-2560    f16  2x2560x8x8     32 -
vae-512      f16  1x512x128x128  32 -
vae-128      bf16 1x128x512x512  32 -
vae-128-cl   bf16 1x128x512x512  32 cl
image        f16  8x128x32x32    32 -
image        bf16 8x128x32x32    32 -
wider        f32  4x256x28x28    32 -
tail         f16  4x128x30x30    16 -
image        f16  8x128x32x32    0  -
image-eval   f16  8x128x32x32    0  eval
wider        f16  4x256x28x28    0  -
wider        f32  4x256x28x28    0  -
tail         f16  4x64x30x30     0  -
style        f16  4x64x256x256   0  -
style-cl     f16  4x64x256x256   0  cl
"""


def read_rows(only: str) -> list[Row]:
    rows = []
    for text in ROWS.strip().splitlines():
        label, dtype, shape, groups, flags = text.split()
        op = "group_norm_backward" if int(groups) else "instance_norm_backward"
        dims = tuple(int(n) for n in shape.split("x"))
        rows.append(Row(op, label, dtype, dims, int(groups), tuple(flags.split(","))))
    return common.chosen(rows, only)


def plans(row: Row) -> dict[str, ChannelPlan]:
    """The library's own plan, and others of its kind; a small group in slices too."""
    call = row.call(row.tensors("meta"), real=False)
    own = planes_plan(call)
    t = own.tiling
    found = {"own": own}
    if not t.slices:
        changed = [dataclasses.replace(t, num_warps=w) for w in RESIDENT_WARPS]
        changed += [dataclasses.replace(t, packed=not t.packed)] * (row.dtype != "f32")
        changed += [dataclasses.replace(t, store_cache=".cs")]
        found |= {f"resident {name_of(o)}": dataclasses.replace(own, tiling=o) for o in changed}
        resident, channel_plan.resident = channel_plan.resident, lambda *args: False
        own = planes_plan(call)
        channel_plan.resident = resident
        return found | {"sliced": own}
    for slices in (max(t.slices // 2, 1), t.slices * 2, t.slices * 4):
        for warps in (4, 8):
            use = dataclasses.replace(t, slices=min(slices, own.items), num_warps=warps)
            found[f"sliced {name_of(use)}"] = dataclasses.replace(own, tiling=use)
    if t.chunks > 1:
        use = dataclasses.replace(t, chunks=t.chunks // 2)
        found[f"sliced {name_of(use)}"] = dataclasses.replace(own, tiling=use)
    return found


def name_of(t: Tiling) -> str:
    extra = f"{' packed' * t.packed}{' ' * bool(t.store_cache)}{t.store_cache}"
    return f"{t.block_m}x{t.block_n}x{t.chunks} w{t.num_warps} s{t.slices}{extra}"


def prepare(plan: ChannelPlan, call: Call) -> Callable[..., Any]:
    launcher: Any = channel_planes_launch
    launcher.planes_plan = lambda call: plan
    return launcher.prepare(call)


def warm(task: tuple[Row, str]) -> dict[str, Any]:
    """Compile a candidate's kernels into the cache on disk; for "compile", torch.compile's."""
    row, name = task
    if name == "compile":
        with contextlib.suppress(Exception):  # the run itself reports what does not compile
            baselines(row, row.tensors("cuda"), True)["torch-compile"]()
        return {}
    tensors, kernels = row.tensors("meta"), []

    def record(kernel: Any, grid: int, options: dict[str, Any]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            mocks = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            kernels.append((kernel, mocks, options))

        return launch

    mocked: Any = channel_planes_launch
    mocked.launcher = record
    prepare(plans(row)[name], row.call(tensors, real=False))(*tensors)
    found = [
        common.resources_of(functools.partial(k.warmup, *a, grid=(1,), **o)) for k, a, o in kernels
    ]
    failed = next((f for f in found if "compile_error" in f), None)
    return failed or {k: max(f[k] for f in found) for k in ("registers", "spills")}


def baselines(row: Row, tensors: list[torch.Tensor], compiled: bool) -> dict[str, Any]:
    g, x, w, mean, rstd = tensors
    n, c, *spatial = row.shape
    leaf, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
    bias = torch.zeros_like(w).requires_grad_()
    if row.groups:
        out = torch.nn.functional.group_norm(leaf, row.groups, weight, bias, 1e-5)
    else:
        own = "eval" not in row.flags
        means, variances = (None, None) if own else (mean.mean(0), rstd.mean(0))
        out = torch.nn.functional.instance_norm(leaf, means, variances, weight, bias, own)
    found: dict[str, Any] = {
        "torch": lambda: torch.autograd.grad(out, (leaf, weight, bias), g, retain_graph=True)
    }
    if row.groups:
        same = (mean.to(x.dtype), rstd.to(x.dtype))
        sizes = (n, c, math.prod(spatial), row.groups, ALL)
        found["aten"] = lambda: torch.ops.aten.native_group_norm_backward(g, x, *same, w, *sizes)
    if compiled:
        torch._dynamo.reset()
        formula = functools.partial(CATALOGUE[row.op].reference, **row.params)
        function = torch.compile(lambda *t: formula(*t), dynamic=False)
        found["torch-compile"] = lambda: function(*tensors)
    return found


def fault(row: Row, want: list[torch.Tensor], out: Any) -> str:
    """How many elements are off. A sum's error is that of its terms, not its own."""
    wrong = 0
    for k, (got, w) in enumerate(zip(out, want, strict=True)):
        terms = math.prod(row.shape) / row.shape[1] if k else 1
        close = (got.double() - w).abs() <= TOLERANCE[row.dtype] * w.abs() + 4e-6 * terms**0.5
        wrong += close.numel() - int(close.sum())
    return f"{wrong} elements wrong" if wrong else ""


def measure(row: Row, resources: dict[str, Any], compiled: bool, flush: Any) -> dict[str, Any]:
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
    found = common.measure(runs, baselines(row, tensors, compiled), check, flush)
    for record in found["candidates"]:
        plan = every[record["name"]]
        record |= {"use": dataclasses.asdict(plan.tiling), "view": plan.view.key}
        record |= resources[record["name"]]
    found["candidates"] += [
        {"name": n, "status": r["compile_error"]}
        for n, r in resources.items()
        if "compile_error" in r
    ]
    own: dict[str, Any] = next((c for c in found["candidates"] if c["name"] == "own"), {})
    return found | {"bar": min(found["baselines"].values(), default=0), "own_us": own.get("us")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains this")
    parser.add_argument("--compile", action="store_true", help="torch.compile's baseline too")
    parser.add_argument("--seconds", type=float, default=60, help="no row starts after so long")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # of each of many processes
    start, rows = time.time(), read_rows(options.only)
    tasks = [(row, name) for row in rows for name in plans(row)]
    compiled = [(row, "compile") for row in rows if options.compile]
    resources = common.warm_all(warm, [*compiled, *tasks])
    print(f"{len(resources)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    flush, results = common.flush_buffer(), common.Results(options.out / "channel_backward.json")
    for row in rows:
        if time.time() - start > options.seconds:
            print("no time for", row.op, row.label, row.dtype)
            continue
        mine = {name: r for (of, name), r in resources.items() if of == row and name != "compile"}
        try:
            results.add(dataclasses.asdict(row), measure(row, mine, options.compile, flush))
        except Exception as error:  # the other rows still run
            print(row.op, row.label, row.dtype, f"{type(error).__name__}: {error}"[:300])
        torch.cuda.empty_cache()
    results.show()
    for r in results.rows:
        if r["own_us"]:
            print(f"{r['op']:24s} {r['label']:12s} {r['dtype']:4s} own {r['own_us']:.2f} us")
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
