"""Conformance cases, generated from a table of rows for each op.

A row is one call of a public function: `row("odd", input=t(5, 77), normalized_shape=(77,), ...)`.
From it come the cases of the forward (with and without saved tensors), of its backward and of its
in-place form, each in several dtypes. What a case passes to an implementation is canonical: the
public function is run only as far as its arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from opkiln import functional, road
from opkiln.conformance.tensors import LAYOUTS, OVERLAPPING, Shape, T, normal, to_device
from opkiln.ops import CATALOGUE
from opkiln.policy import DEFAULT, Policy
from opkiln.road import Bound
from opkiln.spec import Call, OpSpec

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ALL = ()
TWO = (F16, F32)
SHORT = {F16: "f16", BF16: "bf16", F32: "f32", F64: "f64"} | {
    torch.complex64: "c64",
    torch.complex128: "c128",
}


@dataclass(frozen=True)
class Row:
    """One call of a public function, without its dtype.

    arguments: by keyword; a `T` becomes a tensor.
    dtypes: of the case; ALL: every one that the op allows.
    condition: how much the formula amplifies rounding errors of its input (|mean| / deviation, the
        largest rope position); scales the float32 part of the tolerance.
    magnitude: that of the terms where they cancel and the result is almost zero.
    grad: False where the backward of such values is not defined by the spec.
    upstream: layout of the gradient that comes in.
    """

    label: str
    arguments: dict[str, Any]
    dtypes: tuple[torch.dtype, ...] = TWO
    condition: float = 1.0
    grad: bool = True
    upstream: str = "contiguous"
    magnitude: float = 0.0

    def having(self, **arguments: Any) -> Row:
        return replace(self, arguments=self.arguments | arguments)


def row(
    label: str,
    dtypes: tuple[torch.dtype, ...] = TWO,
    condition: float = 1.0,
    grad: bool = True,
    upstream: str = "contiguous",
    magnitude: float = 0.0,
    **arguments: Any,
) -> Row:
    return Row(label, arguments, dtypes, condition, grad, upstream, magnitude)


@dataclass(frozen=True)
class Case:
    """One call of one op with its data, the same on every device.

    kind: "forward"; "train": the forward with its saved tensors; "backward"; "inplace".
    function: the public function that canonicalizes the arguments.
    """

    op: str
    id: str
    kind: str
    function: str
    row: Row
    dtype: torch.dtype
    policy: Policy = DEFAULT
    mask: tuple[bool, ...] | None = None

    @property
    def spec(self) -> OpSpec:
        return CATALOGUE[self.op]

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.op}/{self.id}".encode()))

    def arguments(self, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        """Of the public function, by keyword."""
        return {
            name: to_device(value.build(generator, self.dtype), device)
            if isinstance(value, T)
            else value
            for name, value in self.row.arguments.items()
        }

    def build(self, device: torch.device, rows: int | None = None) -> Bound:
        """The canonical call, its tensors on `device`; rows: only the first of the batch."""
        generator = self.generator()
        arguments = self.arguments(device, generator)
        if rows is not None:
            arguments |= {name: arguments[name][:rows] for name in batched(self.op)}
        bound = canonical(self.function, arguments)
        if self.kind == "backward":
            return backward_of(bound, self, generator)
        return bound._replace(spec=self.spec)


def batched(op: str) -> tuple[str, ...]:
    """The op's tensors whose first dim is the batch; none where rows depend on each other."""
    from opkiln.conformance.rows import BATCHED

    return BATCHED.get(op, ())


def canonical(function: str, arguments: dict[str, Any]) -> Bound:
    """What a public function would hand to a backend."""
    try:
        with road.capturing():
            getattr(functional, function)(**arguments)
    except road.Captured as found:
        return found.bound
    raise AssertionError(f"{function} did not reach road.run")


def widened(x: torch.Tensor | None) -> torch.Tensor | None:
    """Floating-point and complex values in double precision, in memory of its own."""
    if x is None:
        return None
    if x.is_complex():
        return x.to(torch.complex128, copy=True)
    return x.to(F64, copy=True) if x.is_floating_point() else x.clone()


def evaluate(bound: Bound) -> tuple[list[torch.Tensor | None], list[Any]]:
    """The reference in double precision: all outputs, and the tensors after it wrote to them."""
    tensors = [widened(x) for x in bound.tensors]
    outs = bound.spec.reference(*tensors, **bound.params)
    return list(outs) if isinstance(outs, tuple) else [outs], tensors


