"""Measure every candidate tiling of the convolution kernels on the rows of the benchmark pages.

    python bench/probes/conv.py --out DIR [--only SUBSTRING] [--budget SECONDS]
    python bench/probes/conv.py --out DIR --second [--only SUBSTRING] [--budget SECONDS]
    python bench/probes/conv.py --write-tuning DIR/conv.json

The first writes DIR/conv.json and prints one line a geometry, the second only times the table's
tiling, the rule's and those of conv_second.py; the third puts the fastest of that file into
packages/conv/src/opkiln_conv/tuning/sm90.json. See common.py for how it measures. A geometry is
timed once, in the dtype of its row without bias: bias and bf16 choose no other tiling.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
import time
from typing import Any

import common
import torch

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/conv/src")]

from conv_first import first_run  # noqa: E402
from conv_second import second  # noqa: E402
from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_conv import conv_plan, patch, tilings  # noqa: E402
from opkiln_conv.geometry import Geometry, geometry_of  # noqa: E402
from opkiln_conv.patch import PatchTiling  # noqa: E402
from opkiln_conv.sources import source  # noqa: E402
from opkiln_conv.tilings import Tiling  # noqa: E402

TUNING = common.ROOT / "packages/conv/src/opkiln_conv/tuning/sm90.json"
TOLERANCE = {"bf16": 2**-7, "f16": 2**-9}  # of the output's RMS, or of the value where larger
ITERATIONS = 15

# label, dtype, input, weight, fastest alternative here, best of the pages (us), window: s stride,
# p padding, d dilation, g groups; one number stands for every dim.
ROWS = """
classifier-1x1              f16  1x512x7x7        2048x512x1x1     6.05  7.2
late-stage-1x1              f16  1x256x14x14      1024x256x1x1     5.28  4.99
bottleneck-expand-1x1       f16  2x128x28x28      512x128x1x1      3.28  3.81
bottleneck-reduce-1x1       f16  2x512x28x28      128x512x1x1      3.49  4.32
resnet-1x1                  f16  2x64x56x56       256x64x1x1       3.30  4.0
mobilenetv2-depthwise       f16  1x32x56x56       32x1x3x3         2.24  2.81   p=1 g=32
stem-3x3-s2                 f16  1x3x112x112      64x3x3x3         3.30  3.49   s=2 p=1
resnext-grouped-3x3         f16  1x128x28x28      256x4x3x3        4.67  4.13   p=1 g=32
resnet-3x3                  f16  2x64x56x56       64x64x3x3        9.09  11.6   p=1
stride2                     bf16 1x128x28x28      128x128x3x3      9.25  11.1   s=2 p=1
stage-transition-3x3-s2     f16  1x128x56x56      256x128x3x3      10.46 13.4   s=2 p=1
midres-5x5-s1               f16  1x64x56x56       128x64x5x5       13.33 16.0   p=2
stage-transition-5x5-s2     f16  1x128x56x56      256x128x5x5      17.44 22.2   s=2 p=2
deeplabv3-aspp-3x3-rate12   f16  1x2048x32x32     256x2048x3x3     75.2  88.9   p=12 d=12
highres-3x3-s1              f16  1x256x112x112    512x256x3x3      68.70 79.0   p=1
highres-3x3-s1-bias         f16  1x256x112x112    512x256x3x3      68.70 79.0   p=1 b=1
encodec-init                f16  1x1x24000        32x1x7           4.67  3.55
wav2vec2-layer1             f16  1x1x16000        512x1x10         6.69  6.66   s=5
encodec-deep                f16  1x128x600        256x128x10       13.47 12.0
whisper-large-conv1         f16  1x80x3000        1280x80x3        18.64 47.7
3d-resnext-grouped-k3       f16  1x64x8x28x28     128x2x3x3x3      27.68 15.7   p=1 g=32
r3d-stem-k3-s1              f16  1x3x16x112x112   64x3x3x3x3       67.97 22.9   p=1
video-stage-downsample-k3-s2 f16 1x64x8x56x56     128x64x3x3x3     18.48 26.3   s=2 p=1
3d-unet-aspp-3x3x3-rate6    f16  1x256x8x16x16    256x256x3x3x3    31.14 37.6   p=6 d=6
unet-encoder-k3-s1          bf16 1x32x32x64x64    64x32x3x3x3      65.73 115.3  p=1
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """A geometry of the pages. bar, page: us to be beaten."""

    label: str
    dtype: str
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    bar: float
    page: float
    options: tuple[str, ...]
    bias: bool = False

    @property
    def op(self) -> str:
        return f"conv{len(self.shape) - 2}d"

    @property
    def params(self) -> dict[str, Any]:
        v = {k: int(n) for k, n in (o.split("=") for o in self.options)}
        n = len(self.shape) - 2
        return {
            "stride": (v.get("s", 1),) * n,
            "padding": (v.get("p", 0),) * (2 * n),
            "dilation": (v.get("d", 1),) * n,
            "groups": v.get("g", 1),
            "allow_tf32": False,
        }

    @property
    def scale(self) -> float:
        """Of the output, for unit normal input and weight."""
        return math.prod(self.weight[1:]) ** 0.5

    def tensors(self, device: str) -> list[Any]:
        dtype = common.DTYPES[self.dtype]
        shapes = (self.shape, self.weight)
        tensors = [torch.randn(s, device=device).to(dtype) for s in shapes]
        if not self.bias:
            return [*tensors, None]
        return [*tensors, (torch.randn(self.weight[0], device=device) * self.scale).to(dtype)]

    def call(self, tensors: list[Any], real: bool = True) -> Call:
        return Call.of(CATALOGUE[self.op], tensors, self.params, real=real)

    def geometry(self) -> Geometry:
        return geometry_of(self.call(self.tensors("meta"), real=False))


