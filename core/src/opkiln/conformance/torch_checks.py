"""What torch does with a public function: derivatives of derivatives, torch.compile, torch.export,
autocast. Each on one case of an op, with the backend named strictly.

As elsewhere beyond the values of a case, a plain eager call of the same implementation is the
oracle; second derivatives have the reference in double precision.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from opkiln import functional
from opkiln.conformance.cases import Case, cases_of, widened
from opkiln.conformance.checks import SETS, Fault, Outcome, in_order
from opkiln.conformance.compare import compare
from opkiln.conformance.judge import Check, Task, call_of, first_taken, judged
from opkiln.conformance.tensors import bits, normal
from opkiln.ops import CATALOGUE
from opkiln.road import Bound
from opkiln.schema import operator
from opkiln.torch_backend import torch_formula

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
USUAL = (F32, torch.complex64)

Arguments = dict[str, Any]
Dtypes = tuple[torch.dtype, ...]
Fn = Callable[..., Any]


def torch_checks(op: str, backend: str, device: torch.device) -> list[Task]:
    """The checks of a forward op; none for another."""
    spec = CATALOGUE[op]
    if spec.forward_op is not None or not any(c.kind == "forward" for c in cases_of(op)):
        return []
    lowered = (F16, BF16) if spec.autocast == "fp32" else USUAL
    checks: list[tuple[str, Dtypes, Check]] = [
        ("compile", USUAL, when_compiled),
        ("export", USUAL, when_exported),
        ("autocast", lowered, under_autocast),
    ]
    if spec.backward is not None:
        checks.append(("double_backward", USUAL, second_derivatives))
    return [
        partial(on_first_case, op, backend, device, name, dtypes, body)
        for name, dtypes, body in checks
    ]


def on_first_case(
    op: str, backend: str, device: torch.device, name: str, dtypes: Dtypes, body: Check
) -> Outcome:
    """The check on the first forward case that is taken: of these dtypes where there are any."""
    forward = [c for c in cases_of(op) if c.kind == "forward"]
    of_these = [c for c in forward if c.dtype in dtypes]
    return judged(first_taken(of_these or forward, backend, device), backend, device, name, body)


def function_of(case: Case, backend: str) -> Fn:
    return partial(getattr(functional, case.function), backend=backend)


def arguments_of(case: Case, bound: Bound) -> Arguments:
    """Fresh ones, on the device of the canonical call. A tensor that a function reads into a
    parameter (factors) is a list here: a traced one has no values.
    """
    device = next(x.device for x in bound.tensors if x is not None)
    given = case.arguments(device, case.generator())
    read = [n for n in given if n not in bound.spec.tensor_names]
    return given | {n: x.tolist() for n in read if isinstance(x := given[n], torch.Tensor)}


def outputs(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def assert_same(case: Case, found: Any, expected: Any, where: str) -> None:
    """The same dtypes, strides and bits."""
    for i, (a, b) in enumerate(zip(outputs(found), outputs(expected), strict=True)):
        if (a.dtype, a.stride()) != (b.dtype, b.stride()):
            raise Fault(
                f"result {i} {where} is {a.dtype} with strides {a.stride()}, "
                f"eager {b.dtype} with {b.stride()}"
            )
        if case.op in SETS:
            a, b = in_order(a), in_order(b)
        if not torch.equal(bits(a), bits(b)):
            raise Fault(f"result {i} {where} differs from the eager call's")


def when_compiled(case: Case, backend: str, bound: Bound) -> None:
    """One graph without breaks: by Inductor on a GPU, on a CPU (where that takes 20 s) by AOT."""
    fn = function_of(case, backend)
    expected = fn(**arguments_of(case, bound))
    on_gpu = call_of(bound, backend).device.type == "cuda"
    torch._dynamo.reset()
    compiled = torch.compile(
        fn, fullgraph=True, dynamic=False, backend="inductor" if on_gpu else "aot_eager"
    )
    with in_this_process() if on_gpu else contextlib.nullcontext():
        found = compiled(**arguments_of(case, bound))
    assert_same(case, found, expected, "compiled")


def in_this_process() -> Any:
    """Inductor without its pool of processes: it has little to compile, and conform has its own."""
    config: Any = importlib.import_module("torch._inductor.config")  # takes a second
    return config.patch(compile_threads=1)


class Calling(torch.nn.Module):
    """A module whose forward is one call; names: of the arguments that are tensors."""

    def __init__(self, fn: Fn, names: list[str], rest: Arguments) -> None:
        super().__init__()
        self.fn, self.names, self.rest = fn, names, rest

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.fn(**dict(zip(self.names, tensors, strict=True)), **self.rest)


def when_exported(case: Case, backend: str, bound: Bound) -> None:
    """The exported program holds the op's operator and computes what the eager call does."""
    fn = function_of(case, backend)
    expected = fn(**arguments_of(case, bound))
    given = arguments_of(case, bound)
    tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    rest = {n: x for n, x in given.items() if n not in tensors}
    module = Calling(fn, list(tensors), rest)
    program = torch.export.export(module, tuple(tensors.values()))
    if operator(bound.spec) not in {node.target for node in program.graph.nodes}:
        raise Fault("the exported program does not hold the operator")
    fresh = arguments_of(case, bound)
    found = program.module()(*[fresh[n] for n in tensors])
    assert_same(case, found, expected, "exported")


