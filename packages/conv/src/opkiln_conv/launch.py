"""How a planned convolution runs: allocate, pack where the plan says so, multiply."""

from collections.abc import Callable
from typing import Any

import torch
from opkiln.device.triton import launcher

from opkiln_conv.channelwise import channelwise_kernel
from opkiln_conv.conv_plan import ENGINES, ConvPlan, Pack, plan_for
from opkiln_conv.gather import gather_kernel
from opkiln_conv.packed import pack_kernel, packed_kernel
from opkiln_conv.pointwise import pointwise_kernel

KERNELS = {
    "gather": gather_kernel,
    "pointwise": pointwise_kernel,
    "packed": packed_kernel,
    "channelwise": channelwise_kernel,
}
PACK_OPTIONS = {"num_warps": 4}


def options_of(plan: ConvPlan) -> dict[str, int]:
    return {"num_warps": plan.tiling.num_warps, "num_stages": plan.tiling.stages}


class Partials:
    """Where programs that share a tile leave their sums: fresh memory, and counters that are 0
    before and after, kept for each stream, so that two launches at once share none. A captured
    launch, which may run on any stream, has its own.
    """

    def __init__(self, plan: ConvPlan, device: torch.device) -> None:
        self.elements, self.tiles, self.device = plan.partials, plan.tiles, device
        self.kept: dict[int, torch.Tensor] = {}

    def get(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(sums, counters)"""
        if not self.tiles:
            return None, None
        return torch.empty(self.elements, dtype=torch.float32, device=self.device), self.counters()

    def counters(self) -> torch.Tensor:
        cuda = self.device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            return torch.zeros(self.tiles, dtype=torch.int32, device=self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream if cuda else 0
        if stream not in self.kept:
            self.kept[stream] = torch.zeros(self.tiles, dtype=torch.int32, device=self.device)
        return self.kept[stream]


def packer(pack: Pack, dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """A function of (x, w) that returns both as rows of channels."""
    fixed = (*pack.arguments, *pack.constexprs.values())
    run = launcher(pack_kernel, (pack.grid, 1, 1), PACK_OPTIONS, fixed)

    def launch(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        xp = torch.empty(pack.x, dtype=dtype, device=device) if pack.x else None
        wp = torch.empty(pack.w, dtype=dtype, device=device) if pack.w else None
        run(x, w, xp, wp)
        return (x if xp is None else xp), (w if wp is None else wp)

    return launch


def prepare(call: Any) -> Callable[..., torch.Tensor]:
    """Plan a convolution once; the result allocates and launches."""
    (meta,) = call.outputs
    if meta.numel == 0:
        return lambda x, w, bias: meta.empty()
    plan = plan_for(call)
    if not isinstance(plan, ConvPlan):
        run_of: Callable[..., torch.Tensor] = ENGINES[type(plan.tiling)].prepare(call, plan)
        return run_of
    fixed = (*plan.arguments, *plan.constexprs.values())
    kernel = KERNELS[plan.tiling.variant]
    run = launcher(kernel, (plan.grid, 1, 1), options_of(plan), fixed)
    pack = None if plan.pack is None else packer(plan.pack, meta.dtype, call.device)
    partials = Partials(plan, call.device) if plan.tiling.variant != "channelwise" else None

    def launch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = meta.empty()
        if pack is not None:
            x, w = pack(x, w)
        if partials is not None:
            run(x, w, bias, out, *partials.get())
        else:
            run(x, w, bias, out)
        return out

    return launch
