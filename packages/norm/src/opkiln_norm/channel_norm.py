"""Channel norms: plans a call once, then allocates and launches.

batch_norm, group_norm, instance_norm and batch_norm_backward; the kernels are in channel_forward,
channel_slices and channel_backward.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from opkiln.device import triton
from opkiln.spec import Call, TensorMeta

from opkiln_norm import channel_cuda
from opkiln_norm.channel_backward import (
    gradient_kernel,
    resident_backward_kernel,
    sums_kernel,
)
from opkiln_norm.channel_forward import resident_kernel
from opkiln_norm.channel_plan import ChannelPlan, backward_plan, forward_plan
from opkiln_norm.channel_slices import apply_kernel, average_kernel, moments_kernel
from opkiln_norm.channel_stream import stream_backward_kernel, stream_kernel
from opkiln_norm.row_plan import multiprocessors, power_of_two

Launch = Callable[..., Any]
AVERAGE_BLOCK = 128
NOT_IN_FIRST_PASS = ("SEGMENT", "CHANNEL", "PACKED", "STORE_CACHE")


def launcher(kernel: Any, grid: int, options: dict[str, Any]) -> Launch:
    """The kernel on a fixed grid; the plan fixes all of its arguments but the tensors."""
    return triton.launcher(kernel, (grid, 1, 1), options)


def stride_of(meta: TensorMeta | None) -> int:
    return 1 if meta is None else meta.stride[0]


def shape_arguments(plan: ChannelPlan) -> tuple[Any, ...]:
    """The kernels' run-time arguments from the tensors' steps to per_group."""
    v, c = plan.view, plan.constexprs()
    return (
        *(s.nested for s in v.steps),
        v.outer_sizes,
        v.col_sizes,
        v.rows // c["ALIGN_I"],
        v.cols // c["ALIGN_J"],
        plan.row_blocks,
        v.channels,
        v.per_group,
    )


def sliced(plan: ChannelPlan, device: torch.device) -> ChannelPlan:
    """A streaming plan with as many slices as there are programs on this device."""
    t = plan.tiling
    if not t.stream:
        return plan
    return replace(plan, tiling=replace(t, slices=t.stream * multiprocessors(device)))


class Slices:
    """A call in slices: its two passes, or its one persistent kernel, and their workspace."""

    def __init__(self, plan: ChannelPlan, planes: int, kernels: tuple[Any, Any, Any]) -> None:
        first, second, stream = kernels
        v, t = plan.view, plan.tiling
        self.sets = v.outer * (1 if v.pool else v.rows)
        self.units, self.stream, self.given = plan.units, bool(t.stream), plan.given
        self.elements = 0 if plan.given else planes * self.sets * t.slices
        self.counts = (t.slices, plan.items, self.sets)
        self.width = power_of_two(t.slices)
        self.kept: dict[int, torch.Tensor] = {}
        options: dict[str, Any] = {"num_warps": t.num_warps}
        if self.stream:
            options["launch_cooperative_grid"] = True
            self.persistent = launcher(stream, t.slices, options)
        else:
            grid = plan.units * t.slices
            self.first, self.second = (launcher(k, grid, options) for k in (first, second))

    def counters(self, device: torch.device) -> torch.Tensor:
        """Zeros, and zeros again after the kernel: kept for each stream, so that two launches that
        run at once share none. A captured launch, which may run on any stream, has its own.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(self.units + 1, dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if stream not in self.kept:
            self.kept[stream] = torch.zeros(self.units + 1, dtype=torch.int32, device=device)
        return self.kept[stream]

    def workspace(self, device: torch.device) -> torch.Tensor | None:
        if self.given:
            return None
        return torch.empty(self.elements, dtype=torch.float32, device=device)


def prepare_forward(call: Call) -> Launch:
    """Plan a batch_norm, group_norm or instance_norm call."""
    launch_cuda = channel_cuda.prepare(call)
    if launch_cuda is not None:
        return launch_cuda
    plan = sliced(forward_plan(call), call.device)
    view, params, t = plan.view, call.params, call.tensors
    running = getattr(t, "running_mean", None) is not None
    update = running and not plan.given
    average = update and call.spec.name == "instance_norm" and not view.averaged
    device = call.device
    metas = [(m.shape, m.stride, m.dtype) for m in call.outputs]
    names = ("running_mean", "running_var", "weight", "bias")
    strides = tuple(stride_of(getattr(t, n, None)) for n in names)
    n, c = t.input.shape[:2]
    saved = call.outputs[1].numel if len(call.outputs) > 1 else n * c
    scalars = (
        (*view.statistics, saved), strides, float(view.count), float(params.eps),
        float(getattr(params, "momentum", 0.0)),
    )  # fmt: skip
    shapes = shape_arguments(plan)
    compute = forward_slices(plan, shapes, scalars) if plan.tiling.slices else (
        forward_resident(plan, shapes, scalars)
    )  # fmt: skip
    blocks = -(-c // AVERAGE_BLOCK)
    take_average = launcher(average_kernel, blocks, {"num_warps": 4}) if average else None
    group_norm = call.spec.name == "group_norm"

    def launch(x: torch.Tensor, *rest: torch.Tensor | None) -> Any:
        rm, rv, w, b = (None, None, *rest) if group_norm else rest
        outputs = [torch.empty_strided(s, d, dtype=k, device=device) for s, d, k in metas]
        mean, rstd = outputs[1:] if len(outputs) > 1 else (None, None)
        moment = None
        if take_average is not None:
            mean = torch.empty(n * c, dtype=torch.float32, device=device) if mean is None else mean
            moment = torch.empty(n * c, dtype=torch.float32, device=device)
            compute(x, None, None, w, b, outputs[0], mean, rstd, moment)
            take_average(
                mean, moment, rm, rv, *strides[:2], n, c, float(view.count), scalars[-1],
                AVERAGE_BLOCK,
            )  # fmt: skip
        else:
            compute(x, rm, rv, w, b, outputs[0], mean, rstd, moment)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch


def forward_resident(plan: ChannelPlan, shapes: Any, scalars: Any) -> Launch:
    dense = tuple(s.dense for s in plan.view.steps)
    fixed = (*shapes, *scalars, plan.view.averaged, *dense, *plan.constexprs().values())
    kernel = launcher(resident_kernel, plan.units, {"num_warps": plan.tiling.num_warps})
    return lambda *tensors: kernel(*tensors, *fixed)


def forward_slices(plan: ChannelPlan, shapes: Any, scalars: Any) -> Launch:
    run = Slices(plan, 3, (moments_kernel, apply_kernel, stream_kernel))
    dense = tuple(s.dense for s in plan.view.steps)
    constexprs = plan.constexprs()
    first = first_pass(constexprs)
    x_steps, _, *sizes, _, _ = shapes
    flags = (plan.given, run.width, *dense, *constexprs.values())

    def compute(x: torch.Tensor, *rest: torch.Tensor | None) -> None:
        ws = run.workspace(x.device)
        if run.stream:
            counters = run.counters(x.device)
            run.persistent(
                x, *rest, ws, *shapes, *scalars, *run.counts, counters, run.units, *flags
            )
            return
        if not run.given:
            run.first(x, ws, x_steps, *sizes, *run.counts, dense[0], *first)
        run.second(x, *rest, ws, *shapes, *scalars, *run.counts, *flags)

    return compute


def first_pass(constexprs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(v for k, v in constexprs.items() if k not in NOT_IN_FIRST_PASS)


def prepare_backward(call: Call) -> Launch:
    """Plan a batch_norm_backward call."""
    launch_cuda = channel_cuda.prepare(call)
    if launch_cuda is not None:
        return launch_cuda
    plan = sliced(backward_plan(call), call.device)
    view, t, training = plan.view, call.tensors, call.params.training
    device = call.device
    metas = [(m.shape, m.stride, m.dtype) for m in call.outputs]
    mask = call.params.output_mask
    strides = tuple(stride_of(m) for m in (t.weight, t.mean, t.rstd))
    shapes = shape_arguments(plan)
    scalars = (strides, float(view.count))
    sliced_plan = bool(plan.tiling.slices)
    make = backward_slices if sliced_plan else backward_resident
    compute = make(plan, shapes, scalars, training)

    def launch(
        g: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor | None,
        mean: torch.Tensor,
        rstd: torch.Tensor,
    ) -> Any:
        outputs = [torch.empty_strided(s, d, dtype=k, device=device) for s, d, k in metas]
        given = iter(outputs)
        grads = [next(given) if wanted else None for wanted in mask]
        compute(x, g, w, mean, rstd, *grads)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch


def backward_resident(plan: ChannelPlan, shapes: Any, scalars: Any, training: bool) -> Launch:
    dense = tuple(s.dense for s in plan.view.steps)
    fixed = (*shapes, *scalars, training, *dense, *plan.constexprs().values())
    kernel = launcher(resident_backward_kernel, plan.units, {"num_warps": plan.tiling.num_warps})
    return lambda *tensors: kernel(*tensors, *fixed)


def backward_slices(plan: ChannelPlan, shapes: Any, scalars: Any, training: bool) -> Launch:
    run = Slices(plan, 2, (sums_kernel, gradient_kernel, stream_backward_kernel))
    dense = tuple(s.dense for s in plan.view.steps)
    constexprs = plan.constexprs()
    dropped = ("SEGMENT", "PACKED", "STORE_CACHE")
    first = tuple(v for k, v in constexprs.items() if k not in dropped)
    x_steps, g_steps, _, *sizes = shapes
    strides, _ = scalars
    flags = (training, run.width, *dense, *constexprs.values())

    def compute(x: torch.Tensor, g: torch.Tensor, *rest: torch.Tensor | None) -> None:
        ws = run.workspace(x.device)
        if run.stream:
            counters = run.counters(x.device)
            run.persistent(
                x, g, *rest, ws, *shapes, *scalars, *run.counts, counters, run.units, *flags
            )
            return
        mean = rest[1]
        run.first(
            x, g, mean, ws, x_steps, g_steps, *sizes, strides, *run.counts, *dense[:2], *first
        )
        run.second(x, g, *rest, ws, *shapes, *scalars, *run.counts, *flags)

    return compute
