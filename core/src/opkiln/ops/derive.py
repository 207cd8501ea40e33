"""Specs made from other specs: the backward of a forward, the in-place form of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.spec import (
    FLOAT,
    Backward,
    Call,
    OpSpec,
    OutputSpec,
    ParamSpec,
    TensorMeta,
    TensorSpec,
)

MetaRule = Callable[[Call], TensorMeta]


def with_backward(
    fwd: OpSpec,
    wrt: tuple[str, ...],
    needs: tuple[str, ...],
    *,
    op: str | None = None,
    reference: Callable[..., Any] | None = None,
    native: Callable[..., Any] | None = None,
    grad_dims: str | Mapping[str, str] = "*grad",
    saved_dims: Mapping[str, str] | None = None,
    grad_meta: Mapping[str, MetaRule] | None = None,
    drop_params: tuple[str, ...] = (),
    flops: Callable[[Call], int] | None = None,
    reduction: Callable[[Call], int] | None = None,
    double: str = "forward",
    alike: Mapping[str, str] | None = None,
) -> tuple[OpSpec, OpSpec]:
    """`fwd` with its gradient attached, and the spec of that gradient.

    wrt: differentiable forward tensors; one outside `needs` must enter the forward linearly, unless
        double="backward". needs: what the formula reads: forward tensors, or outputs of grad_dims.
    reference: the formula; None: the vector-Jacobian product of the forward's reference.
    native: torch's fast call, same signature. grad_dims: dims of the incoming gradients, by output
        name where they differ.
    grad_meta: shape and dtype of a gradient that is not simply that of its tensor.
    reduction: terms of a gradient's element; None: as many as of the forward's.
    double, alike: see `Backward`.
    """
    differentiable = [o for o in fwd.returns if o.differentiable]
    by_name = {t.name: t for t in fwd.tensors}
    saved = [o for o in fwd.outputs if o.saved]
    dtypes = by_name[wrt[0]].dtypes or FLOAT
    dims: Mapping[str, str] = (
        dict.fromkeys((o.name for o in differentiable), grad_dims)
        if isinstance(grad_dims, str)
        else grad_dims
    )
    grads = [TensorSpec(f"grad_{o.name}", dims[o.name], dtypes) for o in differentiable]
    read = [
        replace(by_name[n], dtypes=by_name[n].dtypes or dtypes)
        if n in by_name
        else TensorSpec(n, dims[n], dtypes)
        for n in needs
    ]
    kept = [
        TensorSpec(o.name, (saved_dims or {}).get(o.name, f"*{o.name}_dims"), SAVED_DTYPES)
        for o in saved
    ]
    shapes = [ParamSpec(f"{n}_shape", "int[]", f"shape of {n}") for n in wrt if n not in needs]
    shapes = [p for p in shapes if p.name.removesuffix("_shape") not in (grad_meta or {})]
    mask = ParamSpec("output_mask", "bool[]", f"which of {', '.join(wrt)} need a gradient")
    rules = grad_meta or {}
    outputs = tuple(
        OutputSpec(f"grad_{n}", _grad_rule(i, n, n in needs, rules.get(n), differentiable[0].name))
        for i, n in enumerate(wrt)
    )
    spec = OpSpec(
        op=op or fwd.op.removesuffix("Fwd").removesuffix("Forward") + "Bwd",
        name=f"{fwd.name}_backward",
        family=fwd.family,
        tensors=(*grads, *read, *kept),
        params=(*(p for p in fwd.params if p.name not in drop_params), *shapes, mask),
        outputs=outputs,
        reference=reference or vjp(fwd, wrt, needs),
        native=native,
        doc=f"Gradient of {fwd.name} with respect to {', '.join(wrt)}.",
        reduction=reduction or fwd.reduction,
        rounds_at_scale=fwd.rounds_at_scale,
        flops=flops or (lambda call: 2 * next(iter(vars(call.tensors).values())).numel),
        forward_op=fwd.name,
    )
    return replace(fwd, backward=Backward(spec, wrt, needs, double, alike or {})), spec


AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.ADInplaceOrView,
)
SAVED_DTYPES = (
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int16,
    torch.int32,
)


def _grad_rule(
    i: int, name: str, present: bool, rule: MetaRule | None, out: str
) -> Callable[[Call], TensorMeta | None]:
    """Meta of the gradient of forward tensor `name`, the i-th of those that have one."""

    def meta(call: Call) -> TensorMeta | None:
        if not call.params.output_mask[i]:
            return None
        if rule is not None:
            return rule(call)
        if present:
            return call.like(name, keep_channels_last=True)
        grad = getattr(call.tensors, f"grad_{out}")
        return call.new(getattr(call.params, f"{name}_shape"), grad.dtype, grad.channels_last)

    return meta


def vjp(fwd: OpSpec, wrt: tuple[str, ...], needs: tuple[str, ...]) -> Callable[..., Any]:
    """Reference of a backward: the vector-Jacobian product of the forward's reference.

    On widened tensors, so that a gradient which is a sum of several is rounded once.
    """
    n_grads = sum(o.differentiable for o in fwd.returns)
    names = fwd.tensor_names

    def reference(*tensors: torch.Tensor | None, output_mask: list[bool], **params: Any) -> Any:
        grads = [widened(t) for t in tensors[:n_grads]]
        given = dict(zip(needs, tensors[n_grads : n_grads + len(needs)], strict=True))
        wanted = [n for n, w in zip(wrt, output_mask, strict=True) if w]
        with torch.enable_grad(), seen_by_autograd():
            inputs: dict[str, Any] = {n: _leaf(given.get(n), n in wanted) for n in names}
            for n in wrt:
                if n not in needs:
                    shape = params.pop(f"{n}_shape")
                    zeros = torch.zeros(shape, dtype=grads[0].dtype, device=grads[0].device)
                    inputs[n] = zeros.requires_grad_(n in wanted)
            outs = fwd.reference(*inputs.values(), **params)
            outs = outs if isinstance(outs, tuple) else (outs,)
            pairs = zip(outs, fwd.outputs, strict=False)
            outs = [o for o, s in pairs if differentiable(s) and o is not None]
            found = torch.autograd.grad(
                outs,
                [inputs[n] for n in wanted],
                grads[: len(outs)],  # outputs that this call does not have come last
                allow_unused=True,
                materialize_grads=True,
            )
        dtypes = {n: t.dtype for n, t in given.items() if t is not None}
        first = tensors[0].dtype if tensors[0] is not None else None
        by_name = {n: g.to(dtypes.get(n, first)) for n, g in zip(wanted, found, strict=True)}
        return tuple(by_name.get(n) for n in wrt)

    return reference


def widened(t: Any) -> Any:
    """Half precision as float32; everything else as it is."""
    halves = (torch.float16, torch.bfloat16)
    return t.float() if t is not None and t.dtype in halves else t


def seen_by_autograd() -> Any:
    """Inside the block autograd records, also where a TorchDispatchMode has switched it off."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def differentiable(output: OutputSpec) -> bool:
    return output.differentiable and not output.saved


