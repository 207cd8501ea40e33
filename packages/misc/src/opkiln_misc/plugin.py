"""Registers the kernels of FFT, MHC and top-k as backend `opkiln`. Imports no kernel."""

import importlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from opkiln.device import cuda
from opkiln.device.triton import triton_refusal
from opkiln.hookspecs import hookimpl
from opkiln.registry import Implementation, Prepare, Refusal
from opkiln.spec import Call

OPKILN_API = 1
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CUDA_DTYPES = {
    "mhc_pre": DTYPES,
    "fft": (torch.complex64, torch.complex128),
    "fft_backward": (torch.complex64, torch.complex128),
    "topk_selector": (torch.float32,),
}
MODULES = {
    "mhc_post": "mhc_post",
    "mhc_post_backward": "mhc_post_backward",
    "mhc_pre": "mhc_pre",
    "mhc_pre_backward": "mhc_pre_backward",
    "fft": "fft",
    "fft_backward": "fft",
    "topk_selector": "topk",
}
TRITON_BACKWARDS = ("mhc_post_backward", "mhc_pre_backward")
TRAITS = frozenset({"deterministic", "batch_invariant"})
EXTRA = "opkiln-misc[cu13]"  # brings NVRTC and what launches its kernels


def cuda_refusal(device: torch.device) -> Refusal | None:
    """Why the CUDA C++ kernels do not run on `device`."""
    reason = cuda.why_not(device, EXTRA)
    return None if reason is None else Refusal(reason)


def supports_mhc_post(call: Call) -> Refusal | None:
    res, layer = call.tensors.x_res, call.tensors.x_layer_out
    if res.dtype not in DTYPES:
        return Refusal(f"serves float16, bfloat16 and float32, x_res is {res.dtype}")
    if res.shape[1] > 2**31 - 2**12 or call.tensors.h_post.shape[1] > 65535:
        return Refusal(f"rows of {res.shape[1]} elements do not fit its 32-bit columns")
    if layer.shape[1] > 65535 * 256:
        return Refusal(f"serves up to {65535 * 256} columns a stream, not {layer.shape[1]}")
    return triton_refusal(call.device)


def supports_triton_backward(call: Call) -> Refusal | None:
    """For the backwards whose kernels are Triton: what their planner says, then the device."""
    for name, meta in vars(call.tensors).items():
        if meta.dtype not in DTYPES:
            return Refusal(f"serves float16, bfloat16 and float32, {name} is {meta.dtype}")
    try:
        planner(call.spec.name).plan_for(call)
    except ValueError as error:
        return Refusal(str(error))
    return triton_refusal(call.device)


def supports_cuda(call: Call) -> Refusal | None:
    """For the ops whose kernel is CUDA C++: what its planner says, then what the device says."""
    first = next(iter(vars(call.tensors).values()))
    dtypes = CUDA_DTYPES[call.spec.name]
    lead = call.tensors.x if call.spec.name == "mhc_pre" else first
    if lead.dtype not in dtypes:
        return Refusal(f"serves {', '.join(map(str, dtypes))}, got {lead.dtype}")
    try:
        planner(call.spec.name).plan_for(call)
    except ValueError as error:
        return Refusal(str(error))
    return cuda_refusal(call.device)


def planner(op: str) -> Any:
    """The module that plans and launches `op`."""
    return importlib.import_module(f"opkiln_misc.{MODULES[op]}")


def loader(op: str) -> Callable[[], Prepare]:
    return lambda: planner(op).prepare


def implementation(op: str) -> Implementation:
    """The gradient of mhc_pre is not batch invariant: which rows are added up together follows
    their number.
    """
    supports = supports_cuda if op in CUDA_DTYPES else supports_mhc_post
    if op in TRITON_BACKWARDS:
        supports = supports_triton_backward
    traits = TRAITS - {"batch_invariant"} if op == "mhc_pre_backward" else TRAITS
    version = metadata.version("opkiln-misc")
    return Implementation(
        op, "opkiln", version, 1, supports, loader(op), priority=10, traits=traits
    )


@hookimpl
def opkiln_implementations() -> list[Any]:
    return [implementation(op) for op in MODULES]
