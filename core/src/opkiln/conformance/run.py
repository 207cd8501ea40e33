"""`conform(backend)`: all cases of a backend, and the report about them."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from opkiln.conformance import cells
from opkiln.conformance.cases import cases_of
from opkiln.conformance.cells import Cells
from opkiln.conformance.checks import Outcome, check
from opkiln.conformance.environment import environment
from opkiln.conformance.judge import Task
from opkiln.conformance.row_counts import row_count_checks
from opkiln.conformance.torch_checks import torch_checks
from opkiln.errors import ArgumentError
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln.summary import SCHEMA_VERSION

MAX_LISTED = 20  # failures and refusals spelled out for one op
PART_CASES = 16

Progress = Callable[[Outcome], None]


@dataclass
class OpReport:
    """One op: failed, passed or refused (no case was taken). worst_ratio: error / tolerance.

    cells: by feature, what its cases say of it. errors: dtype -> the largest error in units in the
    last place, and its case (conformance.compare).
    """

    op: str
    page_op: str
    cases: int = 0
    passed: int = 0
    failed: int = 0
    refused: int = 0
    worst_ratio: float = 0.0
    failures: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    cells: Cells = field(default_factory=dict)
    errors: dict[str, tuple[float, str]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        if self.failed:
            return "failed"
        return "passed" if self.passed else "refused"

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        setattr(self, outcome.status, getattr(self, outcome.status) + 1)
        self.worst_ratio = max(self.worst_ratio, outcome.ratio)
        lines = {"failed": self.failures, "refused": self.refusals}.get(outcome.status)
        if lines is not None and len(lines) < MAX_LISTED:
            lines.append(f"{outcome.case}: {outcome.message}")
        for feature in outcome.features:
            cell = cells.cell_of(outcome.case, outcome.status, outcome.message)
            cells.join(self.cells, [(feature, cell)])
        if outcome.dtype:
            self.larger({outcome.dtype: (outcome.ulp, outcome.case)})

    def larger(self, errors: dict[str, tuple[float, str]]) -> None:
        """Keep the larger error of each dtype; of equal ones that of the first case by name."""
        for dtype, new in errors.items():
            old = self.errors.get(dtype, new)
            self.errors[dtype] = min(old, new, key=lambda e: (-e[0], e[1]))

    def join(self, other: OpReport) -> None:
        """Add another part of the same op."""
        self.cases += other.cases
        self.passed += other.passed
        self.failed += other.failed
        self.refused += other.refused
        self.worst_ratio = max(self.worst_ratio, other.worst_ratio)
        self.failures = [*self.failures, *other.failures][:MAX_LISTED]
        self.refusals = [*self.refusals, *other.refusals][:MAX_LISTED]
        cells.join(self.cells, other.cells.items())
        self.larger(other.errors)

    def to_json(self) -> dict[str, Any]:
        errors = {d: [round(ulp, 3), case] for d, (ulp, case) in sorted(self.errors.items())}
        told = {"status": self.status, "cells": cells.to_json(self.cells), "errors": errors}
        return asdict(self) | told


@dataclass
class Report:
    """What `conform` found. `str()` is a table; `to_json()` is conformance.json.

    finished: False while ops are still to come.
    """

    backend: str
    device: str
    environment: dict[str, Any]
    ops: list[OpReport]
    finished: bool = True

    @property
    def ok(self) -> bool:
        """All is done, nothing failed and something passed."""
        statuses = [o.status for o in self.ops]
        return self.finished and "failed" not in statuses and "passed" in statuses

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "backend": self.backend,
            "device": self.device,
            "ok": self.ok,
            "finished": self.finished,
            "environment": self.environment,
            "ops": [o.to_json() for o in self.ops],
        }

    def __str__(self) -> str:
        width = max((len(o.op) for o in self.ops), default=2)
        lines = [f"backend {self.backend} on {self.device}"]
        lines.append(f"{'op':<{width}}  status   cases  passed  failed  refused  error/tolerance")
        for o in self.ops:
            lines.append(
                f"{o.op:<{width}}  {o.status:<7}  {o.cases:>5}  {o.passed:>6}  {o.failed:>6}  "
                f"{o.refused:>7}  {o.worst_ratio:>15.2f}"
            )
        lines += [
            f"FAILED {o.op}[{line}".replace(": ", "]: ", 1) for o in self.ops for line in o.failures
        ]
        return "\n".join(lines)


def conform(
    backend: str,
    ops: Sequence[str] | None = None,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] | None = None,
    progress: Progress | None = None,
    big: bool = False,
    jobs: int = 1,
    finished: Callable[[OpReport, Report], None] | None = None,
    cases_only: bool = False,
) -> Report:
    """Run the cases of a backend.

    ops: python names, None: those that the backend implements. dtypes: None for all.
    jobs: processes, which share out the ops in parts of 16 cases; they load installed plugins only.
    finished(op, so_far): called after each op; progress(outcome): after each case, with one job.
    big: also calls above 2^32 elements (CUDA only; up to 100 GB of its memory).
    Each forward op also runs under torch.compile, torch.export and autocast, and has its second
    derivatives taken; one that promises batch invariance runs on several numbers of rows. With
    cases_only none of this, which compiles much: what it would show is not tested then.
    On CUDA each op also runs on a side stream, in a captured graph, on a large grid and on a second
    device where there is one. Raises ArgumentError for an unknown backend, op or device, and for
    `big` on a CPU.
    """
    names = chosen_ops(backend, ops)
    where = chosen_device(device)
    if big and where.type != "cuda":
        raise ArgumentError(f"conform: big calls need a GPU, the device is {where}")
    chosen = None if dtypes is None else tuple(dtypes)
    one = partial(
        conform_part, backend=backend, where=where, dtypes=chosen, big=big, cases_only=cases_only
    )
    parts = [part for name in names for part in parts_of(name, chosen, jobs)]
    missing = Counter(part.op for part in parts)
    reports: dict[str, OpReport] = {}
    so_far = Report(backend, str(where), environment(where), [], finished=False)
    with contextlib.ExitStack() as stack:
        found: Iterable[OpReport]
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(jobs, context))
            # as they end: one slow op does not hide what the others found
            found = (f.result() for f in as_completed([pool.submit(one, p) for p in parts]))
        else:
            found = (one(part, progress=progress) for part in parts)
        for report in found:
            whole = reports.setdefault(report.op, OpReport(report.op, report.page_op))
            whole.join(report)
            missing[report.op] -= 1
            if not missing[report.op]:
                so_far.ops = [reports[n] for n in names if n in reports and not missing[n]]
                if finished is not None:
                    finished(whole, so_far)
    so_far.finished = True
    return so_far


@dataclass(frozen=True)
class Part:
    """Every `count`-th case or check of an op from `index` on, for one process."""

    op: str
    index: int
    count: int

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def parts_of(op: str, dtypes: tuple[torch.dtype, ...] | None, jobs: int) -> list[Part]:
    """One with one job, else of about PART_CASES cases: a case may compile kernels of its own."""
    count = max(-(-len(cases_of(op, dtypes)) // PART_CASES), 1) if jobs > 1 else 1
    return [Part(op, index, count) for index in range(count)]


def conform_part(
    part: Part,
    backend: str,
    where: torch.device,
    dtypes: tuple[torch.dtype, ...] | None,
    big: bool,
    cases_only: bool = False,
    progress: Progress | None = None,
) -> OpReport:
    """The cases and other checks of one part of an op; its last one has those of a device too."""
    name = part.op
    report = OpReport(name, CATALOGUE[name].op)
    cases = cases_of(name, dtypes)
    if where.type == "cuda":
        from opkiln.conformance.cuda_checks import published_cases

        more = published_cases(name)
        cases = [*cases, *[c for c in more if dtypes is None or c.dtype in dtypes]]
    tasks: list[Task] = [partial(check, case, backend, where) for case in cases]
    if not cases_only:
        tasks += row_count_checks(name, backend, where) + torch_checks(name, backend, where)
    for task in tasks[part.index :: part.count]:
        tell(report, task(), progress)
    if part.last and where.type == "cuda":
        from opkiln.conformance.cuda_checks import device_checks

        for outcome in device_checks(name, backend, where, big):
            tell(report, outcome, progress)
    return report


def tell(report: OpReport, outcome: Outcome, progress: Progress | None) -> None:
    report.add(outcome)
    if progress is not None:
        progress(outcome)


def chosen_ops(backend: str, ops: Sequence[str] | None) -> list[str]:
    """The ops to run, in catalogue order."""
    if backend not in REGISTRY.backends():
        known = ", ".join(REGISTRY.backends())
        raise ArgumentError(f"conform: no backend {backend!r}, installed backends: {known}")
    unknown = [op for op in ops or () if op not in CATALOGUE]
    if unknown:
        raise ArgumentError(f"conform: no op {unknown[0]!r}; opkiln.ops() lists them")
    return [n for n in CATALOGUE if (n in ops if ops is not None else backend in REGISTRY.of(n))]


def chosen_device(device: str) -> torch.device:
    """`device` with its index."""
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"conform: cannot read the device {device!r}") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("conform: device cuda was asked for, torch sees no GPU")
    return torch.device("cuda", where.index or 0) if where.type == "cuda" else where
