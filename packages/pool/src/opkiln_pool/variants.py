"""The 13 ops of the family as rows of one table, and how a row is prepared."""

from collections.abc import Callable
from typing import Any

import torch

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
    plan = plan_for(call)
    kernel = KERNELS[plan.tiling.variant]
    metas = [(m.shape, m.stride, m.dtype) for m in call.outputs]
    device = call.device
    indexed = call.spec.name.endswith("_indices")
    grid = (plan.grid, 1, 1)
    fixed = (*plan.arguments, *plan.constexprs.values())
    options = {"num_warps": plan.tiling.num_warps}
    compiled: Callable[..., Any] | None = None

    def launch(x: torch.Tensor) -> Any:
        nonlocal compiled
        outputs = [torch.empty_strided(s, t, dtype=d, device=device) for s, t, d in metas]
        index = outputs[1] if indexed else None
        offset = outputs[-1] if len(outputs) > 1 + indexed else None
        if compiled is not None:
            compiled(x, outputs[0], index, offset, *fixed)
        else:
            found = kernel[grid](x, outputs[0], index, offset, *fixed, **options)
            # The plan fixes all that Triton chooses a binary by. The interpreter has none.
            compiled = found[grid] if found is not None else None
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch
