"""One case against one backend: everything that an implementation promises.

Values, NaN and infinities; number, shape, dtype, strides and memory of the outputs; inputs left
alone; every element written; the same bits twice.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opkiln.conformance.cases import SHORT, Case, batched, evaluate
from opkiln.conformance.cells import shown_by
from opkiln.conformance.compare import Comparison, compare
from opkiln.conformance.tensors import bits, storage_of
from opkiln.dispatch import plan
from opkiln.registry import REGISTRY, Launch
from opkiln.road import Bound
from opkiln.spec import Call, TensorMeta

CPU_ORACLE = (
    1 << 22
)  # elements up to which the reference runs on the CPU, whose float64 is torch's own
SETS = ("topk_selector",)  # the order within a row is free: compared sorted

TRAITS = ("deterministic", "batch_invariant")  # what a policy may ask and an implementation promise

Tensors = tuple[torch.Tensor, ...]


class Fault(AssertionError):
    """What an implementation did wrong, in one line."""


@dataclass(frozen=True)
class Outcome:
    """status: passed, failed, refused; message: why not passed; ratio: worst error / tolerance.

    features: what the case shows (cells.py). ulp: the largest error of an output of the case's
    dtype, in units in the last place (compare.py); dtype: which, where values were compared.
    """

    op: str
    case: str
    status: str
    message: str = ""
    ratio: float = 0.0
    features: tuple[str, ...] = ()
    ulp: float = 0.0
    dtype: str = ""


def check(case: Case, backend: str, device: torch.device | str = "cpu") -> Outcome:
    """Run one case. Never raises for a fault of the backend."""
    said = partial(Outcome, case.op, case.id, features=shown_by(case))
    impl = REGISTRY.of(case.op).get(backend)
    if impl is None:
        return said("refused", f"{backend} does not implement {case.op}")
    policy = case.policy.only(backend)
    unmet = [f for f in TRAITS if getattr(policy, f) and f not in impl.traits]
    if unmet:
        return said("refused", f"does not promise {unmet[0]}")
    try:
        bound = case.build(torch.device(device))
        call = Call.of(bound.spec, bound.tensors, bound.params, policy, case.kind == "train")
        no = impl.supports(call)
        if no is not None:
            return said("refused", no.reason)
        ratio, ulp = verify(case, backend, bound, call)
        dtype = "" if ulp is None else SHORT[case.dtype]
        return said("passed", ratio=ratio, ulp=ulp or 0.0, dtype=dtype)
    except Fault as fault:
        return said("failed", str(fault))
    except Exception as error:  # whatever a backend raises is its failure
        return said("failed", f"raised {type(error).__name__}: {error}".splitlines()[0])


def verify(case: Case, backend: str, bound: Bound, call: Call) -> tuple[float, float | None]:
    """The worst ratio of error to tolerance, and the largest error in ulp. Raises Fault.

    None: no output of the case's dtype, or one as wide as the reference.
    """
    launch = plan(bound.spec, bound.tensors, bound.params, call.policy, call.needs_grad).launch
    expected = expected_of(bound, call)
    before = [None if x is None else storage_of(x).clone() for x in bound.tensors]
    first = run(launch, bound)
    check_outputs(first, call, bound)
    check_inputs(bound, call, before)
    found = [*first, *written(bound, call)]
    results = list(compared(case, call, backend, found, expected))
    ratio = max((c.ratio for c in results), default=0.0)
    told = zip(found, results, strict=True)
    narrow = case.kind != "train" and case.dtype not in (torch.float64, torch.complex128)
    own = [c.ulp for x, c in told if narrow and x.dtype == case.dtype]

    kept = [x.clone() for x in found]
    for x, stored in zip(bound.tensors, before, strict=True):
        if x is not None and stored is not None and bound.spec.mutates(call):
            storage_of(x).copy_(stored)
    second = run(launch, bound)
    check_second(first, kept, second, [*second, *written(bound, call)], call)
    if call.policy.batch_invariant and case.kind == "forward" and batched(case.op):
        check_first_row(case, call, first)
    if case.policy.checks:  # one case an op: it costs a second reference
        check_changed_input(case, backend, bound, call, launch)
    return ratio, max(own, default=None)


def check_first_row(case: Case, call: Call, outs: Tensors) -> None:
    """The first row alone has the bits that it has in the batch."""
    bound = case.build(call.device, rows=1)
    alone = run(plan(bound.spec, bound.tensors, bound.params, call.policy).launch, bound)
    for name, out, one in zip(output_names(call), outs, alone, strict=True):
        if not torch.equal(bits(out[:1]), bits(one)):
            raise Fault(f"{name} of the first row depends on how many rows there are")


def check_changed_input(case: Case, backend: str, bound: Bound, call: Call, launch: Launch) -> None:
    """Other values at the same addresses: a result kept for these tensors shows."""
    x = next(
        x for x in bound.tensors if x is not None and (x.is_floating_point() or x.is_complex())
    )
    x.neg_()
    expected = expected_of(bound, call)
    found = [*run(launch, bound), *written(bound, call)]
    try:
        list(compared(case, call, backend, found, expected))
    except Fault as fault:
        raise Fault(f"after its input changed in place: {fault}") from fault


def expected_of(bound: Bound, call: Call) -> list[torch.Tensor]:
    """What the outputs, then the written inputs, have to be: double precision."""
    device = call.device
    if sum(x.numel() for x in bound.tensors if x is not None) <= CPU_ORACLE:
        device = torch.device("cpu")
    moved = tuple(None if x is None else x.to(device) for x in bound.tensors)
    outs, tensors = evaluate(bound._replace(tensors=moved))
    here = [o for o, present in zip(outs, call.present, strict=False) if present]
    names = bound.spec.mutates(call)
    mutated = [x for n, x in zip(bound.spec.tensor_names, tensors, strict=True) if n in names]
    return [x.to(call.device) for x in (*here, *mutated) if x is not None]


def written(bound: Bound, call: Call) -> list[torch.Tensor]:
    """The inputs that the call writes."""
    names = bound.spec.mutates(call)
    pairs = zip(bound.spec.tensor_names, bound.tensors, strict=True)
    return [x for name, x in pairs if name in names and x is not None]


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """torch.empty gives NaN, the largest value for integers: an element left unwritten shows."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def run(launch: Launch, bound: Bound) -> Tensors:
    with fresh_memory_is_nan(), torch.no_grad():
        out = launch(*bound.tensors)
    outs = out if isinstance(out, tuple) else (out,)
    return tuple(outs)


