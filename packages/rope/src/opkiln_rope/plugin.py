"""Registers the rotation kernel as backend `opkiln` of all its ops. Imports no kernel."""

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
OPS = (
    "rope_neox",
    "rope_non_neox",
    "rope_llama31",
    "rope_yarn",
    "rope_longrope",
    "rope_neox_position_ids",
)
FORMS = ("", "_inplace", "_backward")


def supports(call: Call) -> Refusal | None:
    from opkiln_rope.rotation_plan import plan_for

    name, x = next(iter(vars(call.tensors).items()))
    if x.dtype not in DTYPES:
        return Refusal(f"serves float16, bfloat16 and float32, {name} is {x.dtype}")
    try:
        plan_for(call)
    except ValueError as error:
        return Refusal(str(error))
    return triton_refusal(call.device)


def load() -> Prepare:
    from opkiln_rope.rotation import prepare

    return prepare


@hookimpl
def opkiln_implementations() -> list[Any]:
    version = metadata.version("opkiln-rope")
    return [
        Implementation(op + form, "opkiln", version, 1, supports, load, priority=10, traits=TRAITS)
        for op in OPS
        for form in FORMS
    ]
