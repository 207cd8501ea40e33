"""The 13 ops of the family as rows of one table, and how a row is prepared."""

from collections.abc import Callable
from typing import Any

import torch
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher

from opkiln_pool import window_cuda
from opkiln_pool.adaptive_strip import strip_kernel
from opkiln_pool.plane_rows import plane_kernel
from opkiln_pool.pool_plan import plan_for
from opkiln_pool.window_patch import patch_kernel
from opkiln_pool.window_taps import taps_kernel

KERNELS = {
    "patch": patch_kernel,
    "taps": taps_kernel,
    "plane": plane_kernel,
    "strip": strip_kernel,
}


def prepare(call: Any) -> Callable[..., Any]:
    """Plan a pool call once; the result allocates and launches."""
    launch_cuda = window_cuda.prepare(call)
    if launch_cuda is not None:
        return launch_cuda
    plan = plan_for(call)
    kernel = KERNELS[plan.tiling.variant]
    indexed = call.spec.name.endswith("_indices")
    fixed = (*plan.arguments, *plan.constexprs.values())
    run = launcher(kernel, (plan.grid, 1, 1), {"num_warps": plan.tiling.num_warps}, fixed)
    allocate = allocator(call.device, call.outputs)

    def launch(x: torch.Tensor) -> Any:
        outputs = allocate()
        index = outputs[1] if indexed else None
        offset = outputs[-1] if len(outputs) > 1 + indexed else None
        run(x, outputs[0], index, offset)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch
