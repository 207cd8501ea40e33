"""quack: CuTe DSL row norms. Its layer norms take float32 weights, which are converted once.

The fused add with layer norm is reached through the operator under `layernorm_fwd`, which hands
over no residual. It has no backward of layer norms.
"""

from __future__ import annotations

from typing import Any

import torch
from opkiln.registry import Implementation, Launch, Prepare
from opkiln.spec import Call

from opkiln_bench.peers.common import Once, all_gradients, as_rows, peer, rms_of_rows, rows_only

BACKEND = "quack"
DISTRIBUTION = "quack-kernels"


def implementations() -> list[Implementation]:
    return peer(
        BACKEND,
        DISTRIBUTION,
        {
            "rms_norm": (rows_only(), load_rms_norm),
            "layer_norm": (rows_only("weight"), load_layer_norm),
            "fused_add_rms_norm": (rows_only("weight"), load_fused_add_rms_norm),
            "fused_add_layer_norm": (rows_only("weight"), load_fused_add_layer_norm),
            "rms_norm_backward": (all_gradients, load_rms_norm_backward),
            "fused_add_rms_norm_backward": (all_gradients, load_fused_add_rms_norm_backward),
        },
    )


def load_rms_norm() -> Prepare:
    from quack.rmsnorm import rmsnorm_fwd

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)
        eps = call.params.eps
        return lambda x, weight: rmsnorm_fwd(x.view(rows), weight, eps=eps)[0].view(shape)

    return prepare


def load_layer_norm() -> Prepare:
    from quack.rmsnorm import layernorm_fwd

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)
        eps = call.params.eps
        wide_weight, wide_bias = Once(torch.float32), Once(torch.float32)

        def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return layernorm_fwd(x.view(rows), wide_weight(weight), wide_bias(bias), eps).view(
                shape
            )

        return launch

    return prepare


def load_fused_add_rms_norm() -> Prepare:
    from quack.rmsnorm import rmsnorm_fwd

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)
        eps = call.params.eps

        def launch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            out, total, _ = rmsnorm_fwd(x.view(rows), weight, None, residual.view(rows), eps=eps)
            return out.view(shape), total.view(shape)

        return launch

    return prepare


def load_fused_add_layer_norm() -> Prepare:
    from quack.rmsnorm import _rmsnorm_fwd

    def prepare(call: Call) -> Launch:
        _, rows = as_rows(call)
        eps, is_layernorm = call.params.eps, True
        wide_weight, wide_bias = Once(torch.float32), Once(torch.float32)

        def launch(x: Any, residual: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            out, total = torch.empty_like(x), torch.empty_like(x)
            _rmsnorm_fwd(
                x.view(rows),
                wide_weight(weight),
                out.view(rows),
                wide_bias(bias),
                None,  # rstd and mean are not wanted
                None,
                residual.view(rows),
                total.view(rows),
                eps,
                is_layernorm,
            )
            return out, total

        return launch

    return prepare


def load_rms_norm_backward() -> Prepare:
    from quack.rmsnorm import rmsnorm_bwd

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)

        def launch(grad: Any, x: Any, weight: Any, rstd: Any) -> Any:
            to_x, to_weight, *_ = rmsnorm_bwd(x.view(rows), weight, grad.view(rows), rstd.flatten())
            return to_x.view(shape), to_weight

        return launch

    return prepare


def load_fused_add_rms_norm_backward() -> Prepare:
    from quack.rmsnorm import rmsnorm_bwd

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)
        kept: list[torch.Tensor] = []

        def launch(grad: Any, grad_total: Any, total: Any, weight: Any) -> Any:
            if not kept:  # the forward's
                kept.append(rms_of_rows(total.view(rows), call.params.eps))
            to_both, to_weight, *_ = rmsnorm_bwd(
                total.view(rows), weight, grad.view(rows), kept[0], grad_total.view(rows)
            )
            return to_both.view(shape), to_weight

        return launch

    return prepare
