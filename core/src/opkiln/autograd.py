"""Gradients of the operators: an autograd.Function per spec, derived from its `Backward`.

First derivatives go through the backward's own operator, which is dispatched like any other. A
derivative of a derivative (create_graph=True) goes through the differentiable torch formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.policy import Policy
from opkiln.schema import operator, split
from opkiln.spec import Backward, OpSpec
from opkiln.torch_backend import torch_formula

LEADING = 2  # the Function's arguments before the operator's: keyset, policy


def autograd_kernel(spec: OpSpec) -> Callable[..., Any]:
    """Kernel of the Autograd key: record a Function where a gradient is wanted, else step below."""
    gradient = Gradient(spec, spec.backward) if spec.backward else NoGradient(spec)
    body = {"forward": staticmethod(gradient.forward), "backward": staticmethod(gradient.backward)}
    function: Any = type(f"{spec.op}Function", (torch.autograd.Function,), body)
    wrt = gradient.wrt

    def kernel(keyset: Any, *args: Any, save: bool = False, policy: str = "") -> Any:
        if torch.is_grad_enabled():
            tensors = enumerate(args[: len(spec.tensors)])
            wanted = [i for i, t in tensors if t is not None and t.requires_grad]
            if wanted:
                refuse_lost_gradient(spec, [i for i in wanted if i not in wrt])
                outs = function.apply(keyset, policy, *args)
                return outs[0] if len(spec.outputs) == 1 else outs
        return below_autograd(spec, keyset, args, save, policy)

    return kernel


def below_autograd(spec: OpSpec, keyset: Any, args: Any, save: bool, policy: str) -> Any:
    """The operator without its autograd kernel.

    Redispatched, not called under a guard that switches autograd off: the reference of a backward
    uses torch's autograd itself.
    """
    below = keyset & torch._C._after_autograd_keyset
    return operator(spec).redispatch(below, *args, save=save, policy=policy)


def refuse_lost_gradient(spec: OpSpec, unsupported: list[int]) -> None:
    """An op that overwrites an input must not drop that input's gradient silently."""
    for i in unsupported:
        name = spec.tensor_names[i]
        if name in spec.may_mutate or not spec.outputs:
            raise ArgumentError(
                f"{spec.name}: {name} requires a gradient, which overwriting inputs would lose; "
                "use the form that returns its result, or torch.no_grad()"
            )


