"""Liger: Triton row norms. casting_mode gemma: everything in float32, as our spec.

Its RMS norms' backwards write the gradient over the one that comes in, as their layers do; told to
make a new one, rms_norm_backward fills it with zeros first.
"""

from __future__ import annotations

from typing import Any

import torch
from opkiln.registry import Implementation, Launch, Prepare
from opkiln.spec import Call

from opkiln_bench.peers.common import (
    all_gradients,
    as_rows,
    over_gradient,
    peer,
    rms_of_rows,
    rows_only,
)

BACKEND = "liger"
DISTRIBUTION = "liger-kernel"

ALL_FLOAT32 = "gemma"
NO_OFFSET = 0.0


def implementations() -> list[Implementation]:
    return peer(
        BACKEND,
        DISTRIBUTION,
        {
            "rms_norm": (rows_only(), load_rms_norm),
            "layer_norm": (rows_only("weight", "bias"), load_layer_norm),
            "fused_add_rms_norm": (rows_only("weight"), load_fused_add_rms_norm),
            "rms_norm_backward": (all_gradients, load_rms_norm_backward),
            "layer_norm_backward": (all_gradients, load_layer_norm_backward),
            "fused_add_rms_norm_backward": (all_gradients, load_fused_add_rms_norm_backward),
        },
    )


def load_rms_norm() -> Prepare:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def prepare(call: Call) -> Launch:
        eps = call.params.eps
        return lambda x, weight: rms_norm_forward(x, weight, eps, NO_OFFSET, ALL_FLOAT32, None)[0]

    return prepare


def load_layer_norm() -> Prepare:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    def prepare(call: Call) -> Launch:
        eps = call.params.eps
        return lambda x, weight, bias: layer_norm_forward(x, weight, bias, eps)[0]

    return prepare


def load_fused_add_rms_norm() -> Prepare:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    def prepare(call: Call) -> Launch:
        eps = call.params.eps

        def launch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            return fused_add_rms_norm_forward(x, residual, weight, eps, NO_OFFSET, ALL_FLOAT32)[:2]

        return launch

    return prepare


GEMMA = 1  # the number of casting mode gemma, which the kernels take
BY_ROWS = None  # row_mode: as Liger chooses
IN_PLACE = True


def settings(call: Call) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows as [rows, normalized]; block size and warps, which its forwards keep."""
    from liger_kernel.ops.utils import calculate_settings

    _, rows = as_rows(call)
    return rows, calculate_settings(rows[1])


def load_rms_norm_backward() -> Prepare:
    from liger_kernel.ops.rms_norm import rms_norm_backward

    def prepare(call: Call) -> Launch:
        rows, block_and_warps = settings(call)

        def backward(grad: Any, x: Any, weight: Any, rstd: Any) -> Any:
            more = (NO_OFFSET, GEMMA, *block_and_warps, IN_PLACE, BY_ROWS)
            return rms_norm_backward(grad, x.view(rows), weight, rstd.flatten(), *more)

        return over_gradient(backward)

    return prepare


def load_layer_norm_backward() -> Prepare:
    from liger_kernel.ops.layer_norm import layer_norm_backward

    def prepare(call: Call) -> Launch:
        _, rows = as_rows(call)

        def launch(grad: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
            bias = weight  # only its dtype is read
            statistics = (mean.flatten(), rstd.flatten())
            return layer_norm_backward(grad, x.view(rows), weight, bias, *statistics)

        return launch

    return prepare


def load_fused_add_rms_norm_backward() -> Prepare:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_backward

    stages = 2  # as its forward hands over

    def prepare(call: Call) -> Launch:
        rows, block_and_warps = settings(call)
        kept: list[torch.Tensor] = []

        def backward(grad: Any, grad_total: Any, total: Any, weight: Any) -> Any:
            if not kept:  # the forward's
                kept.append(rms_of_rows(total.view(rows), call.params.eps))
            more = (NO_OFFSET, GEMMA, *block_and_warps, stages, IN_PLACE)
            args = (grad, grad_total, total.view(rows), weight, kept[0], *more)
            to_both, _, to_weight = fused_add_rms_norm_backward(*args)
            return to_both, to_weight

        return over_gradient(backward)

    return prepare
