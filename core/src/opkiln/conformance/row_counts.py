"""Batch invariance over row counts: a row has the same bits whatever their number.

Under `batch_invariant` dispatch pins one variant for an op, a row's length and dtypes. So the first
k rows of a batch, on their own, have the bits that they have in the whole batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from opkiln.conformance.cases import Case, cases_of
from opkiln.conformance.checks import SETS, Fault, in_order, output_names, run
from opkiln.conformance.judge import Task, call_of, judged, launch_of
from opkiln.conformance.rows import BATCHED
from opkiln.conformance.tensors import T, bits
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.registry import REGISTRY
from opkiln.road import Bound

INVARIANT = Policy(batch_invariant=True)
DRAWN_ROWS = 67  # then they repeat; a prime, so that no tile meets the same rows again
MAX_ELEMENTS = 2**28  # of the first tensor: with very long rows the counts end earlier
# Every power of two up to 4,096, and its neighbours.
GPU_COUNTS = tuple(sorted({2**k + d for k in range(13) for d in (-1, 0, 1)} - {0, 4097}))
CPU_COUNTS = (1, 2, 3, 5, 9)  # in Triton's interpreter

# Ops whose rows are independent too, but lie in tensors of integers, which no case can grow.
ROWS = BATCHED | {
    "rope_neox_position_ids": ("x", "position_ids"),
    "topk_selector": ("scores", "starts", "ends"),
}
# Cases whose first dim is no batch, or that allow a batch of 1 alone.
NO_BATCH = ("vector", "unbatched", "first_dim", "sequences", "one_sequence")


def row_count_checks(op: str, backend: str, device: torch.device) -> list[Task]:
    """One check for each of `some` plain cases of a forward op with rows; on a CPU for the first
    alone. A refusal where the backend does not promise invariance.
    """
    impl = REGISTRY.of(op).get(backend)
    cases = [c for c in cases_of(op) if c.kind == "forward"]
    if impl is None or CATALOGUE[op].forward_op is not None:
        return []
    promised = "batch_invariant" in impl.traits
    if promised:
        cases = [grown(c) for c in cases if op in ROWS and is_plain(c)]
    return [
        partial(judged, case, backend, device, "row_counts", bits_by_count, INVARIANT)
        for case in (some(cases) if promised and device.type == "cuda" else cases[:1])
    ]


def some(cases: list[Case]) -> list[Case]:
    """All dtypes of the first row, one of every other in turn: each compiles kernels of its own."""
    by_label: dict[str, list[Case]] = {}
    for case in cases:
        by_label.setdefault(case.row.label, []).append(case)
    groups = list(by_label.values())
    return [case for i, g in enumerate(groups) for case in (g if i == 0 else [g[i % len(g)]])]


def is_plain(case: Case) -> bool:
    """A forward without a policy on contiguous tensors of normal values whose first dim counts."""
    tensors = [x for x in case.row.arguments.values() if isinstance(x, T)]
    rows = [x for n in ROWS[case.op] if isinstance(x := case.row.arguments.get(n), T)]
    return (
        case.kind == "forward"
        and case.policy == Policy()
        and not case.row.label.startswith(NO_BATCH)
        and all(x.layout == "contiguous" and 0 not in x.shape for x in tensors)
        and all(x.fill == "normal" for x in rows)
    )


def grown(case: Case) -> Case:
    """The case with DRAWN_ROWS rows in its tensors of drawn values."""
    names = ROWS[case.op]
    arguments = dict(case.row.arguments)
    lead = arguments[names[0]]
    if any(getattr(arguments.get(n), "values", None) is not None for n in names):
        return case
    for name in names:
        x = arguments.get(name)
        if isinstance(x, T) and x.shape[:1] == lead.shape[:1]:
            arguments[name] = replace(x, shape=(DRAWN_ROWS, *x.shape[1:]))
    return replace(case, row=replace(case.row, arguments=arguments))


def bits_by_count(case: Case, backend: str, bound: Bound) -> None:
    """Each count against the largest."""
    names = ROWS[case.op]
    tensors = dict(zip(bound.spec.tensor_names, bound.tensors, strict=True))
    lead = tensors[names[0]]
    assert lead is not None
    drawn = lead.shape[0]
    counts = GPU_COUNTS if lead.device.type == "cuda" else CPU_COUNTS
    most = min(counts[-1], max(MAX_ELEMENTS * drawn // max(lead.numel(), 1), 1))
    batched = [n for n in names if (x := tensors[n]) is not None and x.ndim and x.shape[0] == drawn]

    def first(count: int) -> list[torch.Tensor]:
        """The outputs of the first `count` rows."""
        part = tuple(
            rows_of(x, count) if n in batched and x is not None else x for n, x in tensors.items()
        )
        given = bound._replace(tensors=part)
        return list(run(launch_of(given, backend, INVARIANT), given))

    whole = first(most)
    labels = output_names(call_of(bound, backend, INVARIANT))
    for count in [c for c in counts if c < most]:
        for label, out, all_rows in zip(labels, first(count), whole, strict=True):
            expected = all_rows[: out.shape[0]]
            if case.op in SETS:
                out, expected = in_order(out), in_order(expected)
            if not torch.equal(bits(out), bits(expected)):
                raise Fault(f"{label} of {count} rows has other bits than in {most} rows")


def rows_of(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` of the rows of x again and again."""
    times = -(-count // x.shape[0])
    return x.repeat(times, *[1] * (x.ndim - 1))[:count].clone()
