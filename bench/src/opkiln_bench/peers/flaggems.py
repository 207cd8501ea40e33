"""FlagGems: Triton kernels behind ATen's names. Imported only where there is a GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from opkiln.registry import Implementation, Launch, Prepare, Refusal, inference_only
from opkiln.spec import Call

from opkiln_bench.peers.common import on_copies, peer, rows_only


def implementations() -> list[Implementation]:
    return peer(
        "flaggems",
        "flag-gems",
        {
            "rms_norm": (rows_only("weight"), load_rms_norm),
            "layer_norm": (rows_only(), load_layer_norm),
            "fused_add_rms_norm": (rows_only("weight"), load_fused_add_rms_norm),
            "group_norm": (contiguous_on_cuda, load_group_norm),
            "batch_norm": (with_running_statistics, load_batch_norm),
            "instance_norm": (contiguous_on_cuda, load_instance_norm),
        },
    )


def contiguous_on_cuda(call: Call) -> Refusal | None:
    if call.device.type != "cuda":
        return Refusal("needs a CUDA GPU")
    if not all(t is None or t.is_contiguous for t in vars(call.tensors).values()):
        return Refusal("takes contiguous tensors")
    return inference_only(call)


def with_running_statistics(call: Call) -> Refusal | None:
    if call.tensors.running_mean is None:
        return Refusal("writes its input where running statistics are absent")
    return contiguous_on_cuda(call)


def load_rms_norm() -> Prepare:
    from flag_gems.ops.rms_norm import rms_norm_forward

    def prepare(call: Call) -> Launch:
        shape, eps = call.params.normalized_shape, call.params.eps
        return lambda x, weight: rms_norm_forward(x, shape, weight, eps)[0]

    return prepare


def load_layer_norm() -> Prepare:
    from flag_gems.ops.layernorm import layer_norm

    def prepare(call: Call) -> Launch:
        shape, eps = call.params.normalized_shape, call.params.eps
        return lambda x, weight, bias: layer_norm(x, shape, weight, bias, eps)[0]

    return prepare


def load_fused_add_rms_norm() -> Prepare:
    from flag_gems.fused.fused_add_rms_norm import fused_add_rms_norm

    def prepare(call: Call) -> Launch:
        shape, eps = call.params.normalized_shape, call.params.eps

        def inplace(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            return fused_add_rms_norm(x, residual, shape, weight, eps)

        return on_copies(inplace)

    return prepare


def load_group_norm() -> Prepare:
    from flag_gems.ops.groupnorm import group_norm

    def prepare(call: Call) -> Launch:
        n, c, *space = call.tensors.input.shape
        sizes = (n, c, math.prod(space), call.params.num_groups, call.params.eps)
        return lambda x, weight, bias: group_norm(x, weight, bias, *sizes)[0]

    return prepare


def load_batch_norm() -> Prepare:
    from flag_gems.ops.batch_norm import batch_norm

    def prepare(call: Call) -> Launch:
        p = call.params
        run = partial(batch_norm, training=p.training, momentum=p.momentum, eps=p.eps)
        return lambda x, mean, var, weight, bias: run(x, weight, bias, mean, var)[0]

    return prepare


def load_instance_norm() -> Prepare:
    from flag_gems.fused.instance_norm import instance_norm

    def prepare(call: Call) -> Launch:
        p = call.params
        rule = (p.use_input_stats, p.momentum, p.eps)
        return lambda x, mean, var, weight, bias: instance_norm(x, weight, bias, mean, var, *rule)

    return prepare
