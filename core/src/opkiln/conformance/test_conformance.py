"""The module that `pytest --pyargs opkiln.conformance` collects; the plugin gives it its cases."""

from __future__ import annotations

from typing import Any

import pytest

from opkiln.conformance.cases import Case
from opkiln.conformance.checks import check


def test_case(opkiln_case: tuple[str, Case], opkiln_device: Any, opkiln_record: Any) -> None:
    backend, case = opkiln_case
    outcome = check(case, backend, opkiln_device)
    opkiln_record(backend, outcome)
    if outcome.status == "refused":
        pytest.skip(outcome.message)
    assert outcome.status == "passed", outcome.message
