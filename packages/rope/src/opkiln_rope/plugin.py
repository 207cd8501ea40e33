"""Registers the rotation kernel as backend `opkiln` of all its ops. Imports no kernel."""

import functools
import importlib.util
import os
from importlib import metadata
from typing import Any

import torch
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


@functools.cache
def device_refusal(device: torch.device) -> Refusal | None:
    """Why Triton kernels do not run on `device`."""
    if importlib.util.find_spec("triton") is None:
        return Refusal("triton is not installed: pip install 'triton>=3.6'")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return Refusal(f"runs on CUDA devices, the tensors are on {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return Refusal(f"needs compute capability 8.0, {device} has {major}.{minor}")
    return None


def supports(call: Call) -> Refusal | None:
    from opkiln_rope.rotation_plan import plan_for

    name, x = next(iter(vars(call.tensors).items()))
    if x.dtype not in DTYPES:
        return Refusal(f"serves float16, bfloat16 and float32, {name} is {x.dtype}")
    try:
        plan_for(call)
    except ValueError as error:
        return Refusal(str(error))
    return device_refusal(call.device)


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
