"""Measure the candidates of FFT and MHC on their rows of the benchmark pages.

    python bench/probes/misc.py --out DIR [--only SUBSTRING] [--compile] [--second]

--compile: time torch.compile too, on the MHC rows. --second: only what the first run of this probe
led to. Top-k has a probe of its own.

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
    from opkiln_misc.mhc_post import Tiling

    sizes = [(128, 1), (256, 1), (256, 2), (512, 1), (512, 2), (1024, 4)]
    return {
        f"{c} columns, {w} warps{', fixed' * fixed}": ("mhc_post", {"tiling": Tiling(c, w, fixed)})
        for c, w in sizes
        for fixed in (False, True)
    }


def mhc_pre_candidates(row: Row) -> Candidates:
    from opkiln_misc.mhc_pre import Tiling

    sizes = [(1, 512, 10), (1, 256, 10), (1, 512, 5), (1, 1024, 5), (row.sizes[0], 512, 8)]
    return {
        f"{t.rows} rows, {t.threads} x {t.unroll}": ("mhc_pre", {"tiling": t})
        for t in dict.fromkeys(Tiling(*s) for s in sizes)
    }


def named(tilings: list[Any]) -> Candidates:
    return {
        f"points {t.points} cluster {t.cluster} threads {t.threads} buffers {t.buffers}"
        f"{' async' * t.asynchronous}": ("fft", {"tiling": t})
        for t in tilings
    }


def fft_first(row: Row) -> Candidates:
    from opkiln_misc.fft import Tiling

    found = [Tiling(16), Tiling(16, 32, 1), Tiling(8), Tiling(8, 32, 1)]
    found += [Tiling(p, cluster=c) for p in (16, 8) for c in (2, 4, 8)]
    return named(found)


def fft_second(row: Row) -> Candidates:
    from opkiln_misc.fft import Tiling

    shapes = [(8, 2), (16, 2), (8, 4)] + ([(8, 8), (16, 4)] if len(row.sizes) == 1 else [])
    waits = (False, True)
    return named([Tiling(p, cluster=c, asynchronous=a) for p, c in shapes for a in waits])


MAKE: dict[str, Callable[..., Any]] = {"mhc_post": mhc_post, "mhc_pre": mhc_pre, "fft": fft}


def candidates_of(row: Row, second: bool) -> Candidates:
    if row.op == "fft":
        return fft_second(row) if second else fft_first(row) | fft_second(row)
    return mhc_pre_candidates(row) if row.op == "mhc_pre" else mhc_post_candidates(row)


def call_of(row: Row, tensors: list[torch.Tensor], params: dict[str, Any]) -> Call:
    real = tensors[0].device.type != "meta"
    return Call.of(CATALOGUE[row.op], tensors, params, real=real)


def module_of(name: str) -> Any:
    return importlib.import_module(f"opkiln_misc.{name}")


def warm(task: tuple[Row, str, bool]) -> dict[str, Any]:
    """Compile one CUDA candidate into the cache on disk. The few Triton ones compile when run."""
    from opkiln.device import cuda
    from opkiln_misc.sources import source

    row, candidate, second = task
    name, options = candidates_of(row, second)[candidate]
    try:
        if name != "mhc_post":
            plan = module_of(name).plan_for(call_of(row, *MAKE[row.op](row, "meta")), **options)
            for step in plan if isinstance(plan, list) else [plan]:
                cuda.compile_cubin(source(name), "sm_90a", step.macros)
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


def measure(row: Row, options: Any, flush: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    tensors, params = MAKE[row.op](row, "cuda")
    call = call_of(row, tensors, params)
    fault = fft_fault(tensors) if row.op == "fft" else mhc_fault(row, tensors, params)

    def build(name: str, given: dict[str, Any]) -> Callable[[], Any]:
        launch = module_of(name).prepare(call, **given)
        return lambda: launch(*tensors)

    candidates = candidates_of(row, options.second)
    runs = {label: lambda c=c: build(*c) for label, c in candidates.items()}
    others = others_of(row, tensors, params, options.compile)
    return common.measure(runs, others, fault, flush)


def all_lines(found: dict[str, Any]) -> str:
    timed = sorted((c for c in found["candidates"] if "us" in c), key=lambda c: c["us"])
    return "\n".join(f"    {c['us']:8.2f} low {c['low_us']:8.2f}  {c['name']}" for c in timed[:5])


def main() -> None:
    options = common.options(__doc__, "--compile", "--second")
    rows = common.chosen(ROWS, options.only)
    second = options.second
    tasks = [(row, name, second) for row in rows for name in candidates_of(row, second)]
    common.warm_all(warm, tasks)
    flush = common.flush_buffer()
    results = common.Results(options.out / "misc.json")
    summary = []
    for row in rows:
        try:
            found = measure(row, options, flush)
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