def read_rows(only: str) -> list[Row]:
    rows = []
    for line in ROWS.strip().splitlines():
        label, dtype, shape, weight, bar, page, *options = line.split()
        x, w = (tuple(map(int, s.split("x"))) for s in (shape, weight))
        rows.append(
            Row(label, dtype, x, w, float(bar), float(page), tuple(options), "b=1" in options)
        )
    return common.chosen(rows, only)


def candidates(row: Row, again: bool) -> list[Tiling | PatchTiling]:
    """Of the first run; or again: the table's, the rule's and those of conv_second.py."""
    g = row.geometry()
    if not again:
        return [*first_run(g)]
    known = tilings.tuned(g, False)
    found = [*([known[0]] if known else []), tilings.rule(g), *second(row.label)]
    return [t for t in dict.fromkeys(found) if fits(g, t)]


def fits(g: Geometry, t: Tiling | PatchTiling) -> bool:
    return patch.can_use(g, t) if isinstance(t, PatchTiling) else tilings.can_use(g, t)


def use(tiling: Tiling | PatchTiling) -> None:
    """Make every plan use this tiling."""
    vars(conv_plan)["tuned"] = lambda *_: (tiling, "probe")


def warm(task: tuple[Row, Tiling | PatchTiling]) -> dict[str, Any]:
    """Compile one candidate into Triton's cache on disk, or that of CUDA sources."""
    from opkiln_conv.launch import KERNELS, PACK_OPTIONS, options_of
    from opkiln_conv.packed import pack_kernel

    row, tiling = task
    use(tiling)
    dtype = common.DTYPES[row.dtype]
    plan = conv_plan.plan_for(row.call(row.tensors("meta"), real=False))
    if isinstance(plan, patch.PatchPlan) or isinstance(tiling, PatchTiling):
        return warm_patch(plan)
    if plan.pack is not None:
        fixed = (*plan.pack.arguments, *plan.pack.constexprs.values())
        tensors = (dtype, dtype, dtype if plan.pack.x else None, dtype if plan.pack.w else None)
        pack_kernel.warmup(*tensors, *fixed, grid=(1,), **PACK_OPTIONS)
    sums: tuple[Any, ...] = (torch.float32, torch.int32) if tiling.split > 1 else (None, None)
    sums = () if tiling.variant == "channelwise" else sums
    fixed = (*plan.arguments, *plan.constexprs.values())
    kernel = KERNELS[tiling.variant]
    return common.resources_of(
        lambda: kernel.warmup(
            dtype, dtype, None, dtype, *sums, *fixed, grid=(1,), **options_of(plan)
        )
    )


def warm_patch(plan: Any) -> dict[str, Any]:
    from opkiln.device import cuda

    try:
        cuda.compile_cubin(source("patch"), "sm_90a", plan.macros)
    except Exception as error:  # a tiling that does not compile is a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {"spills": 0}  # none of them has any: read offline


