"""One torch operator per spec: schema, fake, autograd and autocast, all derived from it.

`torch.ops.opkiln.<name>(tensors..., params..., *, save, policy)` returns every output of the spec,
saved ones last; an output that a call does not have is an empty tensor. `Library.define` and `impl`
instead of `custom_op`: 4 against 12 us a call on the H200 host, and `custom_op` refuses autograd on
operators that mutate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from opkiln.dispatch import plan
from opkiln.errors import ArgumentError
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call, OpSpec
from opkiln.torch_backend import torch_formula

NAMESPACE = "opkiln"
SCHEMA_KINDS = {"int": "SymInt", "int?": "SymInt?", "int[]": "SymInt[]"}
BACKENDS = ("CPU", "CUDA")
AUTOCAST_KEYS = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda"}
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

_library = torch.library.Library(NAMESPACE, "DEF")
_functions: dict[str, type[torch.autograd.Function]] = {}


def schema(spec: OpSpec) -> str:
    """The operator's schema; a tensor that some call writes is marked so."""
    args = []
    for i, t in enumerate(spec.tensors):
        alias = f"({chr(ord('a') + i)}!)" if t.name in spec.may_mutate else ""
        args.append(f"Tensor{alias}{'?' if t.optional else ''} {t.name}")
    args += [f"{SCHEMA_KINDS.get(p.kind, p.kind)} {p.name}" for p in spec.params]
    out = ", ".join(["Tensor"] * len(spec.outputs))
    returns = out if len(spec.outputs) == 1 else f"({out})"
    return f"{spec.name}({', '.join(args)}, *, bool save=False, str policy='') -> {returns}"


def operator(spec: OpSpec) -> Any:
    """The torch operator of a spec."""
    return getattr(getattr(torch.ops, NAMESPACE), spec.name).default


