"""Measure the candidates of FFT, MHC and top-k on their rows of the benchmark pages.

    python bench/probes/misc.py --out DIR [--only SUBSTRING]

Writes DIR/misc.json and prints one line a row; see common.py for how it measures.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import common
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
RMS_ERROR = {torch.complex64: 3e-7, torch.complex128: 8e-16}  # of an FFT, relative


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
    Row("topk_selector", "topk1024-s32k-kv64k", "f32", (32768, 65536, 1024), 7417.8, 9272),
    Row("topk_selector", "topk2048-s32k-kv64k", "f32", (32768, 65536, 2048), 8548.7, 10670),
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


def topk_selector(row: Row, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    rows, kv, topk = row.sizes
    scores = torch.randn(1, rows, kv, 1, device=device)
    starts = torch.zeros(1, rows, dtype=torch.int32, device=device)
    return [scores, starts, starts + kv], {"topk": topk}


def mhc_post_candidates(row: Row) -> dict[str, dict[str, Any]]:
    shapes = [(256, 1), (128, 1), (256, 2), (512, 1), (512, 2), (512, 4), (1024, 4), (1024, 8)]
    return {f"{c} w{w}": {"block_c": c, "num_warps": w} for c, w in shapes}


def mhc_pre_candidates(row: Row) -> dict[str, dict[str, Any]]:
    from opkiln_misc.mhc_pre import Tiling, rule

    first = rule(row.sizes[0])
    found = [first]
    for rows in (1, 2, 4):
        for threads in (192, 288, 384, 576, 768, 960):
            for cluster in (16, 8):
                if rows <= max(row.sizes[0], 1):
                    found.append(Tiling(rows, cluster, threads))
    return {
        f"rows {t.rows} cluster {t.cluster} threads {t.threads}": {"tiling": t}
        for t in dict.fromkeys(found)
    }


def fft_candidates(row: Row) -> dict[str, dict[str, Any]]:
    from opkiln_misc.fft import Tiling

    found = [Tiling(p, 32, b) for p in (16, 8, 4) for b in (2, 1)]
    return {f"points {t.points} buffers {t.buffers}": {"tiling": t} for t in found}


def topk_candidates(row: Row) -> dict[str, dict[str, Any]]:
    from opkiln_misc.topk import Tiling, capacity_of, rule

    shapes = [
        (512, 3, 4), (512, 3, 2), (512, 2, 4), (512, 2, 8), (512, 4, 2), (512, 4, 4), (1024, 1, 4),
        (1024, 2, 2), (1024, 2, 4), (256, 4, 4), (256, 5, 4), (256, 6, 2),
    ]  # fmt: skip
    found = [rule(capacity_of(row.sizes[2])), *[Tiling(*s) for s in shapes]]
    return {
        f"threads {t.threads} blocks {t.blocks} unroll {t.unroll}": {"tiling": t}
        for t in dict.fromkeys(found)
    }


OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mhc_post": (mhc_post, mhc_post_candidates),
    "mhc_pre": (mhc_pre, mhc_pre_candidates),
    "fft": (fft, fft_candidates),
    "topk_selector": (topk_selector, topk_candidates),
}


def call_of(row: Row, tensors: list[torch.Tensor], params: dict[str, Any]) -> Call:
    real = tensors[0].device.type != "meta"
    return Call.of(CATALOGUE[row.op], tensors, params, real=real)


def warm(task: tuple[Row, dict[str, Any]]) -> dict[str, Any]:
    """Compile one CUDA candidate into the cache on disk. The few Triton ones compile when run."""
    from opkiln.device import cuda
    from opkiln_misc.plugin import MODULES, planner
    from opkiln_misc.sources import source

    row, options = task
    try:
        if row.op != "mhc_post":
            make, _ = OPS[row.op]
            plan = planner(row.op).plan_for(call_of(row, *make(row, "meta")), **options)
            for step in plan if isinstance(plan, list) else [plan]:
                cuda.compile_cubin(source(MODULES[row.op]), "sm_90a", step.macros)
    except Exception as error:  # a candidate that does not compile is a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {}


def fault(row: Row, got: Any, want: Any) -> str:
    """What is wrong with the outputs."""
    pairs = zip(got if isinstance(got, tuple) else (got,), want, strict=True)
    for name, (g, w) in zip(CATALOGUE[row.op].outputs, pairs, strict=False):
        if row.op == "topk_selector":
            wrong = int((g.sort(-1).values != w.sort(-1).values).any(-1).sum())
            if wrong:
                return f"{wrong} of {g[..., 0].numel()} rows wrong"
        elif row.op == "fft":
            error = float((g - w).abs().square().mean().sqrt() / w.abs().square().mean().sqrt())
            if not error < RMS_ERROR[g.dtype]:
                return f"RMS error {error:.3g}"
        else:
            wrong = common.wrong_elements(g, w, 2**-7)
            if wrong:
                return f"{wrong} of {g.numel()} elements of {name.name} wrong"
    return ""


def expected(row: Row, call: Call, tensors: list[torch.Tensor], params: Any) -> list[torch.Tensor]:
    spec = CATALOGUE[row.op]
    if row.op == "topk_selector":
        return [spec.reference(*tensors, **params)]
    if row.op == "fft":
        return [torch.fft.fft(tensors[0].to(torch.complex128))]
    outs = spec.reference(*[t.double() for t in tensors], **params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return [o.to(m.dtype) for o, m in zip(outs, call.outputs, strict=False)]


def measure(row: Row, flush: torch.Tensor) -> dict[str, Any]:
    from opkiln_misc.plugin import planner

    torch.manual_seed(0)
    make, candidates = OPS[row.op]
    tensors, params = make(row, "cuda")
    spec = CATALOGUE[row.op]
    call = call_of(row, tensors, params)
    want = expected(row, call, tensors, params)

    def build(options: dict[str, Any]) -> Callable[[], Any]:
        launch = planner(row.op).prepare(call, **options)
        return lambda: launch(*tensors)

    runs = {name: lambda o=o: build(o) for name, o in candidates(row).items()}
    formula = spec.native or spec.reference
    # The top-k formula is hundreds of kernels and seconds long.
    long = row.op == "topk_selector"
    others = {} if long else {"torch": lambda: formula(*tensors, **params)}
    check = lambda got: fault(row, got, want)  # noqa: E731
    return common.measure(runs, others, check, flush, 8 if long else common.ITERATIONS)


def main() -> None:
    options = common.options(__doc__)
    rows = common.chosen(ROWS, options.only)
    common.warm_all(warm, [(row, o) for row in rows for o in OPS[row.op][1](row).values()])
    flush = common.flush_buffer()
    results = common.Results(options.out / "misc.json")
    for row in rows:
        results.add(dataclasses.asdict(row), measure(row, flush))
        torch.cuda.empty_cache()
    results.show()


if __name__ == "__main__":
    main()
