"""What a case shows of an implementation, and what all of its cases together say.

A feature is a word ("backward", "dtype f16", "layout strided"); its cell counts the outcomes of the
cases that show it and names one of them. Capability cards (opkiln.cards) are made of cells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from opkiln.conformance.cases import SHORT, Case, batched
from opkiln.conformance.tensors import T

RANK = {"failed": 0, "passed": 1, "refused": 2}
CONTIGUOUS = "contiguous"


def shown_by(case: Case) -> tuple[str, ...]:
    """The features that a case shows: those of a policy where it has one, else of its data."""
    policy = case.policy
    if policy.deterministic:
        return ("deterministic",)
    if policy.batch_invariant:  # without rows that are compared the promise is not tested
        return ("batch_invariant",) if case.kind == "forward" and batched(case.op) else ()
    if policy.checks:
        return ("checks",)
    return (case.kind, f"dtype {SHORT[case.dtype]}", *[f"layout {x}" for x in layouts(case)])


def layouts(case: Case) -> list[str]:
    """Of the case's tensors and of the gradient that comes in; contiguous: nothing else is."""
    found = {x.layout for x in case.row.arguments.values() if isinstance(x, T)}
    if case.kind == "backward":
        found.add(case.row.upstream)
    return sorted(found - {CONTIGUOUS}) or [CONTIGUOUS]


@dataclass
class Cell:
    """Outcomes of the cases that show one feature.

    case: the one that decides: failed, else passed, else refused; of several the first by name.
    reason: the first case that failed, else was refused, and why.
    """

    passed: int = 0
    failed: int = 0
    refused: int = 0
    case: str = ""
    reason: str = ""

    @property
    def status(self) -> str:
        return "failed" if self.failed else "passed" if self.passed else "refused"

    def join(self, other: Cell) -> None:
        """Add other cases of the feature. The order does not matter."""
        told = [c for c in (self, other) if c.case]
        self.case = min((RANK[c.status], c.case) for c in told)[1]
        reasons = [(RANK["failed" if c.failed else "refused"], c.reason) for c in told if c.reason]
        self.reason = min(reasons)[1] if reasons else ""
        self.passed += other.passed
        self.failed += other.failed
        self.refused += other.refused


Cells = dict[str, Cell]


def cell_of(case: str, status: str, message: str) -> Cell:
    """The cell of one outcome."""
    reason = f"{case}: {message}" if status != "passed" else ""
    return Cell(**{status: 1}, case=case, reason=reason)


def join(cells: Cells, others: Iterable[tuple[str, Cell]]) -> None:
    """Add cells, by feature."""
    for feature, cell in others:
        cells.setdefault(feature, Cell()).join(cell)


def to_json(cells: Cells) -> dict[str, Any]:
    """By name; a cell without what it does not have."""
    return {name: {k: v for k, v in asdict(cells[name]).items() if v} for name in sorted(cells)}
