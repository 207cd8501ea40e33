"""The one place where the bench meets opkiln: a row becomes a call, a backend becomes a launch."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from opkiln import functional, road
from opkiln.dispatch import consider, plan
from opkiln.measured import bucket_of
from opkiln.ops import CATALOGUE
from opkiln.policy import DEFAULT
from opkiln.registry import REGISTRY
from opkiln.spec import Call, OpSpec

from opkiln_bench.catalogue import TORCH_NAMES, CatalogueError, Row, TensorRow, choose
from opkiln_bench.gradients import gradient_call
from opkiln_bench.inputs import make_inputs
from opkiln_bench.peers import absent

SHORT_NAMES = {getattr(torch, long): short for short, long in TORCH_NAMES.items()}


@dataclass
class Subject:
    """A row on a device: its spec, tensors in the spec's order and canonical parameters."""

    row: Row
    spec: OpSpec
    tensors: list[torch.Tensor | None]
    params: dict[str, Any]

    @property
    def call(self) -> Call:
        return Call.of(self.spec, self.tensors, self.params, needs_grad=self.row.train)

    @property
    def shown_tensors(self) -> dict[str, TensorRow]:
        """The tensors of the call by name, in the spec's order for a gradient."""
        if self.row.forward is None:
            return self.row.tensors
        pairs = zip(self.spec.tensor_names, self.tensors, strict=True)
        return {
            n: TensorRow(tuple(t.shape), SHORT_NAMES[t.dtype])
            for n, t in pairs
            if t is not None and t.numel()
        }

    def fresh_tensors(self) -> list[torch.Tensor | None]:
        """The tensors, with copies of those that the op writes."""
        written = self.spec.mutates(self.call)
        pairs = zip(self.spec.tensor_names, self.tensors, strict=True)
        return [t.clone() if n in written and t is not None else t for n, t in pairs]


def canonical(function: str, arguments: dict[str, Any]) -> road.Bound:
    """Spec, tensors and canonical parameters behind a public call, which is not run."""
    fn = getattr(functional, function)
    required = [p.name for p in inspect.signature(fn).parameters.values() if p.default is p.empty]
    try:
        with road.capturing():
            fn(**{**dict.fromkeys(required), **arguments})
    except road.Captured as found:
        return found.bound
    raise AssertionError(f"{function} did not reach road.run")


def bring(row: Row, device: torch.device) -> Subject:
    """A row's inputs on `device`, through the canonical form of the public function."""
    if row.params is not None:
        made = make_inputs(row, device)
        captured = CATALOGUE[row.name]
        given = [made.get(name) for name in captured.tensor_names]
        return Subject(row, captured, given, dict(row.params))
    spec, tensors, params = canonical(row.function, {**make_inputs(row, device), **row.args})
    if spec.op != (row.forward or row.op):
        raise ValueError(f"{row}: opkiln.functional.{row.function} calls {spec.op}")
    if row.forward is None:
        return Subject(row, spec, list(tensors), params)
    return Subject(row, *gradient_call(spec, tensors, params, f"gradient of {row}"))


@dataclass
class Contestant:
    """One backend, ready to run a row. launch takes the spec's tensors."""

    backend: str
    version: str
    launch: Any
    first_call_ms: float


def chosen_backends(patterns: Sequence[str], exclude: Sequence[str] = ()) -> list[str]:
    """Registered backends that match; ours first, so that forward rounds begin with it."""
    known = REGISTRY.backends()
    for name, reason in absent().items():
        if name in patterns and name not in known:
            raise CatalogueError(f"backend {name} cannot be measured here: {reason}")
    names = choose(patterns, {*known, "opkiln"}, "backend")
    names = {n for n in names if not any(fnmatchcase(n, e) for e in exclude)}
    return sorted(names, key=lambda n: (n != "opkiln", n))


def declined(subject: Subject, backend: str) -> tuple[str, str] | None:
    """("missing" or "refused", reason) where a backend does not take the row's call."""
    (seen,) = consider(subject.call, [backend])
    if seen.status == "possible":
        return None
    return {"absent": "missing"}.get(seen.status, seen.status), seen.reason


def enter(subject: Subject, backend: str) -> tuple[Contestant, Any]:
    """Prepare a backend and run it once; the contestant and its first result.

    Raises what the backend raises.
    """
    tensors = subject.fresh_tensors()
    start = time.perf_counter()
    policy = DEFAULT.only(backend)
    made = plan(subject.spec, tensors, subject.params, policy, subject.row.train)
    result = made.launch(*tensors)
    if made.call.device.type == "cuda":
        torch.cuda.synchronize()
    elapsed_ms = (time.perf_counter() - start) * 1e3
    outputs = result if isinstance(result, tuple) else (result,)
    mutated = [t for t, before in zip(tensors, subject.tensors, strict=True) if t is not before]
    contestant = Contestant(backend, made.implementation.version, made.launch, elapsed_ms)
    return contestant, [*outputs, *mutated]


def cost_of(subject: Subject) -> dict[str, int]:
    """flops, bytes_read, bytes_written of the row's call."""
    cost = subject.spec.cost(subject.call)
    return {
        "flops": cost.flops,
        "bytes_read": cost.bytes_read,
        "bytes_written": cost.bytes_written,
    }


def bucket_entry(subject: Subject) -> dict[str, Any]:
    """Kind and sizes of the call, by which dispatch finds its times (opkiln.measured)."""
    bucket = bucket_of(subject.call)
    return {"kind": bucket.kind, "sizes": list(bucket.sizes)}


def shown_args(subject: Subject) -> dict[str, Any]:
    """The arguments of a row that a reader must be told: not defaults, not sizes in the shapes."""
    if subject.row.params is not None:
        return {name: v for name, v in subject.row.params.items() if v is not None}
    defaults = inspect.signature(getattr(functional, subject.row.function)).parameters
    dims = {word.lstrip("*") for t in subject.spec.tensors for word in t.dims.split()}
    return {
        name: value
        for name, value in subject.row.args.items()
        if name not in dims and value != defaults[name].default
    }