def under_autocast(case: Case, backend: str, bound: Bound) -> None:
    """As the call on tensors that were cast by hand, as the spec says that torch casts."""
    fn, kind = function_of(case, backend), call_of(bound, backend).device.type
    dtype = {"fp32": F32, "lower": BF16}.get(bound.spec.autocast or "")

    def cast(x: Any) -> Any:
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(dtype) if floating and dtype else x

    expected = fn(**{n: cast(x) for n, x in arguments_of(case, bound).items()})
    with torch.autocast(kind, BF16):
        found = fn(**arguments_of(case, bound))
    assert_same(case, found, expected, "under autocast")


def second_derivatives(case: Case, backend: str, bound: Bound) -> None:
    """Of a weighted sum of the gradients, by the inputs and by the upstream gradients: as torch
    itself takes them of the reference.
    """
    spec = bound.spec
    assert spec.backward is not None
    found = twice(function_of(case, backend), arguments_of(case, bound), spec.backward.wrt)
    tensors = dict(zip(spec.tensor_names, [widened(x) for x in bound.tensors], strict=True))
    formula = partial(torch_formula, spec, params=bound.params)
    expected = twice(lambda **t: formula(tuple(t.values())), tensors, spec.backward.wrt)
    call = call_of(bound, backend)
    for name, x in found.items():
        want = expected[name]
        terms = max(spec.reduction(call), want.numel())
        result = compare(f"second derivative by {name}", x, want, terms, case.row.condition)
        if not result.ok:
            raise Fault(result.message)


def twice(fn: Fn, arguments: Arguments, wrt: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Name -> second derivative; of each output's upstream gradient as "grad <i>"."""
    leaves = {n: arguments[n].requires_grad_() for n in wrt if arguments.get(n) is not None}
    outs = [o for o in outputs(fn(**arguments)) if o.requires_grad]
    generator = torch.Generator().manual_seed(len(outs))
    upstream = [random_like(o, generator).requires_grad_() for o in outs]
    grads = torch.autograd.grad(outs, list(leaves.values()), upstream, create_graph=True)
    weights = [random_like(g, generator) for g in grads]
    inputs = leaves | {f"grad {i}": g for i, g in enumerate(upstream)}
    second = torch.autograd.grad(
        grads, list(inputs.values()), weights, allow_unused=True, materialize_grads=True
    )
    return {n: g.detach() for n, g in zip(inputs, second, strict=True)}


def random_like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same values for every dtype: those of float32."""
    shape = tuple(x.shape)
    if x.is_complex():
        drawn = torch.complex(*[normal(shape, generator).float() for _ in range(2)])
    else:
        drawn = normal(shape, generator).float()
    return drawn.to(x.device, x.dtype)
