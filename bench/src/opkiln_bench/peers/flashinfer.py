"""flashinfer: CUDA row norms for 16-bit inputs, built by nvcc at first use.

Its layer norm takes bfloat16 with float32 weights, which are converted once; its fused add works in
place, on copies.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from opkiln.registry import Implementation, Launch, Prepare
from opkiln.spec import Call

from opkiln_bench.peers.common import HALF, Once, as_rows, on_copies, peer, rows_only


def implementations() -> list[Implementation]:
    bf16 = (torch.bfloat16,)
    return peer(
        "flashinfer",
        "flashinfer-python",
        {
            "rms_norm": (rows_only("weight", dtypes=HALF), load_rms_norm),
            "layer_norm": (rows_only("weight", "bias", dtypes=bf16), load_layer_norm),
            "fused_add_rms_norm": (rows_only("weight", dtypes=HALF), load_fused_add_rms_norm),
        },
    )


def load_rms_norm() -> Prepare:
    import flashinfer

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)
        eps = call.params.eps
        return lambda x, weight: flashinfer.rmsnorm(x.view(rows), weight, eps).view(shape)

    return prepare


def load_layer_norm() -> Prepare:
    from flashinfer.norm import layernorm

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)
        eps = call.params.eps
        wide_weight, wide_bias = Once(torch.float32), Once(torch.float32)

        def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
            return layernorm(x.view(rows), wide_weight(weight), wide_bias(bias), eps).view(shape)

        return launch

    return prepare


def load_fused_add_rms_norm() -> Prepare:
    import flashinfer

    def prepare(call: Call) -> Launch:
        return on_copies(partial(flashinfer.fused_add_rmsnorm, eps=call.params.eps))

    return prepare