def split(spec: OpSpec, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operator arguments -> tensors, canonical parameters."""
    n = len(spec.tensors)
    params = {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in zip(spec.param_names, args[n:], strict=True)
    }
    return args[:n], params


def pack(call: Call, outs: Any) -> Any:
    """A launch's outputs -> the operator's returns, with empty tensors where the call has none."""
    if not call.present:
        return None
    given = iter(outs if isinstance(outs, tuple) else (outs,))
    full = tuple(
        next(given) if here else torch.empty(0, device=call.device) for here in call.present
    )
    return full[0] if len(full) == 1 else full


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
        dtype = {
            "fp32": torch.float32,
            "lower": torch.get_autocast_dtype(device_type),
        }.get(spec.autocast or "")
        cast = tuple(_cast(a, dtype) for a in args[:n])
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return operator(spec)(*cast, *args[n:], save=save, policy=policy)

    return kernel


def _cast(t: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or t is None or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(dtype)


def backward_policy(policy: str) -> str:
    """A strict backend of the forward is a preference of its backward."""
    return replace(Policy.decode(policy), strict=False).encode()


def autograd_function(spec: OpSpec) -> type[torch.autograd.Function]:
    """The autograd.Function of a differentiable spec."""
    back = spec.backward
    assert back is not None
    n = len(spec.tensors)
    saved_from = len(spec.returns)
    non_differentiable = [i for i, o in enumerate(spec.outputs) if o.saved or not o.differentiable]
    wrt = [spec.tensor_names.index(name) for name in back.wrt]
    readable = (*spec.tensor_names, *[o.name for o in spec.outputs])
    needs = [readable.index(name) for name in back.needs]

    def forward(ctx: Any, keyset: Any, policy: str, *args: Any) -> Any:
        below = keyset & torch._C._after_autograd_keyset
        outs = operator(spec).redispatch(below, *args, save=True, policy=policy)
        outs = outs if isinstance(outs, tuple) else (outs,)
        ctx.mark_non_differentiable(*[outs[i] for i in non_differentiable])
        ctx.set_materialize_grads(False)
        tensors, ctx.params = split(spec, args)
        ctx.policy = policy
        ctx.input_metas = [None if t is None else (t.shape, t.dtype, t.device) for t in tensors]
        ctx.kept = [*needs, *unwritten(spec, tensors, ctx.params)]
        given = (*tensors, *outs)
        ctx.save_for_backward(*[given[i] for i in ctx.kept], *outs[saved_from:])
        ctx.out_metas = [(o.shape, o.dtype, o.device) for o in outs[:saved_from]]
        return outs

    def backward(ctx: Any, *grads: Any) -> Any:
        tensors: list[Any] = [None] * len(readable)
        for i, t in zip(ctx.kept, ctx.saved_tensors, strict=False):
            tensors[i] = t
        mask = [ctx.needs_input_grad[2 + i] for i in wrt]
        upstream = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, output, (shape, dtype, device) in zip(
                grads, spec.returns, ctx.out_metas, strict=False
            )
            if output.differentiable
        ]
        if torch.is_grad_enabled() and back.double == "forward":
            found = formula_gradient(spec, ctx, tensors[:n], upstream, mask)
        else:
            shapes = zip(spec.tensor_names, ctx.input_metas, strict=True)
            params = {f"{name}_shape": tuple(m[0]) for name, m in shapes if m}
            params |= ctx.params | {"output_mask": mask}
            values = {name: params[name] for name in back.spec.param_names}
            read = [tensors[i] for i in needs]
            saved = ctx.saved_tensors[len(ctx.kept) :]
            if torch.is_grad_enabled():
                found = back.spec.reference(*upstream, *read, *saved, **values)
            else:
                policy = backward_policy(ctx.policy)
                found = operator(back.spec)(
                    *upstream, *read, *saved, *values.values(), policy=policy
                )
            found = found if isinstance(found, tuple) else (found,)
        out: list[Any] = [None] * (2 + n + len(spec.params))
        for i, wanted, grad in zip(wrt, mask, found, strict=True):
            out[2 + i] = grad if wanted else None
        return tuple(out)

    name = f"{spec.op}Function"
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), body)


def unwritten(spec: OpSpec, tensors: tuple[Any, ...], params: dict[str, Any]) -> list[int]:
    """Tensors that some call writes and this one only reads (statistics in evaluation)."""
    if not spec.may_mutate:
        return []
    names = dict(zip(spec.tensor_names, tensors, strict=True))
    call: Any = SimpleNamespace(tensors=SimpleNamespace(**names), params=SimpleNamespace(**params))
    written = spec.mutates(call)
    return [spec.tensor_names.index(n) for n in spec.may_mutate if n not in written]


def formula_gradient(
    spec: OpSpec, ctx: Any, tensors: list[Any], upstream: list[Any], mask: list[bool]
) -> tuple[Any, ...]:
    """The gradient by torch's own autograd through the torch formula, differentiable again."""
    assert spec.backward is not None
    inputs = list(tensors)
    for name in spec.backward.wrt:
        i = spec.tensor_names.index(name)
        if inputs[i] is None and ctx.input_metas[i] is not None:
            shape, dtype, device = ctx.input_metas[i]
            inputs[i] = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    outs = torch_formula(spec, tuple(inputs), ctx.params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    outs = [o for o, s in zip(outs, spec.returns, strict=False) if s.differentiable]
    wanted = [
        inputs[spec.tensor_names.index(name)]
        for name, w in zip(spec.backward.wrt, mask, strict=True)
        if w
    ]
    given = upstream[: len(outs)]  # outputs that this call does not have come last
    found = iter(torch.autograd.grad(outs, wanted, given, create_graph=True, allow_unused=True))
    return tuple(next(found) if w else None for w in mask)


def autograd_kernel(spec: OpSpec) -> Callable[..., Any]:
    """Autograd key: record a Function where a gradient is wanted, else step below autograd."""
    function = autograd_function(spec) if spec.backward is not None else None
    wrt = [] if spec.backward is None else [spec.tensor_names.index(w) for w in spec.backward.wrt]
    n = len(spec.tensors)

    def kernel(keyset: Any, *args: Any, save: bool = False, policy: str = "") -> Any:
        if torch.is_grad_enabled():
            wanted = [i for i in range(n) if args[i] is not None and args[i].requires_grad]
            refuse_gradient(spec, [i for i in wanted if i not in wrt])
            if wanted and function is not None:
                return unwrap(spec, function.apply(keyset, policy, *args))
        below = keyset & torch._C._after_autograd_keyset
        return operator(spec).redispatch(below, *args, save=save, policy=policy)

    return kernel


def unwrap(spec: OpSpec, outs: Any) -> Any:
    return outs[0] if len(spec.outputs) == 1 else outs


def refuse_gradient(spec: OpSpec, unsupported: list[int]) -> None:
    """An op that writes its inputs in place must not drop a gradient silently."""
    for i in unsupported:
        name = spec.tensor_names[i]
        if name in spec.may_mutate or not spec.outputs:
            raise ArgumentError(
                f"{spec.name}: {name} requires a gradient, which overwriting inputs would lose; "
                "use the form that returns its result, or torch.no_grad()"
            )


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
