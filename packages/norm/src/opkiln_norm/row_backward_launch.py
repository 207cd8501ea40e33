"""Backward of the row norms: allocates and launches the kernels of row_backward."""

from collections.abc import Callable
from typing import Any

import torch
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher
from opkiln.spec import Call

from opkiln_norm import row_backward_ring
from opkiln_norm.row_backward import row_backward_kernel
from opkiln_norm.row_backward_plan import GRAD_INPUT, SUMS_BLOCK, BackwardPlan, plan_for
from opkiln_norm.row_backward_sums import column_sums_kernel, row_sums_kernel
from opkiln_norm.row_plan import multiprocessors

READ = (
    ("grad_out",), ("input", "residual_out"), ("grad_residual_out",), ("weight", "scale"),
    ("shift",), ("gate",), ("mean",), ("rstd",),
)  # fmt: skip
WRITTEN = (
    ("grad_input",), ("grad_weight", "grad_scale"), ("grad_bias", "grad_shift"), ("grad_gate",),
)  # fmt: skip
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 64, 32, 4  # of a program of column_sums_kernel
Launch = Callable[..., Any]


def place_of(names: tuple[str, ...], among: list[str]) -> int:
    """Where one of `names` stands; -1, the None after all, where none does."""
    return next((among.index(n) for n in names if n in among), -1)


class Sums:
    """The gradients summed over rows: where the programs write, and the kernel that adds it up.

    A gradient that has one program a row of it is written by that program.
    """

    def __init__(self, call: Call, plan: BackwardPlan, parts: int) -> None:
        self.parts = parts
        self.split = [0 < rows < parts for rows in plan.summed]
        meta = call.new((parts, plan.n), torch.float32)
        self.allocate = allocator(call.device, (meta,) * sum(self.split))
        rows = tuple(r * s for r, s in zip(plan.summed, self.split, strict=True))
        parts_of_row = tuple(parts // max(r, 1) for r in rows)
        self.fixed = (rows, parts_of_row, plan.n, SUM_ROWS, SUM_COLUMNS)
        grid = (-(-plan.n // SUM_COLUMNS) * sum(rows), 1, 1)
        self.run = launcher(column_sums_kernel, grid, {"num_warps": SUM_WARPS}, self.fixed)

    def targets(self, grads: tuple[Any, ...]) -> list[Any]:
        """What the programs write for each of weight, shift and gate."""
        made = iter(self.allocate())
        return [next(made) if s else g for s, g in zip(self.split, grads, strict=True)]

    def add_up(self, targets: list[Any], grads: tuple[Any, ...]) -> None:
        if any(self.split):
            pairs = zip(self.split, targets, grads, strict=True)
            kept = [(t, g) if s else (None, None) for s, t, g in pairs]
            self.run(*[t for t, _ in kept], *[g for _, g in kept])


def prepare(call: Call) -> Launch:
    """Plan the backward of a row norm once; the result allocates and launches."""
    plan = plan_for(call)
    made = [o.name for o, here in zip(call.spec.outputs, call.present, strict=True) if here]
    names = [*call.spec.tensor_names, *made]
    reads = [place_of(group, names) for group in READ]
    writes = [place_of(group, names) for group in WRITTEN]
    allocate = allocator(call.device, call.outputs)
    compute = planned(call, plan) if plan.rows else None

    def launch(*tensors: torch.Tensor | None) -> Any:
        outputs = allocate()
        everything = (*tensors, *outputs, None)
        if compute is None:
            for out in outputs:
                out.zero_()
        else:
            compute([everything[i] for i in reads], [everything[i] for i in writes])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch


def planned(call: Call, plan: BackwardPlan) -> Callable[[list[Any], list[Any]], None]:
    """What launches the kernels on the tensors read and written."""
    ring = row_backward_ring.prepare(call, plan)
    if ring is not None:
        return through_ring(call, plan, *ring)
    slices = plan.slices(multiprocessors(call.device))
    parts = plan.groups * slices
    center = "layer_norm" in call.spec.name
    layout = plan.layout()
    scalars = (getattr(call.params, "eps", None), getattr(call.params, "scale_offset", None))
    units = plan.n // plan.align
    sizes = (plan.rows, plan.group_rows, slices, units, plan.col_blocks)
    options = {"num_warps": plan.tiling.num_warps}
    fixed = (*layout, *sizes, *scalars, *plan.constexprs(center).values())
    run = launcher(row_backward_kernel, (parts * plan.col_blocks, 1, 1), options, fixed)
    sums = Sums(call, plan, parts)
    totals = row_totals(call, plan, (*layout, plan.rows, units, *scalars, center))

    def compute(reads: list[Any], writes: list[Any]) -> None:
        grads = tuple(writes[1:])
        targets = sums.targets(grads)
        run(*reads, totals(reads), writes[0], *targets)
        sums.add_up(targets, grads)

    return compute


def through_ring(
    call: Call, plan: BackwardPlan, parts: int, run: row_backward_ring.Run
) -> Callable[[list[Any], list[Any]], None]:
    """The same by the kernel in CUDA C++."""
    sums = Sums(call, plan, parts)

    def compute(reads: list[Any], writes: list[Any]) -> None:
        grads = tuple(writes[1:])
        targets = sums.targets(grads)
        run(reads, writes[0], targets)
        sums.add_up(targets, grads)

    return compute


def row_totals(call: Call, plan: BackwardPlan, fixed: tuple[Any, ...]) -> Callable[..., Any]:
    """What computes a wide row's means for `row_backward_kernel`; None if it needs none."""
    given = hasattr(call.tensors, "rstd")
    if not plan.tiling.wide or (given and plan.tensors[GRAD_INPUT] is None):
        return lambda reads: None
    fixed = (*fixed, plan.align, SUMS_BLOCK)
    allocate = allocator(call.device, (call.new((4, plan.rows), torch.float32),))
    run = launcher(row_sums_kernel, (plan.rows, 1, 1), {"num_warps": 16}, fixed)

    def compute(reads: list[Any]) -> Any:
        (totals,) = allocate()
        g, x, _, w, _, q, mean, rstd = reads
        run(g, x, w, q, mean, rstd, totals)
        return totals

    return compute
