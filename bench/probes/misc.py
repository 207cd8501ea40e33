"""Measure the candidates of FFT and MHC on their rows of the benchmark pages.

    python bench/probes/misc.py --out DIR [--only SUBSTRING] [--compile]

--compile: time torch.compile too, on the MHC rows. Top-k has a probe of its own.

Writes DIR/misc.json and prints one line a row; see common.py for how it measures.
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any

import common
import numpy
import torch

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/misc/src")]

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402

TYPES = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "c64": torch.complex64,
    "c128": torch.complex128,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """sizes: what the op's `make` wants; bar, page: us to be beaten."""

    op: str
    label: str
    dtype: str
    sizes: tuple[int, ...]
    bar: float
    page: float


ROWS = [
    Row("mhc_post", "post-large", "bf16", (4, 2560), 1.6, 1.6),
    Row("mhc_post", "post-medium", "bf16", (2, 1920), 1.376, 1.38),
    Row("mhc_post", "post-small", "bf16", (1, 1280), 1.264, 1.25),
    Row("mhc_pre", "pre-large", "bf16", (4, 2560), 24.992, 56.7),
    Row("mhc_pre", "pre-medium", "bf16", (2, 1920), 25.246, 31.4),
    Row("mhc_pre", "pre-small", "bf16", (1, 1280), 15.857, 19.7),
    Row("fft", "fft-4k-c128-b64", "c128", (64, 4096), 7.456, 8.48),
    Row("fft", "fft-4k-c64-b64", "c64", (64, 4096), 4.865, 5.63),
    Row("fft", "fft-4k-c64-unbatched", "c64", (4096,), 4.416, 5.44),
]


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def mhc_post(row: Row, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    batch, columns = row.sizes
    dtype = TYPES[row.dtype]
    layer = randn(batch, columns, dtype=dtype, device=device)
    res = randn(batch, 4 * columns, dtype=dtype, device=device)
    return [layer, randn(batch, 4, device=device), res], {}


def mhc_pre(row: Row, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    batch, columns = row.sizes
    width = 4 * columns
    phi = randn(width, 24, device=device) / width**0.5
    x = randn(batch, width, dtype=TYPES[row.dtype], device=device)
    params = {
        "alpha_pre": 1.0, "alpha_post": 1.0, "alpha_res": 1.0, "sinkhorn_repeat": 1,
        "sinkhorn_eps": 0.02, "return_h_post": False,
    }  # fmt: skip
    return [phi, x, randn(24, device=device)], params


def fft(row: Row, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    x = torch.randn(row.sizes, dtype=TYPES[row.dtype], device=device)
    return [x], {"n": row.sizes[-1], "dim": x.ndim - 1, "norm": "backward"}


Candidates = dict[
    str, tuple[str, dict[str, Any]]
]  # module of opkiln_misc, arguments of its prepare


def mhc_post_candidates(row: Row) -> Candidates:
    from opkiln_misc.mhc_post_cuda import Tiling

    found: Candidates = {
        f"triton {c} w{w}": ("mhc_post", {"block_c": c, "num_warps": w})
        for c, w in [(256, 1), (128, 1), (512, 2), (1024, 4)]
    }
    for threads, per, size in [
        (32, 1, 16), (64, 1, 16), (96, 1, 16), (160, 1, 16), (320, 1, 16), (64, 2, 16),
        (160, 2, 16), (32, 4, 16), (64, 4, 16), (160, 4, 16), (320, 4, 16), (64, 1, 8),
        (128, 1, 8), (128, 1, 4),
    ]:  # fmt: skip
        found[f"{threads} threads, {per} streams, {size} B"] = (
            "mhc_post_cuda", {"tiling": Tiling(threads, per, size)},
        )  # fmt: skip
    return found


def mhc_pre_candidates(row: Row) -> Candidates:
    from opkiln_misc import mhc_pre, mhc_pre_split

    batch = row.sizes[0]
    found: Candidates = {
        f"cluster 16, {t.rows} rows, {t.threads} threads": ("mhc_pre", {"tiling": t})
        for t in [mhc_pre.rule(batch), mhc_pre.Tiling(mhc_pre.rule(batch).rows, 16, 768)]
    }
    for threads, unroll, mix in [
        (256, 2, 160), (256, 2, 320), (256, 2, 96), (256, 3, 160), (256, 4, 160), (128, 4, 160),
        (128, 6, 160), (512, 1, 160), (512, 2, 320),
    ]:  # fmt: skip
        for rows in {batch, 1}:
            found[f"split {threads} x {unroll}, {rows} rows, mix {mix}"] = (
                "mhc_pre_split",
                {"tiling": mhc_pre_split.Tiling(rows, threads, unroll, mix)},
            )
    return found


def fft_candidates(row: Row) -> Candidates:
    from opkiln_misc.fft import Tiling

    found = [Tiling(16), Tiling(16, 32, 1), Tiling(8), Tiling(8, 32, 1)]
    found += [Tiling(p, cluster=c) for p in (16, 8) for c in (2, 4, 8)]
    found += [Tiling(16, cluster=16), Tiling(4, cluster=4)] if len(row.sizes) == 1 else []
    return {
        f"points {t.points} cluster {t.cluster} threads {t.threads} buffers {t.buffers}": (
            "fft", {"tiling": t},
        )
        for t in found
    }  # fmt: skip


OPS: dict[str, tuple[Callable[..., Any], Callable[[Row], Candidates]]] = {
    "mhc_post": (mhc_post, mhc_post_candidates),
    "mhc_pre": (mhc_pre, mhc_pre_candidates),
    "fft": (fft, fft_candidates),
}
SOURCES = {"mhc_post_cuda": "mhc_post"}  # of a module whose source has another name


def call_of(row: Row, tensors: list[torch.Tensor], params: dict[str, Any]) -> Call:
    real = tensors[0].device.type != "meta"
    return Call.of(CATALOGUE[row.op], tensors, params, real=real)


def module_of(name: str) -> Any:
    return importlib.import_module(f"opkiln_misc.{name}")


def warm(task: tuple[Row, str]) -> dict[str, Any]:
    """Compile one CUDA candidate into the cache on disk. The few Triton ones compile when run."""
    from opkiln.device import cuda
    from opkiln_misc.sources import source

    row, candidate = task
    make, candidates = OPS[row.op]
    name, options = candidates(row)[candidate]
    try:
        if name != "mhc_post":
            plan = module_of(name).plan_for(call_of(row, *make(row, "meta")), **options)
            for step in plan if isinstance(plan, list) else [plan]:
                cuda.compile_cubin(source(SOURCES.get(name, name)), "sm_90a", step.macros)
    except Exception as error:  # a candidate that does not compile is a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {}


def rms_error(got: torch.Tensor, want: Any) -> float:
    """Relative to the root mean square of `want`, a numpy array of a wider type."""
    off = numpy.abs(got.cpu().numpy().astype(want.dtype) - want)
    return float(numpy.sqrt((off**2).mean() / (numpy.abs(want) ** 2).mean()))


def fft_fault(tensors: list[torch.Tensor]) -> Callable[[Any], str]:
    """Within twice cuFFT's error, against an FFT in 80 bits."""
    x = tensors[0]
    want = numpy.fft.fft(x.cpu().numpy().astype(numpy.clongdouble))
    limit = 2 * rms_error(torch.fft.fft(x), want)

    def fault(got: torch.Tensor) -> str:
        error = rms_error(got, want)
        return "" if error <= limit else f"RMS error {error:.3g}, twice cuFFT's is {limit:.3g}"

    return fault


def mhc_fault(row: Row, tensors: list[torch.Tensor], params: Any) -> Callable[[Any], str]:
    want = CATALOGUE[row.op].reference(*[t.double() for t in tensors], **params)
    want = want if isinstance(want, tuple) else (want,)
    names = CATALOGUE[row.op].outputs

    def fault(got: Any) -> str:
        got = got if isinstance(got, tuple) else (got,)
        for name, g, w in zip(names, got, want, strict=False):
            wrong = common.wrong_elements(g, w.to(g.dtype), 2**-7)
            if wrong:
                return f"{name}: {wrong} elements wrong"
        return ""

    return fault


def others_of(row: Row, tensors: list[torch.Tensor], params: Any, compiled: bool) -> dict[str, Any]:
    spec = CATALOGUE[row.op]
    formula = spec.native or spec.reference
    found: dict[str, Any] = {"torch": lambda: formula(*tensors, **params)}
    if compiled and row.op.startswith("mhc"):
        torch._dynamo.reset()
        function = torch.compile(lambda *given: formula(*given, **params), dynamic=False)
        found["torch-compile"] = lambda: function(*tensors)
    return found


def measure(row: Row, compiled: bool, flush: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    make, candidates = OPS[row.op]
    tensors, params = make(row, "cuda")
    call = call_of(row, tensors, params)
    fault = fft_fault(tensors) if row.op == "fft" else mhc_fault(row, tensors, params)

    def build(name: str, options: dict[str, Any]) -> Callable[[], Any]:
        launch = module_of(name).prepare(call, **options)
        return lambda: launch(*tensors)

    runs = {label: lambda c=c: build(*c) for label, c in candidates(row).items()}
    others = others_of(row, tensors, params, compiled)
    return common.measure(runs, others, fault, flush)


def all_lines(found: dict[str, Any]) -> str:
    timed = sorted((c for c in found["candidates"] if "us" in c), key=lambda c: c["us"])
    return "\n".join(f"    {c['us']:8.2f} low {c['low_us']:8.2f}  {c['name']}" for c in timed[:4])


def main() -> None:
    options = common.options(__doc__, "--compile")
    rows = common.chosen(ROWS, options.only)
    tasks = [(row, name) for row in rows for name in OPS[row.op][1](row)]
    common.warm_all(warm, tasks)
    flush = common.flush_buffer()
    results = common.Results(options.out / "misc.json")
    summary = []
    for row in rows:
        try:
            found = measure(row, options.compile, flush)
        except Exception as error:  # the other rows still run
            print(f"{row.op} {row.label}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        results.add(dataclasses.asdict(row), found)
        summary.append(common.line(results.rows[-1]) + "\n" + all_lines(found))
        torch.cuda.empty_cache()
    results.show()
    print("\n".join(summary))


if __name__ == "__main__":
    main()
