"""Liger: Triton row norms. casting_mode gemma: everything in float32, as our spec."""

from __future__ import annotations

from typing import Any

import torch
from opkiln.registry import Implementation, Launch, Prepare
from opkiln.spec import Call

from opkiln_bench.peers.common import peer, rows_only

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
