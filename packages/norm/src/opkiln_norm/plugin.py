"""Registers the norm kernels as backend `opkiln`. Imports no kernel."""

from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from opkiln.device.triton import triton_refusal
from opkiln.hookspecs import hookimpl
from opkiln.registry import Implementation, Prepare, Refusal
from opkiln.spec import Call

OPKILN_API = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROW_NORMS = (
    "rms_norm",
    "layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_inplace",
    "fused_add_layer_norm",
    "fused_add_layer_norm_inplace",
    "ada_layer_norm",
    "ada_layer_norm_zero",
)
DETERMINISTIC = frozenset({"deterministic"})
ROW_TRAITS = DETERMINISTIC | {"batch_invariant"}
CHANNEL_NORMS = ("batch_norm", "group_norm", "instance_norm")


def supports_row_norm(call: Call) -> Refusal | None:
    from opkiln_norm.row_plan import plan_for

    for name, meta in vars(call.tensors).items():
        if meta is not None and meta.dtype not in DTYPES:
            return Refusal(f"serves float16, bfloat16 and float32, {name} is {meta.dtype}")
    try:
        plan_for(call)
    except ValueError as error:
        return Refusal(str(error))
    return triton_refusal(call.device)


def load_row_norm() -> Prepare:
    from opkiln_norm.row_norm import prepare

    return prepare


def row_norm_candidates(call: Call) -> list[dict[str, Any]]:
    """What `opkiln tune` tries."""
    from opkiln_norm import row_search

    return row_search.candidates(call)


def row_norm(op: str) -> Implementation:
    version = metadata.version("opkiln-norm")
    return Implementation(
        op,
        "opkiln",
        version,
        1,
        supports_row_norm,
        load_row_norm,
        priority=10,
        traits=ROW_TRAITS,
        tilings=row_norm_candidates,
    )


def supports_row_backward(call: Call) -> Refusal | None:
    from opkiln_norm.row_backward_plan import plan_for

    for name, meta in vars(call.tensors).items():
        if meta is not None and meta.dtype not in DTYPES:
            return Refusal(f"serves float16, bfloat16 and float32, {name} is {meta.dtype}")
    try:
        plan_for(call)
    except ValueError as error:
        return Refusal(str(error))
    return triton_refusal(call.device)


def load_row_backward() -> Prepare:
    from opkiln_norm.row_backward_launch import prepare

    return prepare


def row_backward(op: str) -> Implementation:
    """Not batch invariant: which rows a program sums follows their number."""
    version = metadata.version("opkiln-norm")
    return Implementation(
        op,
        "opkiln",
        version,
        1,
        supports_row_backward,
        load_row_backward,
        priority=10,
        traits=DETERMINISTIC,
    )


def supports_channel_norm(call: Call) -> Refusal | None:
    from opkiln_norm import channel_plan

    for name, meta in vars(call.tensors).items():
        if meta is not None and meta.dtype not in DTYPES:
            return Refusal(f"serves float16, bfloat16 and float32, {name} is {meta.dtype}")
    try:
        channel_plan.plan_for(call)
    except ValueError as error:
        return Refusal(str(error))
    return triton_refusal(call.device)


def load_channel_forward() -> Prepare:
    from opkiln_norm.channel_norm import prepare_forward

    return prepare_forward


def load_channel_backward() -> Prepare:
    from opkiln_norm.channel_norm import prepare_backward

    return prepare_backward


def load_planes_backward() -> Prepare:
    from opkiln_norm.channel_planes_launch import prepare

    return prepare


def channel_norm(op: str, loader: Callable[[], Prepare]) -> Implementation:
    """Not batch invariant: tiles follow the number of samples."""
    version = metadata.version("opkiln-norm")
    return Implementation(
        op,
        "opkiln",
        version,
        1,
        supports_channel_norm,
        loader,
        priority=10,
        traits=DETERMINISTIC,
    )


@hookimpl
def opkiln_implementations() -> list[Any]:
    return [
        *[row_norm(op) for op in ROW_NORMS],
        *[row_backward(f"{op}_backward") for op in ROW_NORMS if not op.endswith("_inplace")],
        *[channel_norm(op, load_channel_forward) for op in CHANNEL_NORMS],
        channel_norm("batch_norm_backward", load_channel_backward),
        channel_norm("group_norm_backward", load_planes_backward),
        channel_norm("instance_norm_backward", load_planes_backward),
    ]
