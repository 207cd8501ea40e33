"""Where the families' Triton kernels run."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from opkiln.registry import Refusal


@functools.cache
def triton_refusal(device: torch.device) -> Refusal | None:
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