def check_outputs(outs: Tensors, call: Call, bound: Bound) -> None:
    """Number, type, shape, dtype, strides, device and memory as `call.outputs` says."""
    if len(outs) != len(call.outputs):
        raise Fault(f"returned {len(outs)} outputs, the call has {len(call.outputs)}")
    for name, out, meta in zip(output_names(call), outs, call.outputs, strict=True):
        if not isinstance(out, torch.Tensor):
            raise Fault(f"{name} is a {type(out).__name__}, expected a Tensor")
        got = TensorMeta.of(out)
        for what in ("shape", "dtype", "stride", "device"):
            if getattr(got, what) != getattr(meta, what):
                raise Fault(
                    f"{name} has {what} {getattr(got, what)}, expected {getattr(meta, what)}"
                )
        if out.is_conj() or out.is_neg():
            raise Fault(f"{name} is a lazy conjugate or negation")
        if shares_memory(out, bound.tensors):
            raise Fault(f"{name} shares memory with an input")
    for i, out in enumerate(outs):
        if shares_memory(out, outs[:i]):
            raise Fault(f"{output_names(call)[i]} shares memory with another output")


def output_names(call: Call) -> list[str]:
    present = zip(call.spec.outputs, call.present, strict=True)
    return [output.name for output, here in present if here]


def shares_memory(x: torch.Tensor, others: Any) -> bool:
    if x.numel() == 0:
        return False
    mine = x.untyped_storage().data_ptr()
    return any(o is not None and o.untyped_storage().data_ptr() == mine for o in others)


def check_inputs(bound: Bound, call: Call, before: list[torch.Tensor | None]) -> None:
    """No byte behind an input has changed, but for the elements that the call may write."""
    names = bound.spec.mutates(call)
    for name, x, stored in zip(bound.spec.tensor_names, bound.tensors, before, strict=True):
        if x is None or stored is None:
            continue
        after = storage_of(x)
        if name in names:  # put the old elements back into a copy: the gaps must be as before
            after = after.clone()
            where = (x.shape, x.stride(), x.storage_offset())
            after.as_strided(*where).copy_(stored.as_strided(*where))
        if not torch.equal(bits(after), bits(stored)):
            outside = " outside its elements" if name in names else ""
            raise Fault(f"input {name} was modified{outside}")


def compared(
    case: Case, call: Call, backend: str, found: list[torch.Tensor], expected: list[torch.Tensor]
) -> Iterator[Comparison]:
    """Each output and written input against its expected values. Raises Fault if one is wrong."""
    names = [*output_names(call), *call.spec.mutates(call)]
    exact = is_exact(case)
    terms = call.spec.reduction(call)
    for name, out, want in zip(names, found, expected, strict=True):
        if case.op in SETS:
            want = in_order(want)
            out = out if call.policy.deterministic else in_order(out)
        result = compare(
            name,
            out,
            want,
            terms,
            case.row.condition,
            case.row.magnitude,
            exact,
            backend,
            call.spec.rounds_at_scale,
        )
        if not result.ok:
            raise Fault(result.message)
        yield result


def is_exact(case: Case) -> bool:
    """A maximum is one of its inputs."""
    return "max_pool" in case.op and case.kind != "backward"


def in_order(rows: torch.Tensor) -> torch.Tensor:
    """Ascending, the unused slots (-1) last."""
    last = torch.iinfo(rows.dtype).max
    ordered = rows.masked_fill(rows == -1, last).sort(-1).values
    return ordered.masked_fill(ordered == last, -1)


def check_second(
    first: Tensors, kept: list[torch.Tensor], second: Tensors, found: list[torch.Tensor], call: Call
) -> None:
    """A second run has memory of its own and the same bits."""
    names = [*output_names(call), *call.spec.mutates(call)]
    for name, out, old, copy in zip(names, second, first, kept, strict=False):
        if shares_memory(out, first):
            raise Fault(f"{name} shares memory with the output of an earlier call")
        if not torch.equal(bits(old), bits(copy)):
            raise Fault(f"{name} of an earlier call was modified")
    for name, out, copy in zip(names, found, kept, strict=True):
        if call.spec.name in SETS and not call.policy.deterministic:
            out, copy = in_order(out), in_order(copy)
        if not torch.equal(bits(out), bits(copy)):
            raise Fault(f"{name} differs between two runs")
