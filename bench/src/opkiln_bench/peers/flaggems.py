"""FlagGems: Triton kernels behind ATen's names. Imported only where there is a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from opkiln.registry import Implementation, Launch, Prepare, Refusal
from opkiln.spec import Call

from opkiln_bench.peers.common import even_padding, on_copies, on_gpu, peer, rows_only

BACKEND = "flaggems"
DISTRIBUTION = "flag-gems"


def implementations() -> list[Implementation]:
    return peer(
        BACKEND,
        DISTRIBUTION,
        {
            "rms_norm": (rows_only("weight"), load_rms_norm),
            "layer_norm": (rows_only(), load_layer_norm),
            "fused_add_rms_norm": (rows_only("weight"), load_fused_add_rms_norm),
            "group_norm": (on_gpu, load_group_norm),
            "batch_norm": (with_running_statistics, load_batch_norm),
            "instance_norm": (on_gpu, load_instance_norm),
            "batch_norm_backward": (one_dtype, load_batch_norm_backward),
            "conv1d": (even_padding, load_conv(1)),
            "conv2d": (even_padding, load_conv(2)),
            "conv3d": (even_padding, load_conv(3)),
            "max_pool2d": (batched_window, load_max_pool(with_indices=False)),
            "max_pool2d_indices": (batched_window, load_max_pool(with_indices=True)),
            "avg_pool2d": (batched_window, load_avg_pool),
        },
    )


def with_running_statistics(call: Call) -> Refusal | None:
    if call.tensors.running_mean is None:
        return Refusal("writes its input where running statistics are absent")
    return on_gpu(call)


def one_dtype(call: Call) -> Refusal | None:
    t, p = call.tensors, call.params
    if t.weight is None or t.weight.dtype != t.input.dtype:
        return Refusal("returns weight gradients in the input's dtype")
    if not p.training or not all(p.output_mask):
        return Refusal("takes the training form with all gradients")
    return on_gpu(call)


def batched_window(call: Call) -> Refusal | None:
    if len(call.tensors.input.shape) != 4:
        return Refusal("takes batched input")
    return on_gpu(call)


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


def load_batch_norm_backward() -> Prepare:
    from flag_gems.ops.batch_norm import batch_norm_backward

    def prepare(call: Call) -> Launch:
        mask = list(call.params.output_mask)

        def launch(*t: torch.Tensor) -> Any:
            grad_out, x, weight, mean, rstd = t
            return batch_norm_backward(grad_out, x, weight, None, None, mean, rstd, True, 0.0, mask)

        return launch

    return prepare


def load_conv(ndim: int) -> Callable[[], Prepare]:
    def load() -> Prepare:
        conv = getattr(import_module(f"flag_gems.ops.conv{ndim}d"), f"conv{ndim}d")

        def prepare(call: Call) -> Launch:
            p = call.params
            sizes = (list(p.stride), list(p.padding[::2]), list(p.dilation), p.groups)
            return lambda x, weight, bias: conv(x, weight, bias, *sizes)

        return prepare

    return load


def load_max_pool(with_indices: bool) -> Callable[[], Prepare]:
    """FlagGems has one max pool, with indices: where they are not wanted they are dropped."""

    def load() -> Prepare:
        from flag_gems.ops.max_pool2d_with_indices import max_pool2d_with_indices

        def prepare(call: Call) -> Launch:
            pool = partial(max_pool2d_with_indices, **vars(call.params))
            return pool if with_indices else lambda x: pool(x)[0]

        return prepare

    return load


def load_avg_pool() -> Prepare:
    from flag_gems.ops.avg_pool2d import avg_pool2d

    def prepare(call: Call) -> Launch:
        return partial(avg_pool2d, **vars(call.params))

    return prepare
