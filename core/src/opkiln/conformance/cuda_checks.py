"""What only a GPU can get wrong: streams, graphs, grid limits, 64-bit offsets, a second device.

The values of the other cases are the oracle here: each check compares with a plain eager call of
the same implementation, which those cases have compared with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from opkiln.conformance.cases import SHORT, Case, Row, cases_of, expand
from opkiln.conformance.checks import (
    SETS,
    Fault,
    Outcome,
    check,
    expected_of,
    in_order,
    is_exact,
    output_names,
    run,
)
from opkiln.conformance.compare import compare
from opkiln.conformance.judge import call_of, first_taken, judged, launch_of
from opkiln.conformance.rows import BATCHED, TABLES
from opkiln.conformance.rows.large import MANY, TILED
from opkiln.conformance.rows.published import PUBLISHED
from opkiln.conformance.tensors import T, bits, storage_of
from opkiln.ops import CATALOGUE
from opkiln.registry import Launch
from opkiln.road import Bound

SLOW_CYCLES = 20_000_000  # about 10 ms at 2 GHz: longer than any launch of these cases
ROWS = 67  # of a batch that is repeated; a prime, so that no tile size divides it
MANY_ROWS = 65_537  # more than a grid's y and z axes hold
MANY_ELEMENTS = 2**32 + 4096  # offsets fit in no 32 bits, those of the second half in no int32


def device_checks(op: str, backend: str, device: torch.device, big: bool) -> Iterator[Outcome]:
    """The checks of one op: of its first case, and the rows that only a GPU runs."""
    cases = cases_of(op)
    if not cases:
        return
    case = first_taken(cases, backend, device)
    yield judged(case, backend, device, "side_stream", on_side_stream)
    yield judged(case, backend, device, "cuda_graph", in_cuda_graph)
    if op in BATCHED:
        yield judged(grown(case), backend, device, "many_rows", with_many_rows)
    if torch.cuda.device_count() > 1:
        yield on_second_device(case, backend)
    for many in many_cases(op):
        yield check(many, backend, device)
    if big:
        for large in big_cases(case):
            yield judged(large, backend, device, "above_32_bits", above_32_bits)
            torch.cuda.empty_cache()


def many_cases(op: str) -> Iterator[Case]:
    """Cases with more channels, heads, tokens or groups than a grid's y and z axes hold."""
    return cases_of_rows(op, MANY)


def published_cases(op: str) -> Iterator[Case]:
    """Cases of the geometries that kernels have tilings and engines of their own for."""
    return cases_of_rows(op, PUBLISHED)


def cases_of_rows(op: str, table: Mapping[str, tuple[Row, ...]]) -> Iterator[Case]:
    spec = CATALOGUE[op]
    forward = spec.forward_op or op
    for r in table.get(forward, ()):
        yield from expand(spec, TABLES[forward][0], r, first=False)


def big_cases(case: Case) -> Iterator[Case]:
    """Cases to repeat until 32 bits do not count their elements."""
    if case.op in BATCHED:
        yield grown(case)
    if case.op in TILED:
        r = TILED[case.op].row
        name = f"{r.label}-{SHORT[r.dtypes[0]]}"
        yield Case(case.op, name, "forward", case.function, r, r.dtypes[0])


def results(launch: Launch, bound: Bound) -> list[torch.Tensor]:
    """The outputs, then copies of the inputs (some ops write them)."""
    out = launch(*bound.tensors)
    outs = list(out) if isinstance(out, tuple) else [out]
    return [*outs, *[x.clone() for x in bound.tensors if x is not None]]


def snapshot(bound: Bound) -> list[torch.Tensor]:
    return [storage_of(x).clone() for x in bound.tensors if x is not None]


def restore(bound: Bound, stored: list[torch.Tensor]) -> None:
    for x, old in zip([x for x in bound.tensors if x is not None], stored, strict=True):
        storage_of(x).copy_(old)


def assert_same(
    case_op: str, found: list[torch.Tensor], expected: list[torch.Tensor], where: str
) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if case_op in SETS and i == 0:
            a, b = in_order(a), in_order(b)
        if not torch.equal(bits(a), bits(b)):
            raise Fault(f"result {i} {where} differs from the eager call's")


