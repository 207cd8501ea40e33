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

TYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


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


OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "mhc_post": (mhc_post, mhc_post_candidates),
    "mhc_pre": (mhc_pre, mhc_pre_candidates),
}


def call_of(row: Row, tensors: list[torch.Tensor], params: dict[str, Any]) -> Call:
    real = tensors[0].device.type != "meta"
    return Call.of(CATALOGUE[row.op], tensors, params, real=real)


def prepared(row: Row, call: Call, options: dict[str, Any]) -> Callable[..., Any]:
    if row.op == "mhc_post":
        from opkiln_misc.mhc_post import prepare
    else:
        from opkiln_misc.mhc_pre import prepare
    return prepare(call, **options)


def warm(task: tuple[Row, dict[str, Any]]) -> dict[str, Any]:
    """Compile one CUDA candidate into the cache on disk. The few Triton ones compile when run."""
    from opkiln.device import cuda
    from opkiln_misc import mhc_pre as pre
    from opkiln_misc.sources import source

    row, options = task
    make, _ = OPS[row.op]
    try:
        if row.op == "mhc_pre":
            plan = pre.plan_for(call_of(row, *make(row, "meta")), **options)
            cuda.compile_cubin(source("mhc_pre"), "sm_90a", plan.macros)
    except Exception as error:  # a candidate that does not compile is a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {}


def fault(row: Row, got: Any, want: Any) -> str:
    """What is wrong with the outputs."""
    pairs = zip(got if isinstance(got, tuple) else (got,), want, strict=True)
    for name, (g, w) in zip(CATALOGUE[row.op].outputs, pairs, strict=False):
        wrong = common.wrong_elements(g, w, 2**-7)
        if wrong:
            return f"{wrong} of {g.numel()} elements of {name.name} wrong"
    return ""


def measure(row: Row, flush: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    make, candidates = OPS[row.op]
    tensors, params = make(row, "cuda")
    spec = CATALOGUE[row.op]
    outs = spec.reference(*[t.double() for t in tensors], **params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    call = call_of(row, tensors, params)
    want = [o.to(m.dtype) for o, m in zip(outs, call.outputs, strict=False)]

    def build(options: dict[str, Any]) -> Callable[[], Any]:
        launch = prepared(row, call, options)
        return lambda: launch(*tensors)

    runs = {name: lambda o=o: build(o) for name, o in candidates(row).items()}
    formula = spec.native or spec.reference
    others = {"torch": lambda: formula(*tensors, **params)}
    return common.measure(runs, others, lambda got: fault(row, got, want), flush)


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
