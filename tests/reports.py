"""Checks of calls that other libraries got wrong, as their users reported it.

A report is a call with inputs that trigger the mistake; what is right is computed by plain PyTorch
in float64 from the same values. On a machine with a GPU it runs there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln import road
from opkiln.conformance.cases import widened
from opkiln.conformance.checks import SETS, in_order
from opkiln.conformance.compare import compare
from opkiln.conformance.tensors import bits, to_device
from opkiln.dispatch import refusal
from opkiln.errors import ArgumentError
from opkiln.policy import DEFAULT
from opkiln.registry import REGISTRY
from opkiln.spec import Call

BACKENDS = ("torch", "torch-ref", "opkiln")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Report:
    """One case, the same for every backend.

    threads: where the mistake was reported, owner/repository#number; "" for a rule of our own.
    tensors(): the inputs, drawn anew at each call; the results have the dtype of the first.
    call(functions, *tensors): the outputs, by opkiln.functional or by torch.nn.functional.
    truth(*tensors): the outputs where torch.nn.functional has no such function, of wide tensors.
    writes: which tensors the call updates; the others must keep their bits.
    condition, magnitude: as of a row of the conformance kit.
    long: takes Triton's interpreter longer than a few seconds.
    """

    threads: str
    tensors: Callable[[], tuple[torch.Tensor | None, ...]]
    call: Callable[..., Any]
    truth: Callable[..., Any] | None = None
    writes: tuple[int, ...] = ()
    condition: float = 1.0
    magnitude: float = 0.0
    long: bool = False


def in_a_tuple(outs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(outs) if isinstance(outs, tuple | list) else (outs,)


def canonical(report: Report, tensors: list[torch.Tensor | None]) -> Call:
    try:
        with road.capturing():
            report.call(F, *tensors)
    except road.Captured as found:
        return Call.of(*found.bound, DEFAULT)
    raise AssertionError("the call did not reach road.run")


def skip_unless_served(report: Report, call: Call, backend: str) -> None:
    impl = REGISTRY.of(call.spec.name).get(backend)
    if impl is None:
        pytest.skip(f"{backend} does not implement {call.spec.name}")
    no = refusal(impl, call)
    if no is not None:
        pytest.skip(f"{backend}: {no.reason}")
    if report.long and INTERPRETED and backend == "opkiln":
        pytest.skip("takes too long in Triton's interpreter")


def check(report: Report, backend: str) -> None:
    """Outputs and written tensors are right, all others are as before."""
    before = report.tensors()
    tensors = [None if x is None else to_device(x, DEVICE) for x in report.tensors()]
    call = canonical(report, tensors)
    skip_unless_served(report, call, backend)
    with opkiln.use(backend, strict=True):
        outs = in_a_tuple(report.call(F, *tensors))
    wide = [widened(x) for x in before]
    if report.truth is not None:
        wants = in_a_tuple(report.truth(*wide))
    else:
        wants = in_a_tuple(report.call(torch.nn.functional, *wide))
    written = [tensors[i] for i in report.writes]
    found = [x.cpu() for x in (*outs, *written)]  # waits, so that a late launch error shows
    expected = [*wants, *[wide[i] for i in report.writes]]
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.shape == want.shape, f"output {i}: {tuple(got.shape)}, not {tuple(want.shape)}"
        assert_close(f"output {i}", got, want, report, call, backend)
    for out, want in zip(outs, wants, strict=True):
        floating = want.is_floating_point() or want.is_complex()
        assert out.dtype == (before[0].dtype if floating else want.dtype)
    for i, (after, kept) in enumerate(zip(tensors, before, strict=True)):
        if kept is not None and i not in report.writes:
            assert torch.equal(bits(after.cpu()), bits(kept)), f"input {i} was modified"


def assert_close(
    name: str, got: torch.Tensor, want: torch.Tensor, report: Report, call: Call, backend: str
) -> None:
    if call.spec.name in SETS:
        got, want = in_order(got), in_order(want)
    result = compare(
        name,
        got,
        want,
        call.spec.reduction(call),
        report.condition,
        report.magnitude,
        exact="max_pool" in call.spec.name,
        backend=backend,
        rounds_at_scale=call.spec.rounds_at_scale,
    )
    assert result.ok, result.message


def check_refused(call: Callable[[], Any], says: str) -> None:
    """A mistake in the arguments is torch's exception type and one line."""
    with pytest.raises(ArgumentError, match=says) as caught:
        call()
    assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)
