"""The calls that a public function served last, recognised by torch's C++ in one step.

To name a call in full (dispatch.PLANS) costs about a microsecond a tensor, as much as a launch.
TensorGuards compares in 0.3 us, for all tensors of a call together: types, dtypes, devices, sizes,
strides, requires_grad, and dispatch keys, the tensors' and the thread's: lazy conjugation and
negation, sparse layouts, inference tensors, autocast and function transforms. What it does not see
is tested here (addresses, gradient mode) or in road.run (modes, forward-mode AD).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from opkiln.dispatch import Plan

Tensors = Sequence[torch.Tensor | None]

MAX_SITES = 4096  # (public function, arguments, policy) with plans of their own
MAX_RECENT = 4  # plans of one site: one that is not known costs 0.2 us a plan
ALIGNED = 15  # bits of an address that are 0 where vectors of 16 bytes can be read


class Recent:
    """One plan's launch, and the tensors that it is for: those on 16-byte boundaries."""

    __slots__ = ("absent", "launch", "needs_no_grad", "present", "same")

    def __init__(self, tensors: Tensors, launch: Callable[..., Any]) -> None:
        given = [t for t in tensors if t is not None]
        self.same = guard(given)
        self.launch = launch
        self.needs_no_grad = any(t.requires_grad for t in given)
        self.absent = [i for i, t in enumerate(tensors) if t is None]
        self.present = present_of(tensors) if self.absent else None

    def fits(self, tensors: Tensors) -> bool:
        """Whether the plan is the one for these tensors, on this thread."""
        given: Tensors = tensors
        if self.present is not None:
            for i in self.absent:
                if tensors[i] is not None:
                    return False
            given = self.present(tensors)
        if not self.same(*given) or (self.needs_no_grad and torch.is_grad_enabled()):
            return False
        for t in given:  # noqa: SIM110  # `all` of a generator costs 0.3 us more
            if t.data_ptr() & ALIGNED:  # type: ignore[union-attr]
                return False
        return True


def present_of(tensors: Tensors) -> Callable[[Tensors], Tensors]:
    """A function that drops from such tensors those that are None here."""
    places = [i for i, t in enumerate(tensors) if t is not None]
    if len(places) == 1:
        only = places[0]
        return lambda tensors: (tensors[only],)
    return itemgetter(*places)


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that is true of tensors like these, on a thread in this one's state."""
    guards: Any = torch._C._dynamo.guards
    sizes = [list(t.shape) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    # Without keywords torch 2.13 crashes.
    made = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return made.check


class Other(torch.Tensor):
    pass


@functools.cache
def guards_work() -> bool:
    """Whether this torch has TensorGuards that tell apart what a plan depends on."""
    if not hasattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards"):
        return False
    x = torch.zeros(4, 2, device="cpu")
    try:
        same = guard([x])
        others = [
            x[:3],
            x.t().contiguous().t(),
            x.double(),
            x.as_subclass(Other),
            torch._neg_view(x),
            x.to(device="meta"),
            x.clone().requires_grad_(),
            x.to_sparse(),
            None,
        ]
        if not same(x) or not same(x.clone()) or any(same(other) for other in others):
            return False
        key = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
        with torch._C._IncludeDispatchKeyGuard(key):
            in_transform = same(x)
        with torch.autocast("cpu", torch.bfloat16):
            in_autocast = same(x)
        return not in_transform and not in_autocast
    except (AttributeError, RuntimeError, TypeError):
        return False


class Site:
    """A public function with certain arguments: the plans that served it last."""

    __slots__ = ("last", "recent")

    def __init__(self) -> None:
        self.recent: tuple[Recent, ...] = ()
        self.last: Plan | None = None


SITES: dict[Any, Site] = {}


def note(sites: dict[Any, Site], key: Any, tensors: Tensors, plan: Plan) -> None:
    """Have a plan recognised from now on: a site's first, later one that served twice in a row, so
    that sizes which never come back push nothing out. Not the plan of tensors that are passed
    twice or begin at an odd address, which are served all the same.
    """
    site = sites.get(key)
    if site is None:
        while len(sites) >= MAX_SITES:
            sites.pop(next(iter(sites)), None)
        site = sites[key] = Site()
    if site.recent and plan is not site.last:
        site.last = plan
        return
    site.last = plan
    if guards_work():
        recent = Recent(tensors, plan.launch)
        if recent.fits(tensors):
            site.recent = (recent, *site.recent[: MAX_RECENT - 1])
