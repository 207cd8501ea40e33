"""One torch operator per spec: kernels, fake, autograd and autocast, all derived from it.

`Library.define` and `impl` instead of `custom_op`: 4 against 12 us a call on the H200 host, and
`custom_op` refuses autograd on operators that mutate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkiln.autograd import autograd_kernel
from opkiln.dispatch import plan
from opkiln.formula import AUTOCAST, autocast
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.schema import NAMESPACE, operator, pack, schema, split
from opkiln.spec import Call, OpSpec

BACKENDS = ("CPU", "CUDA")
AUTOCAST_KEYS = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
_library = torch.library.Library(NAMESPACE, "DEF")


def real_kernel(spec: OpSpec) -> Callable[..., Any]:
    """The CPU and CUDA kernel: plan, launch."""

    def kernel(*args: Any, save: bool = False, policy: str = "") -> Any:
        tensors, params = split(spec, args)
        size = spec.data_size
        if size is not None and size.missing(spec, tensors, params):
            params[size.param] = size.compute(*tensors, **params)
        made = plan(spec, tensors, params, Policy.decode(policy), save)
        return pack(made.call, made.launch(*tensors))

    return kernel


def fake_kernel(spec: OpSpec) -> Callable[..., Any]:
    """Shapes, dtypes and strides without data, straight from the spec's output rules."""

    def kernel(*args: Any, save: bool = False, policy: str = "") -> Any:
        tensors, params = split(spec, args)
        size = spec.data_size
        if size is not None and size.missing(spec, tensors, params):
            params[size.param] = torch.library.get_ctx().new_dynamic_size()
        call = Call.of(spec, tensors, params, Policy.decode(policy), save, real=False)
        outs = tuple(m.empty() for m in call.outputs)
        return pack(call, outs[0] if len(outs) == 1 else outs)

    return kernel


def autocast_kernel(spec: OpSpec, device_type: str) -> Callable[..., Any]:
    """Cast the floating-point tensors as torch.autocast would, then go on without autocast."""

    def kernel(*args: Any, save: bool = False, policy: str = "") -> Any:
        n = len(spec.tensors)
        cast = autocast(spec, args[:n], device_type)
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return operator(spec)(*cast, *args[n:], save=save, policy=policy)

    return kernel


def register(spec: OpSpec) -> None:
    """Define the operator of a spec and its kernels."""
    tags = (torch.Tag.pt2_compliant_tag,)
    _library.define(schema(spec), tags=tags)
    for key in BACKENDS:
        _library.impl(spec.name, real_kernel(spec), key)
    fake = fake_kernel(spec)
    if spec.data_size is None:  # register_fake looks up its caller's source, 1 ms an operator
        _library.impl(spec.name, fake, "Meta")
    else:
        torch.library.register_fake(f"{NAMESPACE}::{spec.name}", fake, lib=_library)
    _library.impl(spec.name, autograd_kernel(spec), "Autograd", with_keyset=True)
    for key, device_type in AUTOCAST_KEYS.items():
        _library.impl(spec.name, autocast_kernel(spec, device_type), key)


for _spec in CATALOGUE.values():
    register(_spec)
