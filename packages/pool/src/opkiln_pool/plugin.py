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


def load_pool() -> Prepare:
    from opkiln_pool.variants import prepare

    return prepare


def load_mean_pooling() -> Prepare:
    from opkiln_pool.mean_pooling import prepare

    return prepare


@hookimpl
def opkiln_implementations() -> list[Any]:
    version = metadata.version("opkiln-pool")
    loaders = dict.fromkeys(POOLS, load_pool) | {"mean_pooling": load_mean_pooling}
    return [
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