def fault(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """What is wrong with an output, relative to its scale: sums of many products cancel."""
    scale = want.square().mean().sqrt()
    close = (got.float() - want).abs() <= tolerance * want.abs().clamp(min=scale)
    wrong = close.numel() - int(close.sum())
    return f"{wrong} of {close.numel()} elements wrong" if wrong else ""


def measure(
    row: Row, resources: dict[Tiling | PatchTiling, Any], flush: torch.Tensor
) -> dict[str, Any]:
    """Every candidate of one row, beside torch with cuDNN's own search."""
    from opkiln_conv.launch import prepare

    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    spec, params = CATALOGUE[row.op], row.params
    wide = [None if t is None else t.float() for t in tensors]
    want = spec.reference(*wide, **params).float()

    def build(tiling: Tiling | PatchTiling) -> Any:
        use(tiling)
        launch = prepare(row.call(tensors))
        return lambda: launch(*tensors)

    compiled = {t: r for t, r in resources.items() if "compile_error" not in r}
    runs = {str(i): lambda t=t: build(t) for i, t in enumerate(compiled)}
    check = lambda got: fault(got, want, TOLERANCE[row.dtype])  # noqa: E731
    formula = spec.native or spec.reference
    native = {"torch": lambda: formula(*tensors, **params)}
    found = common.measure(runs, native, check, flush, ITERATIONS)
    for record, (tiling, known) in zip(found["candidates"], compiled.items(), strict=True):
        record |= known | {"use": changed(tiling), "name": shown(tiling, known)}
    for tiling, known in resources.items():
        if tiling not in compiled:
            name = shown(tiling, {})
            found["candidates"].append({"name": name, "status": known["compile_error"]})
    return found


def changed(tiling: Tiling | PatchTiling) -> dict[str, Any]:
    """The fields of a tiling that are not at their default."""
    if isinstance(tiling, PatchTiling):
        return {"variant": "patch"} | dataclasses.asdict(tiling)
    default = dataclasses.asdict(Tiling("", 0, 0))
    return {k: v for k, v in dataclasses.asdict(tiling).items() if v != default[k]}


def shown(t: Tiling | PatchTiling, known: dict[str, Any]) -> str:
    if isinstance(t, PatchTiling):
        return "patch " + " ".join(map(str, dataclasses.astuple(t)))
    flags = f"{' split ' + str(t.split) if t.split > 1 else ''}{' ahead' if t.ahead else ''}"
    return (
        f"{t.variant} {t.block_m}x{t.block_n}x{t.block_k} w{t.num_warps} s{t.stages}{flags}"
        f"{'' if t.static else ' generic'} r{known.get('registers', '?')}"
    )


def write_tuning(results: pathlib.Path) -> None:
    """For each geometry measured: the fastest Triton tiling that does not spill, and of patches the
    fastest where it beats that one.
    """
    data = json.loads(results.read_text("utf-8"))
    table = json.loads(TUNING.read_text("utf-8"))
    entries = {e["label"]: e for e in table["rows"]}
    measured: dict[Row, list[Any]] = {}
    for r in data["results"]:
        row = Row(**{f.name: tuplify(r[f.name]) for f in dataclasses.fields(Row) if f.name in r})
        timed = [c for c in r["candidates"] if "us" in c and not c["spills"]]
        measured.setdefault(row, []).extend(timed)
    figure = {k: data[k] for k in ("gpu", "date", "commit")}
    for row, timed in measured.items():
        if row.bias:
            continue
        patches = [c for c in timed if c["use"]["variant"] == "patch"]
        best = min((c for c in timed if c not in patches), key=lambda c: c["us"])
        us = {row.dtype: round(best["us"], 3)}
        entry = tilings.key_of(row.geometry()) | {"label": row.label, "use": best["use"]}
        entry |= {"measured": figure | {"us": us}}
        before = entries.get(row.label, {})  # conv_stem.py's, conv_shift.py's
        kept = ("stem", "stem_measured", "shift", "shift_measured")
        entry |= {k: v for k, v in before.items() if k in kept}
        least = min(patches, key=lambda c: c["us"], default=best)
        if least["us"] < best["us"]:
            tiling = {k: v for k, v in least["use"].items() if k != "variant"}
            us = {row.dtype: round(least["us"], 3)}
            entry |= {"patch": tiling, "patch_measured": figure | {"us": us}}
        entries[row.label] = entry
    common.write_json(TUNING, table | {"rows": list(entries.values())})
    print(f"wrote {len(entries)} rows to {TUNING.relative_to(common.ROOT)}")


def tuplify(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains this")
    parser.add_argument("--second", action="store_true", help="the candidates of conv_second.py")
    parser.add_argument("--budget", type=float, default=150, help="seconds, compiling included")
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    torch.backends.cudnn.benchmark = True
    rows = read_rows(options.only)
    start = time.time()
    tasks = [(row, t) for row in rows for t in candidates(row, options.second)]
    for row in rows if options.second else []:  # a patch with the other dtype and bias
        other = dataclasses.replace(row, dtype="bf16", bias=True, label=f"{row.label}-bias")
        tasks += [(other, t) for r, t in tasks if r == row and isinstance(t, PatchTiling)][:1]
    resources = common.warm_all(warm, tasks)
    print(f"{len(tasks)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    flush = common.flush_buffer()
    results = common.Results(options.out / "conv.json")
    # Patches come last, each row's with its first tiling: a crash of one loses no other's results.
    for patches, row in itertools.product((False, True), dict.fromkeys(r for r, _ in tasks)):
        own = {t: found for (r, t), found in resources.items() if r == row}
        kept = [t for t in own if isinstance(t, PatchTiling) == patches]
        if patches and kept:
            kept = list(dict.fromkeys([next(iter(own)), *kept]))
        if not kept:
            continue
        if time.time() - start > options.budget:
            print(f"out of time before {row.label}")
            break
        found = measure(row, {t: own[t] for t in kept}, flush)
        results.add(dataclasses.asdict(row) | {"op": row.op}, found)
        torch.cuda.empty_cache()
    print(f"{time.time() - start:.0f} s")
    results.show()


if __name__ == "__main__":
    main()
