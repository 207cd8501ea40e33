"""Registers the pooling kernels as backend `opkiln`. Imports no kernel."""

from importlib import metadata
from typing import Any

import torch
from opkiln.device.triton import triton_refusal
from opkiln.hookspecs import hookimpl
from opkiln.registry import Implementation, Prepare, Refusal
from opkiln.spec import Call

OPKILN_API = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRAITS = frozenset({"deterministic", "batch_invariant"})
POOLS = (
    *(f"avg_pool{n}d" for n in (1, 2, 3)),
    *(f"max_pool{n}d{indices}" for n in (1, 2, 3) for indices in ("", "_indices")),
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "adaptive_max_pool2d_indices",
)


def supports(call: Call) -> Refusal | None:
    x = call.tensors.input
    if x.dtype not in DTYPES:
        return Refusal(f"serves float16, bfloat16 and float32, input is {x.dtype}")
    if call.spec.name.endswith(("pool3d", "pool3d_indices")) and x.ndim == 4 and x.channels_last:
        return Refusal("an unbatched volume with its depth innermost in memory")
    return triton_refusal(call.device)


def candidates(call: Call) -> list[dict[str, Any]]:
    """What `opkiln tune` tries."""
    from opkiln_pool import pool_search

    return pool_search.candidates(call)


def supports_backward(call: Call) -> Refusal | None:
    grad, offset = call.tensors.grad_out, getattr(call.tensors, "offset", None)
    if grad.dtype not in DTYPES:
        return Refusal(f"serves float16, bfloat16 and float32, grad_out is {grad.dtype}")
    if offset is not None and offset.shape != grad.shape:
        return Refusal(f"grad_out is {list(grad.shape)}, but offset {list(offset.shape)}")
    if grad.numel == 0:
        return Refusal("no window has a gradient")
    if "pool3d" in call.spec.name and grad.ndim == 4 and grad.channels_last:
        return Refusal("an unbatched volume with its depth innermost in memory")
    if call.spec.name.startswith("mean") and grad.channels_last:
        return Refusal("gradients whose chunks are innermost in memory")
    return triton_refusal(call.device)


def load_pool() -> Prepare:
    from opkiln_pool.variants import prepare

    return prepare


def load_mean_pooling() -> Prepare:
    from opkiln_pool.mean_pooling import prepare

    return prepare


def load_pool_backward() -> Prepare:
    from opkiln_pool.pool_backward import prepare

    return prepare


def load_mean_backward() -> Prepare:
    from opkiln_pool.mean_backward import prepare

    return prepare


def backwards() -> list[Implementation]:
    version = metadata.version("opkiln-pool")
    loaders = dict.fromkeys(POOLS, load_pool_backward) | {"mean_pooling": load_mean_backward}
    return [
        Implementation(
            f"{op}_backward",
            "opkiln",
            version,
            1,
            supports_backward,
            loader,
            priority=10,
            traits=TRAITS,
        )
        for op, loader in loaders.items()
    ]


@hookimpl
def opkiln_implementations() -> list[Any]:
    version = metadata.version("opkiln-pool")
    loaders = dict.fromkeys(POOLS, load_pool) | {"mean_pooling": load_mean_pooling}
    forwards = [
        Implementation(
            op,
            "opkiln",
            version,
            1,
            supports,
            loader,
            priority=10,
            traits=TRAITS,
            tilings=candidates,
        )
        for op, loader in loaders.items()
    ]
    return [*forwards, *backwards()]
