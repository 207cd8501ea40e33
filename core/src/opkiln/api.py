"""What a user asks of the catalogue and the registry."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from opkiln import functional, road
from opkiln.dispatch import Explanation, explain_call
from opkiln.errors import ArgumentError
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln.spec import Call


def ops(family: str | None = None) -> list[str]:
    """Python names of all ops, or of one family's, in catalogue order."""
    return [s.name for s in CATALOGUE.values() if family in (None, s.family)]


def backends(op: str) -> list[str]:
    """Names of the installed backends of an op. ArgumentError for an unknown op."""
    if op not in CATALOGUE:
        raise ArgumentError(f"opkiln.backends: no op {op!r}; opkiln.ops() lists them")
    return sorted(REGISTRY.of(op))


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Who would serve `fn(*args, **kwargs)` and why; fn is one of opkiln.functional.

    print(opkiln.explain(opkiln.functional.rms_norm, x, (4096,)))
    """
    return explain_call(capture(fn, *args, **kwargs))


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """The canonical call behind `fn(*args, **kwargs)`, which is not run."""
    if getattr(functional, getattr(fn, "__name__", ""), None) is not fn:
        raise ArgumentError(f"opkiln.explain: {fn!r} is no function of opkiln.functional")
    found = captured(partial(fn, *args, **kwargs))
    if found is None:
        raise AssertionError(f"{fn.__name__} did not reach road.run")
    return found


def captured(call: Callable[[], Any]) -> Call | None:
    """The first call of an op that `call()` comes to, which is not run; None: it comes to none."""
    try:
        with road.capturing():
            call()
    except road.Captured as found:
        bound = found.bound
        grad = bound.spec.backward is not None and road.wants_gradient(bound.tensors)
        return Call.of(bound.spec, bound.tensors, bound.params, found.policy, grad)
    return None


def representable(call: Callable[[], Any]) -> bool:
    """Whether the op that `call()` comes to takes its arguments."""
    try:
        captured(call)
    except (ArgumentError, TypeError):
        return False
    return True
