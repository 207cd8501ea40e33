"""The backwards of the 12 window and adaptive pools as rows of one table, and how one is prepared.

grad_out and, for maxima, the saved offset of each window's winning tap [the pool's output] ->
grad_input [input_shape] in grad_out's dtype, channels_last iff grad_out is. Each element gathers
from the windows that hold it, in a fixed order, in f32: no atomics.
"""

from collections.abc import Callable
from typing import Any

import torch
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher

from opkiln_pool.adaptive_bands import bands_kernel
from opkiln_pool.backward_plan import BackwardTiling, plan_for
from opkiln_pool.plane_spread import spread_kernel
from opkiln_pool.window_cells import cells_kernel
from opkiln_pool.window_gather import gather_kernel

KERNELS = {
    "cells": cells_kernel,
    "gather": gather_kernel,
    "spread": spread_kernel,
    "bands": bands_kernel,
}


def prepare(call: Any, tiling: BackwardTiling | None = None) -> Callable[..., Any]:
    """Plan a pool's backward once; the result allocates and launches."""
    if not call.outputs:  # the mask wants no gradient
        return lambda *tensors: ()
    plan = plan_for(call, tiling)
    kernel = KERNELS[plan.tiling.variant]
    run = launcher(kernel, (plan.grid, 1, 1), {"num_warps": plan.tiling.num_warps}, plan.arguments)
    allocate = allocator(call.device, call.outputs)

    def launch(g: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        (out,) = allocate()
        run(g, offset, out)
        return out

    return launch