def _leaf(t: torch.Tensor | None, wanted: bool) -> torch.Tensor | None:
    return None if t is None else widened(t.detach()).requires_grad_(wanted)


def inplace_of(spec: OpSpec, writes: Mapping[str, str]) -> OpSpec:
    """The op that writes its outputs over its inputs: `writes` maps input name to output name.

    It returns nothing, has no gradient, and is an operator of its own. Autocast leaves it alone: a
    cast input would be a copy, and the caller's tensor would stay unwritten.
    """
    names = spec.tensor_names
    order = [o.name for o in spec.returns]

    def over_inputs(fn: Callable[..., Any]) -> Callable[..., Any]:
        def reference(*tensors: torch.Tensor | None, **params: Any) -> tuple[()]:
            outs = fn(*tensors, **params)
            outs = outs if isinstance(outs, tuple) else (outs,)
            by_name = dict(zip(order, outs, strict=False))
            for target, out in writes.items():
                tensors[names.index(target)].copy_(by_name[out])  # type: ignore[union-attr]
            return ()

        return reference

    def check(call: Call) -> None:
        for target in writes:
            if may_overlap(getattr(call.tensors, target)):
                raise ArgumentError(
                    f"{call.spec.name}: elements of {target} share memory (an expanded tensor?), "
                    "so it cannot be written in place; clone it first"
                )
        if spec.check is not None:
            spec.check(call)

    return replace(
        spec,
        op=f"{spec.op}Inplace",
        name=f"{spec.name}_inplace",
        outputs=(),
        reference=over_inputs(spec.reference),
        native=over_inputs(spec.native) if spec.native else None,
        native_train=None,
        check=check,
        mutates=lambda call: tuple(writes),
        may_mutate=tuple(writes),
        autocast=None,
        backward=None,
        forward_op=spec.name,
        doc=f"{spec.name}, written over {' and '.join(writes)}.",
    )


def may_overlap(meta: TensorMeta) -> bool:
    """Whether two elements may lie at one address, judged by strides alone.

    False only when each dim steps over all that the dims of smaller stride span.
    """
    if meta.numel == 0:
        return False
    span = 0
    dims = [(st, size) for st, size in zip(meta.stride, meta.shape, strict=True) if size != 1]
    for stride, size in sorted(dims):
        if stride <= span:
            return True
        span += stride * (size - 1)
    return False