class NoGradient:
    """An op without a backward: computes, and says so when a gradient is asked of it."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.wrt: list[int] = []

    def forward(self, ctx: Any, keyset: Any, policy: str, *args: Any) -> Any:
        outs = below_autograd(self.spec, keyset, args, False, policy)
        outs = outs if isinstance(outs, tuple) else (outs,)
        ctx.mark_non_differentiable(*[o for o in outs if not o.is_floating_point()])
        return outs

    def backward(self, ctx: Any, *grads: Any) -> Any:
        raise ArgumentError(f"torch.ops.opkiln.{self.spec.name} has no derivative")


class Gradient:
    """The autograd.Function of one differentiable spec: indices worked out once, per call state on
    the ctx.
    """

    def __init__(self, spec: OpSpec, back: Backward) -> None:
        self.spec = spec
        self.back = back
        self.first_saved = len(spec.returns)
        self.constant = [i for i, o in enumerate(spec.outputs) if o.saved or not o.differentiable]
        # Places of the tensors that each gradient of the backward goes to.
        self.receivers = [
            [spec.tensor_names.index(n) for n in (name, *others_like(back, name))]
            for name in back.wrt
        ]
        self.wrt = [i for places in self.receivers for i in places]
        self.readable = (*spec.tensor_names, *[o.name for o in spec.outputs])
        self.needs = [self.readable.index(name) for name in back.needs]

    def forward(self, ctx: Any, keyset: Any, policy: str, *args: Any) -> Any:
        outs = below_autograd(self.spec, keyset, args, True, policy)
        outs = outs if isinstance(outs, tuple) else (outs,)
        ctx.mark_non_differentiable(*[outs[i] for i in self.constant])
        ctx.set_materialize_grads(False)
        tensors, ctx.params = split(self.spec, args)
        ctx.policy = policy
        ctx.input_metas = [None if t is None else (t.shape, t.dtype, t.device) for t in tensors]
        ctx.kept = [*self.needs, *unwritten(self.spec, tensors, ctx.params)]
        given = (*tensors, *outs)
        ctx.save_for_backward(*[given[i] for i in ctx.kept], *outs[self.first_saved :])
        ctx.out_metas = [(o.shape, o.dtype, o.device) for o in outs[: self.first_saved]]
        return outs

    def backward(self, ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[LEADING:]
        mask = [any(needed[i] for i in places) for places in self.receivers]
        stored = ctx.saved_tensors  # read once: each time unpacks, and a checkpoint allows one
        tensors: list[Any] = [None] * len(self.readable)
        for i, t in zip(ctx.kept, stored, strict=False):
            tensors[i] = t
        upstream = self.upstream(ctx, grads)
        if torch.is_grad_enabled() and self.back.double == "forward":
            found = self.through_forward_formula(ctx, tensors, upstream, mask)
        else:
            saved = stored[len(ctx.kept) :]
            found = self.through_backward(ctx, tensors, saved, upstream, mask)
        out: list[Any] = [None] * (LEADING + len(self.spec.tensors) + len(self.spec.params))
        for places, grad in zip(self.receivers, found, strict=True):
            for i in places:
                out[LEADING + i] = grad if needed[i] else None
        return tuple(out)

    def upstream(self, ctx: Any, grads: Any) -> list[torch.Tensor]:
        """Gradients of the differentiable outputs; zeros where none came."""
        return [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, output, (shape, dtype, device) in zip(
                grads, self.spec.returns, ctx.out_metas, strict=False
            )
            if output.differentiable
        ]

    def through_backward(
        self, ctx: Any, tensors: list[Any], saved: Any, upstream: Any, mask: Any
    ) -> Any:
        """The backward's operator; its formula where that itself is to be differentiated."""
        back = self.back.spec
        shapes = zip(self.spec.tensor_names, ctx.input_metas, strict=True)
        params = {f"{name}_shape": tuple(m[0]) for name, m in shapes if m}
        params |= ctx.params | {"output_mask": mask}
        values = {name: params[name] for name in back.param_names}
        given = (*upstream, *[tensors[i] for i in self.needs], *saved)
        if torch.is_grad_enabled():
            found = back.reference(*given, **values)
        else:
            # A strict backend of the forward is a preference of its backward.
            policy = replace(Policy.decode(ctx.policy), strict=False).encode()
            found = operator(back)(*given, *values.values(), policy=policy)
        return found if isinstance(found, tuple) else (found,)

    def through_forward_formula(
        self, ctx: Any, tensors: list[Any], upstream: list[Any], mask: list[bool]
    ) -> tuple[Any, ...]:
        """The gradient by torch's autograd through the torch formula, differentiable again."""
        spec = self.spec
        inputs = tensors[: len(spec.tensors)]
        for i in self.wrt:  # a tensor that was not kept enters linearly: its value does not matter
            if inputs[i] is None and ctx.input_metas[i] is not None:
                shape, dtype, device = ctx.input_metas[i]
                inputs[i] = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        outs = torch_formula(spec, tuple(inputs), ctx.params)
        outs = outs if isinstance(outs, tuple) else (outs,)
        outs = [o for o, s in zip(outs, spec.returns, strict=False) if s.differentiable]
        wanted = [inputs[i] for i, w in zip(self.wrt, mask, strict=True) if w]
        given = upstream[: len(outs)]  # outputs that this call does not have come last
        found = iter(torch.autograd.grad(outs, wanted, given, create_graph=True, allow_unused=True))
        return tuple(next(found) if w else None for w in mask)


def others_like(back: Backward, name: str) -> list[str]:
    """The tensors whose gradient is that of `name`."""
    return [other for other, one in back.alike.items() if one == name]


def unwritten(spec: OpSpec, tensors: tuple[Any, ...], params: dict[str, Any]) -> list[int]:
    """Tensors that some call writes and this one only reads (statistics in evaluation)."""
    if not spec.may_mutate:
        return []
    names = dict(zip(spec.tensor_names, tensors, strict=True))
    call: Any = SimpleNamespace(tensors=SimpleNamespace(**names), params=SimpleNamespace(**params))
    written = spec.mutates(call)
    return [spec.tensor_names.index(n) for n in spec.may_mutate if n not in written]
