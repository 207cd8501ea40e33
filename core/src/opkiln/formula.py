"""The torch formula as a road of its own: under vmap, jvp, functional gradients and forward AD.

It owes what every other road owes: the same checks, the same policy, the same autocast.
"""

from __future__ import annotations

from typing import Any

import torch

from opkiln.dispatch import refusal
from opkiln.errors import BackendError
from opkiln.meta import INDEX, is_readable
from opkiln.policy import Policy
from opkiln.registry import REGISTRY
from opkiln.spec import Call, OpSpec
from opkiln.torch_backend import torch_formula

BACKENDS = ("torch", "torch-ref")
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

Tensors = tuple[Any, ...]


def checked_formula(spec: OpSpec, tensors: Tensors, params: dict[str, Any], policy: Policy) -> Any:
    """Validate as for any call, cast as autocast does, compute. Raises as dispatch does."""
    refuse_other_backends(spec, policy)
    readable = all(t is None or t.dtype not in INDEX or is_readable(t) for t in tensors)
    size = spec.data_size
    if readable and size is not None and size.missing(spec, tensors, params):
        params = params | {size.param: size.compute(*tensors, **params)}
    device_type = next(t.device.type for t in tensors if t is not None)
    if torch.is_autocast_enabled(device_type):
        tensors = autocast(spec, tensors, device_type)
    call = Call.of(spec, tensors, params, policy, real=False)
    no = refusal(REGISTRY.of(spec.name)["torch"], call)
    if no is not None:
        raise BackendError(f"{spec.name}: no backend takes this call (torch: {no.reason})")
    check = spec.check_values
    if check is not None and readable and (device_type == "cpu" or policy.checks):
        check(*tensors, **params)
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        return torch_formula(spec, tensors, params)


def refuse_other_backends(spec: OpSpec, policy: Policy) -> None:
    """A backend that was named strictly must be one that computes the formula."""
    wanted = policy.backends_for(spec.name)
    if policy.strict and wanted and not set(wanted) & set(BACKENDS):
        raise BackendError(
            f"{spec.name}: backend {', '.join(wanted)} cannot serve function transforms, "
            f"forward-mode AD or gradients of this op; allowed: {', '.join(BACKENDS)}"
        )


def autocast(spec: OpSpec, tensors: Tensors, device_type: str) -> Tensors:
    """The floating-point tensors as torch.autocast would cast them for this op."""
    if spec.autocast is None:
        return tensors
    lower = torch.get_autocast_dtype(device_type)
    dtype = torch.float32 if spec.autocast == "fp32" else lower
    return tuple(_cast(t, dtype) for t in tensors)


def _cast(t: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if t is None or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(dtype)
