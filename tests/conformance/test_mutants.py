"""The kit catches every planted mistake, for the right reason, and nothing in a sound backend."""

from __future__ import annotations

import pytest
from conformance import formula_mutants, manner_mutants  # noqa: F401  (they fill MUTANTS)
from conformance.mutants import BACKEND, MUTANTS, Mutant
from opkiln.conformance import cases_of, check, conform
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.op}-{m.name}")
def test_mutant_is_caught(mutant: Mutant) -> None:
    seen = []
    with REGISTRY.temporarily(mutant, f"test:{mutant.name}"):
        for case in cases_of(mutant.op):
            outcome = check(case, BACKEND)
            if outcome.status == "failed" and mutant.says in outcome.message:
                return
            seen.append(outcome.message)
    pytest.fail(f"not caught by any of {len(seen)} cases; messages: {set(seen)}")


@pytest.mark.parametrize("op", CATALOGUE)
@pytest.mark.parametrize("backend", ["torch-ref", "torch"])
def test_sound_backend_passes(backend: str, op: str) -> None:
    report = conform(backend, [op])
    assert report.ok, str(report)


@pytest.mark.parametrize("op", CATALOGUE)
def test_every_op_has_cases(op: str) -> None:
    assert len(cases_of(op)) >= 10
