"""Measure the tilings of the rotation kernel on the rotary rows of the benchmark pages.

    python bench/probes/rope.py --out DIR [--only SUBSTRING] [--no-compile]

Writes DIR/rope.json and prints one line a row; see common.py for how it measures.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import common
import torch

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/rope/src")]

from opkiln import functional, road  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_rope.rotation_plan import Tiling, plan_for  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
TOLERANCE = {"bf16": 2**-7, "f16": 2**-10}


@dataclasses.dataclass(frozen=True)
class Row:
    """bar, page: us to be beaten."""

    op: str
    label: str
    dtype: str
    shape: tuple[int, ...]
    bar: float
    page: float

    def call(self, device: str) -> tuple[Call, tuple[torch.Tensor, ...]]:
        x = torch.randn(self.shape, device=device).to(DTYPES[self.dtype])
        args: dict[str, Any] = {}
        if self.op == IDS:
            ids = torch.arange(self.shape[0], dtype=torch.int32, device=device)
            args = {"position_ids": ids, "max_position": 2 * self.shape[0]}
        try:
            with road.capturing():
                getattr(functional, self.op)(x, **args)
        except road.Captured as found:
            bound = found.bound
        return Call.of(*bound, real=device != "meta"), bound.tensors


TOKENS_2K, TOKENS_8K = (2, 2048, 32, 128), (1, 8192, 32, 128)
IDS = "rope_neox_position_ids"
ROWS = [
    Row("rope_neox", "neox-1d-2k-d64", "f16", (2048, 64), 1.697, 1.82),
    Row("rope_neox", "neox-1d-4k-d128", "bf16", (4096, 128), 2.496, 2.59),
    Row("rope_neox", "neox-2d-b2-s2k-h32-d128", "f16", TOKENS_2K, 17.696, 18.4),
    Row("rope_non_neox", "non-neox-1d-2k-d64", "f16", (2048, 64), 1.824, 2.02),
    Row("rope_non_neox", "non-neox-2d-b2-s2k-h32-d128", "bf16", TOKENS_2K, 22.24, 19.0),
    Row("rope_longrope", "longrope-1d-8k-d128", "bf16", (8192, 128), 3.58, 3.58),
    Row("rope_longrope", "longrope-2d-b1-s8k-h32-d128", "f16", TOKENS_8K, 34.9, 34.9),
    Row("rope_yarn", "yarn-1d-8k-d128", "bf16", (8192, 128), 3.296, 3.62),
    Row("rope_yarn", "yarn-2d-b1-s8k-h32-d128", "f16", TOKENS_8K, 33.553, 34.9),
    Row("rope_llama31", "llama31-1d-8k-d128", "bf16", (8192, 128), 3.62, 3.62),
    Row("rope_llama31", "llama31-2d-b1-s8k-h32-d128", "f16", TOKENS_8K, 34.9, 34.9),
    Row(IDS, "position-ids-s2k-h32-d128", "f16", (2048, 32, 128), 10.256, 11.9),
    Row(IDS, "position-ids-s4k-h32-d128", "bf16", (4096, 32, 128), 18.64, 22.2),
]  # fmt: skip


def candidates(row: Row) -> list[Tiling]:
    """What the rule says first, then what may be better."""
    call, _ = row.call("meta")
    plan = plan_for(call)
    assert plan is not None
    tokens_lanes = 512 // row.shape[-1]  # tokens of a warp: 8 pairs a lane
    if len(row.shape) == 2:
        found = [
            Tiling(tokens_lanes * warps * depth, 1, 1, warps)
            for warps, depth in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2))
        ]
    else:
        shapes = [(1, 8, 4, 1), (1, 16, 2, 2), (1, 32, 1, 4), (2, 16, 2, 4), (2, 32, 1, 8)]
        found = [Tiling(*s) for s in shapes]
        found += [dataclasses.replace(t, store_cache=".cs") for t in found[1:3]]
    return list(dict.fromkeys([plan.tiling, *found]))


def warm(task: tuple[Row, Tiling]) -> dict[str, Any]:
    """Compile one candidate into Triton's cache on disk."""
    from opkiln_rope.rotation import rotation_kernel

    row, tiling = task
    call, tensors = row.call("meta")
    plan = plan_for(call, tiling)
    assert plan is not None
    dtype = DTYPES[row.dtype]
    ids = tensors[1].dtype if len(tensors) > 1 else None
    try:
        kernel = rotation_kernel.warmup(
            dtype, dtype, torch.float32, torch.float32, ids, *plan.sizes,
            *plan.constexprs().values(), grid=(1,), num_warps=tiling.num_warps,
        )  # fmt: skip
        kernel._init_handles()
    except Exception as error:  # a candidate that does not compile is a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {"registers": kernel.n_regs, "spills": kernel.n_spills}


def measure(row: Row, compiled: bool, flush: torch.Tensor) -> dict[str, Any]:
    from opkiln_rope.rotation import prepare

    torch.manual_seed(0)
    call, tensors = row.call("cuda")
    spec, params = call.spec, vars(call.params)
    wide = (tensors[0].double(), *tensors[1:])
    want = spec.reference(*wide, **params).to(tensors[0].dtype)
    del wide

    def fault(got: torch.Tensor) -> str:
        wrong = common.wrong_elements(got, want, TOLERANCE[row.dtype])
        return f"{wrong} elements wrong" if wrong else ""

    def make(tiling: Tiling) -> Callable[[], Any]:
        launch = prepare(call, tiling)
        return lambda: launch(*tensors)

    runs = {short(t): lambda t=t: make(t) for t in candidates(row)}
    others: dict[str, Callable[[], Any]] = {}
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(lambda *given: spec.native(*given, **params), dynamic=False)
        others["torch-compile"] = lambda: function(*tensors)
    return common.measure(runs, others, fault, flush)


def short(t: Tiling) -> str:
    flags = " ".join(f for f in (t.evict, t.store_cache) if f)
    return f"{t.block_t}x{t.block_h}x{t.steps} w{t.num_warps} {flags}".strip()


def main() -> None:
    options = common.options(__doc__, "--no-compile")
    rows = common.chosen(ROWS, options.only)
    common.warm_all(warm, [(row, tiling) for row in rows for tiling in candidates(row)])
    flush = common.flush_buffer()
    results = common.Results(options.out / "rope.json")
    for row in rows:
        found = measure(row, not options.no_compile, flush)
        results.add(dataclasses.asdict(row), found)
        torch.cuda.empty_cache()
    results.show()


if __name__ == "__main__":
    main()