def on_side_stream(case: Case, backend: str, bound: Bound) -> None:
    """The inputs are produced late on a side stream; work on another stream would miss them."""
    launch = launch_of(bound, backend)
    stored = snapshot(bound)
    expected = results(launch, bound)
    for x in bound.tensors:
        if x is not None:
            storage_of(x).zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_CYCLES)
        restore(bound, stored)
        found = results(launch, bound)
        copies = [x.clone() for x in found]
    side.synchronize()
    assert_same(bound.spec.name, copies, expected, "on a side stream")


def in_cuda_graph(case: Case, backend: str, bound: Bound) -> None:
    """Captured after a warm-up; the replay has to use the inputs' values at replay time."""
    launch = launch_of(bound, backend)
    stored = snapshot(bound)
    expected = results(launch, bound)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(launch, bound)
    torch.cuda.current_stream().wait_stream(side)
    for x in bound.tensors:
        if x is not None:
            storage_of(x).zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(launch, bound)
    restore(bound, stored)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(bound.spec.name, found, expected, "in a captured graph")


def on_second_device(case: Case, backend: str) -> Outcome:
    """Inputs on cuda:1 while cuda:0 is current."""
    with torch.cuda.device(0):
        outcome = check(case, backend, torch.device("cuda", 1))
        current = torch.cuda.current_device()
    said = replace(outcome, case=f"{case.id}-second_device", features=("second_device",))
    if outcome.status == "passed" and current != 0:
        return replace(said, status="failed", message=f"left cuda:{current} as the current device")
    return said


def grown(case: Case) -> Case:
    """The case with ROWS as the first dim of its batched tensors."""

    def longer(name: str, value: Any) -> Any:
        grows = name in BATCHED[case.op] and isinstance(value, T)
        return replace(value, shape=(ROWS, *value.shape[1:])) if grows else value

    arguments = {n: longer(n, v) for n, v in case.row.arguments.items()}
    return replace(case, row=replace(case.row, arguments=arguments))


def with_many_rows(case: Case, backend: str, bound: Bound) -> None:
    """More rows than a 16-bit grid axis holds: the batch again and again, every row compared."""
    times = -(-MANY_ROWS // ROWS)
    for name, out, expected in repeated(case, backend, bound, times):
        whole = expected.repeat(times, *[1] * (expected.ndim - 1))
        assert_close(case, backend, bound, name, out, whole)


def above_32_bits(case: Case, backend: str, bound: Bound) -> None:
    """More than 2^32 elements in the first tensor that grows: a tile at the start, one just above
    2^31 elements and the last one compared."""
    names, dim = growth(case)
    first = bound.tensors[bound.spec.tensor_names.index(names[0])]
    assert first is not None
    times = -(-MANY_ELEMENTS // first.numel())
    for name, out, expected in repeated(case, backend, bound, times):
        size = expected.shape[dim]
        for tile in (0, min(times // 2 + 1, times - 1), times - 1):
            part = out.narrow(dim, tile * size, size)
            assert_close(case, backend, bound, name, part, expected)


def growth(case: Case) -> tuple[tuple[str, ...], int]:
    """The tensors that can be repeated, and along which dim."""
    tiled = TILED.get(case.op)
    if tiled is not None and tiled.row is case.row:
        return tiled.names, tiled.dim
    return BATCHED[case.op], 0


def repeated(
    case: Case, backend: str, bound: Bound, times: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, output for `times` repetitions, and what the output of one has to be."""
    call = call_of(bound, backend)
    expected = expected_of(bound, call)
    names, dim = growth(case)

    def repeat(x: torch.Tensor) -> torch.Tensor:
        return x.repeat([times if d == dim else 1 for d in range(x.ndim)])

    tensors = tuple(
        repeat(x) if x is not None and name in names else x
        for name, x in zip(bound.spec.tensor_names, bound.tensors, strict=True)
    )
    large = bound._replace(tensors=tensors)
    outs = run(launch_of(large, backend), large)
    yield from zip(output_names(call), outs, expected, strict=False)


def assert_close(
    case: Case, backend: str, bound: Bound, name: str, out: torch.Tensor, expected: torch.Tensor
) -> None:
    terms = bound.spec.reduction(call_of(bound, backend))
    exact = is_exact(case)
    if case.op in SETS:
        out, expected = in_order(out), in_order(expected)
    result = compare(
        name,
        out,
        expected,
        terms,
        case.row.condition,
        exact=exact,
        backend=backend,
        rounds_at_scale=bound.spec.rounds_at_scale,
    )
    if not result.ok:
        raise Fault(result.message)
