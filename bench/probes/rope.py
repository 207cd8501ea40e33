"""Measure the rotation kernel's tilings on the pages' rotary rows.

    python bench/probes/rope.py --out DIR [--only SUBSTRING] [--no-compile]

Writes DIR/rope.json and prints one line a row, then every candidate's time; common.py says how it
measures. All tilings must give the same bits.
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
from opkiln_bench.peers.compositions import composition  # noqa: E402
from opkiln_rope import rotation  # noqa: E402
from opkiln_rope.rotation_plan import Tiling, plan_for  # noqa: E402

DTYPES = common.DTYPES
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


def name_of(t: Tiling) -> str:
    registers = f"r{t.max_registers}" if t.max_registers else ""
    shape = f"{t.block_t}x{t.block_h}x{t.steps} w{t.num_warps}"
    return " ".join(filter(None, (shape, registers, t.store_cache)))


def candidates(row: Row) -> list[Tiling]:
    """What the rule says, then what may be better."""
    call, _ = row.call("meta")
    plan = plan_for(call)
    assert plan is not None
    if len(row.shape) == 2:
        a_warp = 512 // row.shape[-1]  # tokens of 8 pairs a lane
        found = [Tiling(a_warp * w, 1, 1, w) for w in (1, 2, 4)]
        found += [Tiling(a_warp * w // 2, 1, 1, w) for w in (2, 4, 8)]  # 4 pairs a lane
        found += [Tiling(a_warp, 1, 1, 4), Tiling(4 * a_warp, 1, 1, 2)]  # 2; 16
    else:
        shapes = [(1, 8, 2, 2), (1, 16, 2, 4), (1, 32, 1, 8), (1, 4, 4, 1), (1, 8, 4, 2)]
        found = [Tiling(*s) for s in shapes]
        found.append(dataclasses.replace(plan.tiling, store_cache=".cs"))
        found.append(Tiling(1, 16, 2, 4, store_cache=".cs"))
    return list(dict.fromkeys([plan.tiling, *found]))


def warm(task: tuple[Row, Tiling]) -> dict[str, Any]:
    """Compile one candidate into Triton's cache on disk."""
    row, tiling = task
    call, tensors = row.call("meta")
    plan = plan_for(call, tiling)
    assert plan is not None
    x = DTYPES[row.dtype]
    ids = tensors[1].dtype if len(tensors) > 1 else None
    fixed = rotation.fixed_arguments(call, plan)
    return common.resources_of(
        lambda: rotation.rotation_kernel.warmup(
            x, x, torch.int32, ids, *fixed, grid=(1,), **plan.options()
        )
    )


def make(call: Call, tiling: Tiling, tensors: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    launch = rotation.prepare(call, tiling)
    return lambda: launch(*tensors)


def measure(row: Row, compiled: bool, flush: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    call, tensors = row.call("cuda")
    spec, params = call.spec, vars(call.params)
    wide = (tensors[0].double(), *tensors[1:])
    want = spec.reference(*wide, **params).to(tensors[0].dtype)
    del wide
    ours = make(call, candidates(row)[-1], tensors)()

    def build(tiling: Tiling) -> Callable[[], Any]:
        run = make(call, tiling, tensors)
        if not torch.equal(run(), ours):
            raise ValueError("other bits than another tiling's")
        return run

    def fault(got: torch.Tensor) -> str:
        wrong = common.wrong_elements(got, want, TOLERANCE[row.dtype])
        return f"{wrong} elements wrong" if wrong else ""

    runs = {name_of(t): lambda t=t: build(t) for t in candidates(row)}
    others: dict[str, Callable[[], Any]] = {}
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(composition(call), dynamic=False)
        others["torch-compile"] = lambda: function(*tensors)
    return common.measure(runs, others, fault, flush)


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
    for row in results.rows:
        timed = [f"{c['name']} {c['us']:.2f}" for c in row["candidates"] if "us" in c]
        print(f"{row['op'][5:]} {row['label']}: {'; '.join(timed)}")
    results.show()


if __name__ == "__main__":
    main()
