"""A pytest plugin: one test for each case of each backend.

    pytest -p opkiln.conformance.plugin --pyargs opkiln.conformance --opkiln-backend mine

Options: --opkiln-backend NAME (repeatable; default: every backend that dispatch may pick by itself
but torch, or torch where there is no other), --opkiln-op OP (repeatable), --opkiln-device DEVICE,
--opkiln-json FILE (the reports, a list). A refused case is skipped with its reason.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from opkiln.conformance.cases import cases_of
from opkiln.conformance.checks import Outcome
from opkiln.conformance.environment import environment
from opkiln.conformance.run import OpReport, Report, chosen_device, chosen_ops
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY

PROPERTY = "opkiln_outcome"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("opkiln")
    group.addoption("--opkiln-backend", action="append", default=[], metavar="NAME")
    group.addoption("--opkiln-op", action="append", default=[], metavar="OP")
    group.addoption("--opkiln-device", default="cpu", metavar="DEVICE")
    group.addoption("--opkiln-json", default=None, metavar="FILE", help="write the report")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--opkiln-json")
    if path is not None and not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist
        config.pluginmanager.register(JsonReport(Path(path)), "opkiln-json")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One parameter (backend, case) for tests that ask for `opkiln_case`."""
    if "opkiln_case" not in metafunc.fixturenames:
        return
    config = metafunc.config
    backends = config.getoption("--opkiln-backend") or default_backends()
    pairs = [
        (backend, case)
        for backend in backends
        for op in chosen_ops(backend, config.getoption("--opkiln-op") or None)
        for case in cases_of(op)
    ]
    ids = [f"{backend}-{case.op}-{case.id}" for backend, case in pairs]
    metafunc.parametrize("opkiln_case", pairs, ids=ids)


def default_backends() -> list[str]:
    """What dispatch may pick by itself, torch aside."""
    auto = {i.backend for op in CATALOGUE for i in REGISTRY.of(op).values() if i.auto}
    return sorted(auto - {"torch"}) or ["torch"]


@pytest.fixture
def opkiln_device(request: pytest.FixtureRequest) -> Any:
    return chosen_device(request.config.getoption("--opkiln-device"))


@pytest.fixture
def opkiln_record(request: pytest.FixtureRequest) -> Any:
    """Called with (backend, outcome): hands them to the report, across xdist's processes too."""
    properties = request.node.user_properties
    return lambda backend, outcome: properties.append((PROPERTY, [backend, asdict(outcome)]))


class JsonReport:
    """Gathers the outcomes of a session and writes one report for each backend."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ops: dict[str, dict[str, OpReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == PROPERTY:
                backend, outcome = str(value[0]), Outcome(**value[1])  # type: ignore[index]
                ops = self.ops.setdefault(backend, {})
                new = OpReport(outcome.op, CATALOGUE[outcome.op].op)
                ops.setdefault(outcome.op, new).add(outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        device = chosen_device(session.config.getoption("--opkiln-device"))
        reports = [
            Report(backend, str(device), environment(device), list(ops.values())).to_json()
            for backend, ops in self.ops.items()
        ]
        self.path.write_text(json.dumps(reports, indent=2) + "\n")