def backward_of(bound: Bound, case: Case, generator: torch.Generator) -> Bound:
    """The backward's call: random upstream gradients, saved tensors by the reference."""
    spec, tensors, params = bound
    assert spec.backward is not None
    call = Call.of(spec, tensors, params, needs_grad=True)
    outs, _ = evaluate(bound)
    values = [o for o, here in zip(outs, call.present, strict=True) if here and o is not None]
    made = iter(zip(values, call.outputs, strict=True))
    known: dict[str, Any] = dict(zip(spec.tensor_names, tensors, strict=True))
    shapes = {f"{n}_shape": tuple(x.shape) for n, x in known.items() if x is not None}
    given = tuple(known[n] is not None for n in spec.backward.wrt)
    upstream: list[torch.Tensor] = []
    saved: list[torch.Tensor] = []
    for output, here in zip(spec.outputs, call.present, strict=True):
        if not here:  # as the operator does for an output that this call does not have
            (saved if output.saved else upstream).append(torch.empty(0, device=call.device))
            continue
        value, meta = next(made)
        known[output.name] = value.to(meta.dtype)
        if output.saved:
            saved.append(known[output.name])
        elif output.differentiable:
            grad = gradient(meta.shape, meta.dtype, generator)
            grad = LAYOUTS[upstream_layout(case.row, grad)](grad)
            upstream.append(to_device(grad, call.device))
    values_of = shapes | params | {"output_mask": case.mask or given}
    back = spec.backward.spec
    return Bound(
        back,
        (*upstream, *[known[n] for n in spec.backward.needs], *saved),
        {name: values_of[name] for name in back.param_names},
    )


def gradient(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        parts = [normal(shape, generator) for _ in range(2)]
        return torch.complex(*parts).to(dtype)
    return normal(shape, generator).to(dtype)


def upstream_layout(row: Row, grad: torch.Tensor) -> str:
    """The row's layout where the gradient has the dims for it."""
    small = {"transposed": 2, "channels_last": 4}.get(row.upstream, 1)
    return row.upstream if grad.ndim >= small else "contiguous"


def cases_of(op: str, dtypes: tuple[torch.dtype, ...] | None = None) -> list[Case]:
    """The cases of one op, in the order of its table."""
    from opkiln.conformance.rows import TABLES

    spec = CATALOGUE[op]
    function, rows = TABLES.get(spec.forward_op or op, ("", ()))
    found = [case for i, r in enumerate(rows) for case in expand(spec, function, r, first=i == 0)]
    return [c for c in found if dtypes is None or c.dtype in dtypes]


def expand(spec: OpSpec, function: str, r: Row, first: bool) -> Iterator[Case]:
    """The cases of one row for one op. The first row also runs under each policy flag."""
    forward = CATALOGUE[spec.forward_op or spec.name]
    back = forward.backward
    is_backward = back is not None and back.spec.name == spec.name
    dtypes = r.dtypes or allowed(forward, r)
    for dtype in dtypes:
        case = Case(spec.name, f"{r.label}-{SHORT[dtype]}", "forward", function, r, dtype)
        if spec is forward:
            yield case
            if back is not None and any(o.saved for o in spec.outputs) and r.grad:
                yield replace(case, kind="train", id=f"{case.id}-train")
        elif is_backward and r.grad:
            yield replace(case, kind="backward")
        elif not is_backward and writable(spec, r):
            yield replace(case, kind="inplace")
    if first:
        usual = next((d for d in dtypes if d in (F32, torch.complex64)), dtypes[-1])
        case = Case(spec.name, f"{r.label}-{SHORT[usual]}", "forward", function, r, usual)
        yield from under_policies(case, spec, is_backward)
        if is_backward:
            yield from masked(case, forward)


def allowed(forward: OpSpec, r: Row) -> tuple[torch.dtype, ...]:
    """Dtypes of the op's first tensor whose dtype the row leaves open."""
    free = [
        n for n, v in r.arguments.items() if isinstance(v, T) and v.dtype is None and not v.wide
    ]
    spec = next((x for x in forward.tensors if x.name in free and x.dtypes), forward.tensors[0])
    return spec.dtypes


def writable(spec: OpSpec, r: Row) -> bool:
    """An in-place op cannot write into memory that several elements share."""
    values = [r.arguments.get(name) for name in spec.may_mutate]
    return not any(isinstance(v, T) and v.layout in OVERLAPPING for v in values)


def under_policies(case: Case, spec: OpSpec, is_backward: bool) -> Iterator[Case]:
    kind = "forward" if spec.forward_op is None else "backward" if is_backward else "inplace"
    for flag in ("deterministic", "batch_invariant", "checks"):
        policy = Policy(**{flag: True})  # type: ignore[arg-type]
        yield replace(case, kind=kind, id=f"{case.id}-{flag}", policy=policy)


def masked(case: Case, forward: OpSpec) -> Iterator[Case]:
    """Each gradient alone, where there are several."""
    assert forward.backward is not None
    wrt = forward.backward.wrt
    for i, name in enumerate(wrt if len(wrt) > 1 else ()):
        mask = tuple(j == i for j in range(len(wrt)))
        yield replace(case, kind="backward", id=f"{case.id}-only_{name}", mask=mask)
