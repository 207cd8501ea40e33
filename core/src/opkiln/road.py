"""The way from a public function to a launch.

The direct road looks up a plan and launches it: no torch dispatcher. A call like the last one is
recognised (opkiln.recent), another one named in full. It is taken only where nothing but the plain
result is asked for; everything else goes through the operator, which torch.compile,
autograd, autocast, fake tensors and subclasses understand. Under function transforms and
forward-mode AD the differentiable torch formula serves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from marshal import dumps
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from opkiln import policy as policies
from opkiln.dispatch import PLANS, Plan, plan, remember, tensor_key
from opkiln.errors import ArgumentError
from opkiln.formula import checked_formula
from opkiln.policy import Policy
from opkiln.recent import SITES, note
from opkiln.registry import REGISTRY
from opkiln.schema import operator
from opkiln.spec import OpSpec

Tensors = Sequence[torch.Tensor | None]
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Bound(NamedTuple):
    """A public call in canonical form."""

    spec: OpSpec
    tensors: tuple[torch.Tensor | None, ...]
    params: dict[str, Any]


Canonical = Callable[..., Bound]


def is_direct(tensors: Tensors) -> bool:
    """Whether a call may skip torch's dispatcher; a test for every clause."""
    return (
        not torch.compiler.is_compiling()
        and not under_transform()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._is_any_autocast_enabled()
        and all(t is None or is_plain(t) for t in tensors)
        and not wants_gradient(tensors)
    )


def under_transform() -> bool:
    """Inside vmap, jvp, grad of torch.func, or a level of forward-mode AD."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def is_plain(t: torch.Tensor) -> bool:
    """Exactly a Tensor or Parameter, strided, with no lazy conjugation or negation."""
    return type(t) in PLAIN and t.layout is torch.strided and not t.is_conj() and not t.is_neg()


def wants_gradient(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def policy_of_trace(backend: str | None) -> str:
    """The policy in force, as a string; torch.compile records the one at trace time."""
    return call_policy(backend).encode()


# What torch.compiler.assume_constant_result sets; calling it would import torch._dynamo (1.2 s).
policy_of_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]


def call_policy(backend: str | None) -> Policy:
    policy = policies.current()
    return policy if backend is None else policy.only(backend)


class Captured(Exception):
    """Unwinds a public function that was called only to learn its canonical form."""

    def __init__(self, bound: Bound, policy: Policy) -> None:
        super().__init__(bound.spec.name)
        self.bound = bound
        self.policy = policy


class _Capture(threading.local):
    on = False


_CAPTURE = _Capture()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Inside the block, `run` raises Captured instead of computing."""
    _CAPTURE.on = True
    try:
        yield
    finally:
        _CAPTURE.on = False


def run(canonical: Canonical, tensors: Tensors, args: tuple[Any, ...], backend: str | None) -> Any:
    """Serve one public call. `canonical(*tensors, *args)` runs once per plan."""
    if torch.compiler.is_compiling():
        bound = canonical(*tensors, *args)
        return call_operator(bound, policy_of_trace(backend))
    if _CAPTURE.on:
        raise Captured(canonical(*tensors, *args), call_policy(backend))
    text: bytes | None
    try:
        # In 0.1 us, and 1, 1.0 and True differ, as 0.0 and -0.0 do. Format 2 has no references.
        text = dumps((args, backend, policies.STATE.number, REGISTRY.generation), 2)
    except ValueError:
        text = text_of(args, backend)
    site = SITES.get((canonical, text))
    if (
        site is not None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and forward_ad._current_level < 0
    ):
        for recent in site.recent:
            if recent.fits(tensors):
                return recent.launch(*tensors)
    return serve(canonical, tensors, args, backend, text)


def serve(
    canonical: Canonical,
    tensors: Tensors,
    args: tuple[Any, ...],
    backend: str | None,
    text: bytes | None,
) -> Any:
    """A call whose plan is not known from the one before. text: names its arguments."""
    if not is_direct(tensors):
        return run_through_torch(canonical(*tensors, *args), backend)
    number = policies.STATE.number
    try:
        key = (
            REGISTRY.generation,
            canonical,
            freeze(args),
            backend,
            number,
            *[tensor_key(t) for t in tensors],
        )
    except Unkeyed:
        return make_plan(canonical(*tensors, *args), call_policy(backend)).launch(*tensors)
    made = PLANS.get(key)
    if made is None:
        REGISTRY.load()  # a process's first call was keyed before its plugins came
        key = (REGISTRY.generation, *key[1:])
        made = remember(key, make_plan(canonical(*tensors, *args), call_policy(backend)))
    elif text is not None and is_text(args):
        note(SITES, (canonical, text), tensors, made)
    return made.launch(*tensors)


def run_through_torch(bound: Bound, backend: str | None) -> Any:
    spec = bound.spec
    for name, t in zip(spec.tensor_names, bound.tensors, strict=True):
        if t is not None and t.layout is not torch.strided:
            raise ArgumentError(f"{spec.name}: {name} has layout {t.layout}, allowed: strided")
    only_formula = spec.backward is None and any(o.differentiable for o in spec.outputs)
    if under_transform() or (only_formula and wants_gradient(bound.tensors)):
        return checked_formula(*bound, call_policy(backend))
    return call_operator(bound, policy_of_trace(backend))


def call_operator(bound: Bound, policy: str) -> Any:
    """Through `torch.ops.opkiln`, dropping what only the backward wants."""
    spec, tensors, params = bound
    outs = operator(spec)(*tensors, *params.values(), policy=policy)
    if len(spec.outputs) <= 1:
        return outs
    visible = outs[: len(spec.returns)]
    return visible[0] if len(visible) == 1 else visible


def make_plan(bound: Bound, policy: Policy) -> Plan:
    return plan(bound.spec, bound.tensors, bound.params, policy)


class Unkeyed(Exception):
    """An argument that cannot be a key: it may change, as a tensor does, or has no hash."""


def text_of(args: tuple[Any, ...], backend: str | None) -> bytes | None:
    """`run`'s name for arguments with a torch.Size, as weight.shape is; None if there is no name"""
    plain = tuple([tuple(a) if type(a) is torch.Size else a for a in args])
    try:
        return dumps((plain, backend, policies.STATE.number, REGISTRY.generation), 2)
    except ValueError:
        return None


def is_text(value: Any) -> bool:
    """Whether only this value has its marshalled form: a buffer (NumPy's numbers) has the form of
    the bytes in it, so no plan may be found by that.
    """
    if type(value) in (tuple, list, torch.Size):
        return all(is_text(v) for v in value)
    return type(value) in (int, float, bool, str, type(None))


AS_THEY_ARE = frozenset({int, str, type(None)})


def freeze(value: Any) -> Any:
    """An argument as part of a key: lists as tuples; 1, 1.0 and True, which are equal, apart."""
    kind = type(value)
    if kind in AS_THEY_ARE:
        return value
    if kind is float or kind is bool:
        return kind, value
    if kind is tuple or kind is list or isinstance(value, (tuple, list)):
        return tuple([freeze(v) for v in value])
    if isinstance(value, Number):
        return kind, value
    raise Unkeyed
