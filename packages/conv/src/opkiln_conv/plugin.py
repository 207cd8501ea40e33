"""Registers the convolution kernels as backend `opkiln`. Imports no kernel."""

import math
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
CONVS = ("conv1d", "conv2d", "conv3d")
# Products of an image in IEEE float32 (no matrix units) from which cuDNN is expected to win.
F32_PRODUCTS = 2**25
INDEX_LIMIT = 2**31 - 2**24  # of a 32-bit index whose tile reaches past the end


def supports(call: Call) -> Refusal | None:
    x, out, n = call.tensors.input, call.outputs[0], len(call.params.stride)
    if x.dtype not in DTYPES:
        return Refusal(f"serves float16, bfloat16 and float32, input is {x.dtype}")
    pixels = out.numel // out.shape[-n - 1]
    if pixels > INDEX_LIMIT:
        return Refusal(f"{pixels} outputs a channel do not fit its 32-bit index")
    images = x.shape[0] if x.ndim == n + 2 else 1
    products = out.numel // max(images, 1) * math.prod(call.tensors.weight.shape[1:])
    if x.dtype == torch.float32 and not call.params.allow_tf32 and products > F32_PRODUCTS:
        return Refusal(f"{products} products an image in IEEE float32 are left to cuDNN")
    return triton_refusal(call.device) or speed_refusal(call)


def speed_refusal(call: Call) -> Refusal | None:
    """Where the kernels, without compiled-in sizes, were slower than cuDNN."""
    if call.tensors.input.dtype.itemsize != 2:
        return None
    from opkiln_conv.conv_plan import better_in_cudnn

    what = better_in_cudnn(call)
    return Refusal(f"{what} are left to cuDNN, measured faster") if what else None


def load() -> Prepare:
    from opkiln_conv.launch import prepare

    return prepare


@hookimpl
def opkiln_implementations() -> list[Any]:
    version = metadata.version("opkiln-conv")
    return [
        Implementation(op, "opkiln", version, 1, supports, load, priority=10, traits=TRAITS)
        for op in CONVS
    ]
