"""A check on one implementation beyond the values of a case: its outcome, whatever it raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from opkiln.conformance.cases import Case
from opkiln.conformance.checks import Fault, Outcome
from opkiln.dispatch import plan, refusal
from opkiln.errors import BackendError
from opkiln.policy import DEFAULT, Policy
from opkiln.registry import REGISTRY, Launch
from opkiln.road import Bound
from opkiln.spec import Call

Check = Callable[[Case, str, Bound], None]
Task = Callable[[], Outcome]  # a check that is still to run


def judged(
    case: Case,
    backend: str,
    device: torch.device,
    name: str,
    body: Check,
    policy: Policy = DEFAULT,
) -> Outcome:
    """Run one check on the case's implementation; `name` is the feature that it shows.

    body(case, backend, bound) raises Fault for what is wrong, BackendError for what it refuses.
    """

    def said(status: str, message: str = "") -> Outcome:
        return Outcome(case.op, f"{case.id}-{name}", status, message, features=(name,))

    impl = REGISTRY.of(case.op).get(backend)
    if impl is None:
        return said("refused", f"{backend} does not implement {case.op}")
    bound = case.build(device)
    no = refusal(impl, call_of(bound, backend, policy))
    if no is not None:
        return said("refused", no.reason)
    try:
        body(case, backend, bound)
    except Fault as fault:
        return said("failed", str(fault))
    except BackendError as error:  # it refuses a call that the check made of the case
        return said("refused", str(error))
    except Exception as error:  # whatever a backend raises is its failure
        return said("failed", f"raised {type(error).__name__}: {error}".splitlines()[0])
    return said("passed")


def first_taken(cases: Sequence[Case], backend: str, device: torch.device) -> Case:
    """The first case that the implementation takes; the first of all where it takes none."""
    impl = REGISTRY.of(cases[0].op).get(backend)

    def takes(case: Case) -> bool:
        return impl is not None and not refusal(impl, call_of(case.build(device), backend))

    return next((case for case in cases if takes(case)), cases[0])


def call_of(bound: Bound, backend: str, policy: Policy = DEFAULT) -> Call:
    return Call.of(bound.spec, bound.tensors, bound.params, policy.only(backend))


def launch_of(bound: Bound, backend: str, policy: Policy = DEFAULT) -> Launch:
    return plan(bound.spec, bound.tensors, bound.params, policy.only(backend)).launch
