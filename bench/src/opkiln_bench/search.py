"""The fastest launch parameters of a call, from those that its family offers.

From the tiling in use the search goes to the fastest of its neighbours and on from there, until
none is faster by more than noise. What is taken has been compared with the op's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from opkiln import tilings
from opkiln.dispatch import plan
from opkiln.measured import NOISE
from opkiln.policy import DEFAULT
from opkiln.registry import REGISTRY

from opkiln_bench import check
from opkiln_bench.analysis import OURS
from opkiln_bench.contestants import Subject
from opkiln_bench.timing import MeasureError, Thunk, Timer
from opkiln_bench.verdict import median_us

ROUNDS = 4  # steps away from the tiling in use

Tiling = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """The fastest tiling: None if it is the one in use. us: its time; before_us: of that one."""

    tiling: Tiling | None
    us: float
    before_us: float
    tried: int


def search(subject: Subject, timer: Timer) -> Found | None:
    """The fastest tiling of a call; None where ours does not take it or offers nothing."""
    impl = REGISTRY.of(subject.spec.name).get(OURS)
    call = subject.call
    if impl is None or impl.tilings is None or impl.supports(call) is not None:
        return None
    best: Tiling | None = None
    best_us = before_us = 0.0
    seen: list[Tiling] = []
    for step in range(ROUNDS):
        with tilings.trial(best):
            offered = impl.tilings(call)
        new = [tiling for tiling in offered[step > 0 :] if tiling not in seen]
        seen += new
        times = timed(subject, timer, [best, *(new[1:] if step == 0 else new)])
        here_us = times.pop(0)
        if here_us is None:
            return None
        if step == 0:
            before_us = here_us
        best_us = here_us
        faster = fastest(subject, new[1:] if step == 0 else new, times, here_us)
        if faster is None:
            break
        best, best_us = faster
    if best is not None:  # once more, side by side: one of many candidates may have been lucky
        before, after = timed(subject, timer, [None, best])
        if before is None or after is None or after >= before * (1 - NOISE):
            best, after = None, before_us
        else:
            before_us = before
        best_us = after
    return Found(best, best_us, before_us, len(seen) - 1)


def fastest(
    subject: Subject, tried: Sequence[Tiling], times: Sequence[float | None], here_us: float
) -> tuple[Tiling, float] | None:
    """The fastest one whose result is right, if it is faster by more than noise."""
    known = [(us, i) for i, us in enumerate(times) if us is not None and us < here_us * (1 - NOISE)]
    for us, i in sorted(known):
        if is_right(subject, tried[i]):
            return tried[i], us
    return None


def prepared(subject: Subject, tiling: Tiling | None) -> Callable[..., Any]:
    with tilings.trial(tiling):
        policy = DEFAULT.only(OURS)
        return plan(subject.spec, subject.tensors, subject.params, policy, subject.row.train).launch


def timed(
    subject: Subject, timer: Timer, candidates: Sequence[Tiling | None]
) -> list[float | None]:
    """Device times in us, in rounds over all; None for what does not compile or run."""
    calls: dict[str, Thunk] = {}
    for i, tiling in enumerate(candidates):
        try:
            launch = partial(prepared(subject, tiling), *subject.tensors)
            launch()
            timer.synchronize()
        except Exception:  # too many registers, too much shared memory: it is no candidate
            continue
        calls[str(i)] = launch
    try:
        found = timer.measure(calls) if calls else {}
    except (MeasureError, RuntimeError):
        found = {}
    times: list[float | None] = []
    for i in range(len(candidates)):
        samples = found.get(str(i))
        usable = samples is not None and not isinstance(samples, MeasureError)
        times.append(median_us(samples.all_us) if usable else None)  # type: ignore[union-attr]
    return times


def is_right(subject: Subject, tiling: Tiling) -> bool:
    """Whether the result with a tiling meets the tolerance."""
    tensors = subject.fresh_tensors()
    check.poison(subject)
    result = prepared(subject, tiling)(*tensors)
    outputs = list(result) if isinstance(result, tuple) else [result]
    changed = [t for t, old in zip(tensors, subject.tensors, strict=True) if t is not old]
    written: list[torch.Tensor] = [t for t in changed if t is not None]
    return check.against_reference(subject, {OURS: [*outputs, *written]})[OURS].ok
