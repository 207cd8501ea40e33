"""Backward of group_norm and instance_norm: allocates and launches the kernels of channel_planes.

A group that fits a program's registers costs one kernel, and a second one where weight or bias has
a gradient; a larger one three: the sums of its planes, what follows from them, the gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from opkiln.spec import Call

from opkiln_norm.channel_backward import sums_kernel
from opkiln_norm.channel_norm import launcher, shape_arguments, stride_of
from opkiln_norm.channel_plan import ChannelPlan, planes_plan
from opkiln_norm.channel_planes import (
    finish_kernel,
    planes_backward_kernel,
    planes_gradient_kernel,
)
from opkiln_norm.row_plan import power_of_two

Launch = Callable[..., Any]
SECTOR_CHANNELS = 8  # of f32: as many as a program of finish_kernel adds up


class Finish:
    """finish_kernel: a group's coefficients where they are asked for, the parameters' gradients."""

    def __init__(self, call: Call, slices: int, coefficients: bool) -> None:
        n, c = call.tensors.input.shape[:2]
        groups = call.tensors.mean.numel
        size = c * n // groups
        wanted = any(call.params.output_mask[1:])
        first = groups if coefficients else 0
        grid = first + (-(-c // SECTOR_CHANNELS) if wanted else 0)
        blocks = (
            min(power_of_two(size * slices), 1024),
            SECTOR_CHANNELS,
            min(power_of_two(n * slices), 256),
        )
        count = float(size * (call.tensors.input.numel // (n * c)))
        stride = stride_of(call.tensors.weight)
        self.fixed = (
            first, groups, groups // n, size, c, stride, slices, n * c, count, *blocks
        )  # fmt: skip
        self.kernel = launcher(finish_kernel, grid, {"num_warps": 4}) if grid else None

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if self.kernel is not None:
            self.kernel(*tensors, *self.fixed)


def prepare(call: Call) -> Launch:
    """Plan a group_norm_backward or instance_norm_backward call."""
    plan = planes_plan(call)
    t, mask, device = call.tensors, call.params.output_mask, call.device
    metas = [(m.shape, m.stride, m.dtype) for m in call.outputs]
    compute = (sliced if plan.tiling.slices else resident)(call, plan)
    given = getattr(call.params, "use_input_stats", True)
    sums = any(mask[1:]) or (plan.tiling.slices and mask[0] and given)
    planes = t.input.shape[0] * t.input.shape[1]
    elements = 2 * planes * max(plan.tiling.slices, 1) + 2 * t.mean.numel

    def launch(
        g: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor | None,
        mean: torch.Tensor,
        rstd: torch.Tensor,
    ) -> Any:
        outputs = [torch.empty_strided(s, d, dtype=k, device=device) for s, d, k in metas]
        found = iter(outputs)
        grads = [next(found) if wanted else None for wanted in mask]
        ws = torch.empty(elements, dtype=torch.float32, device=device) if sums else None
        compute(x, g, w, mean.contiguous(), rstd.contiguous(), ws, *grads)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch


def resident(call: Call, plan: ChannelPlan) -> Launch:
    t = call.tensors
    n, c = t.input.shape[:2]
    training = getattr(call.params, "use_input_stats", True)
    dense = tuple(s.dense for s in plan.view.steps)
    fixed = (
        *shape_arguments(plan), stride_of(t.weight), n * c, float(plan.view.count),
        training, *dense, *plan.constexprs().values(),
    )  # fmt: skip
    kernel = launcher(planes_backward_kernel, plan.units, {"num_warps": plan.tiling.num_warps})
    finish = Finish(call, 1, coefficients=False)

    def compute(x: Any, g: Any, w: Any, mean: Any, rstd: Any, ws: Any, d: Any, *grads: Any) -> None:
        kernel(x, g, w, mean, rstd, d, ws, *fixed)
        finish(ws, w, rstd, *grads)

    return compute


def sliced(call: Call, plan: ChannelPlan) -> Launch:
    view, tiling, t = plan.view, plan.tiling, call.tensors
    n, c = t.input.shape[:2]
    mask = call.params.output_mask
    training = mask[0] and getattr(call.params, "use_input_stats", True)
    shapes = shape_arguments(plan)
    x_steps, g_steps, _, *sizes = shapes
    dense = tuple(s.dense for s in view.steps)
    constexprs = plan.constexprs()
    counts = (tiling.slices, plan.items, n * c)
    dropped = ("SEGMENT", "PACKED", "STORE_CACHE")
    flags = (*dense[:2], *(v for k, v in constexprs.items() if k not in dropped))
    # The strides of weight, mean and rstd, of which sums_kernel reads the mean's.
    first = (x_steps, g_steps, *sizes, (1, 1, 1), *counts, *flags)
    last = (*shapes, stride_of(t.weight), *counts, training, *dense, *constexprs.values())
    grid, options = plan.units * tiling.slices, {"num_warps": tiling.num_warps}
    sums = launcher(sums_kernel, grid, options) if training or any(mask[1:]) else None
    gradient = launcher(planes_gradient_kernel, grid, options) if mask[0] else None
    finish = Finish(call, tiling.slices, coefficients=training)

    def compute(x: Any, g: Any, w: Any, mean: Any, rstd: Any, ws: Any, d: Any, *grads: Any) -> None:
        if sums is not None:
            sums(x, g, mean, ws, *first)
            finish(ws, w, rstd, *grads)
        if gradient is not None:
            gradient(x, g, w, mean, rstd, d, ws, *last)

    return compute
