"""A plugin that is wrong is rolled back whole, remembered, and named where it matters."""

from __future__ import annotations

import json
from pathlib import Path

import opkiln
import pytest
import torch
from click.testing import CliRunner
from opkiln import hookspecs
from opkiln.cli import commands, doctor
from opkiln.registry import REGISTRY, Registry

HEADER = """
from opkiln import Implementation, hookimpl, simple
from opkiln.registry import accepts_everything
OPKILN_API = {api}
@hookimpl
def {hook}():
    return [{rows}]
"""


def module(*rows: str, api: int = hookspecs.API, hook: str = "opkiln_implementations") -> str:
    return HEADER.format(api=api, hook=hook, rows=", ".join(rows))


def row(op: str = "rms_norm", backend: str = "acme", spec_version: int = 1) -> str:
    arguments = f"'{op}', '{backend}', '1', {spec_version}"
    return f"Implementation({arguments}, accepts_everything, simple(lambda *a, **k: a[0]))"


# name of the distribution -> its module, and what is said about it
BROKEN = {
    "broken": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "claims-torch": (
        module(row("max_pool2d", "claims"), row(backend="torch")),
        "PluginError: both opkiln:torch and claims-torch:it provide backend 'torch' of rms_norm: "
        "uninstall one, or list the wanted one in OPKILN_PLUGINS",
    ),
    "claims-twice": (
        module(row(), row()),
        "PluginError: both claims-twice:it and claims-twice:it provide backend 'acme' of rms_norm: "
        "uninstall one, or list the wanted one in OPKILN_PLUGINS",
    ),
    "old-level": (
        module(row(), api=0),
        "PluginError: old-level:it was written for opkiln API level 0, this opkiln has level 1: "
        "install a matching version",
    ),
    "old-spec": (
        module(row("max_pool2d", "old"), row(spec_version=0)),
        "PluginError: old-spec:it implements version 0 of rms_norm, this opkiln has version 1: "
        "install a matching version",
    ),
    "misspelt-hook": (
        module(row(), hook="opkiln_implementation"),
        "PluginValidationError: unknown hook 'opkiln_implementation' in plugin",
    ),
    "unknown-op": (
        module(row("max_pool2d", "unknown"), row("rmsnorm")),
        "PluginError: unknown-op:it implements 'rmsnorm', which is no op of this opkiln",
    ),
    "raises-in-hook": (
        module("1 / 0"),
        "ZeroDivisionError: division by zero",
    ),
}


def distribution(folder: Path, name: str, source: str) -> None:
    """An installed distribution `name` 1.2 with one plugin, entry point `it`."""
    package = name.replace("-", "_")
    (folder / f"{package}.py").write_text(source)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[opkiln.backends]\nit = {package}\n")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry that has loaded nothing; distributions go into tmp_path."""
    monkeypatch.syspath_prepend(tmp_path)
    fresh = Registry()
    REGISTRY.load()  # the process's own, before a test names an allow list
    plans: dict[object, object] = {}  # what a broken plugin leaves must not serve other tests
    for module in ("opkiln.dispatch", "opkiln.road"):
        monkeypatch.setattr(f"{module}.REGISTRY", fresh)
        monkeypatch.setattr(f"{module}.PLANS", plans)
    monkeypatch.setattr("opkiln.road.SITES", {})
    monkeypatch.setattr("opkiln.api.REGISTRY", fresh)
    monkeypatch.setattr(doctor, "REGISTRY", fresh)
    return fresh


@pytest.mark.parametrize("name", BROKEN)
def test_wrong_plugin_is_rolled_back_and_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    source, message = BROKEN[name]
    distribution(tmp_path, name, source)
    distribution(tmp_path, "zz-good", module(row(backend="good")))
    monkeypatch.setenv("OPKILN_PLUGINS", f"{name},zz-good")

    (failure,) = registry.failures()
    assert (failure.name, failure.version) == (f"{name}:it", "1.2")
    assert failure.error.startswith(message)
    assert "\n" not in failure.error
    assert "Traceback" in failure.trace
    assert set(registry.of("max_pool2d")) == {"torch", "torch-ref"}  # nothing of it was kept
    assert set(registry.of("rms_norm")) == {"torch", "torch-ref", "good"}  # the others work

    done = CliRunner().invoke(commands.opkiln, ["doctor"])
    assert done.exit_code == 1
    assert f"problem: plugin {name}:it 1.2 failed: {message}" in done.output

    with (
        pytest.raises(opkiln.BackendError, match="acme") as caught,
        opkiln.use("acme", strict=True),
    ):
        opkiln.functional.rms_norm(torch.ones(2, 8), (8,))
    assert f"plugin {name}:it 1.2 failed: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_distributions_with_one_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    distribution(tmp_path, "first-acme", module(row()))
    distribution(tmp_path, "second-acme", module(row()))
    monkeypatch.setenv("OPKILN_PLUGINS", "first-acme second-acme")
    (failure,) = registry.failures()
    assert failure.error == (
        "PluginError: both first-acme:it and second-acme:it provide backend 'acme' of rms_norm: "
        "uninstall one, or list the wanted one in OPKILN_PLUGINS"
    )
    assert "acme" in registry.of("rms_norm")


def test_allow_list_names_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    distribution(tmp_path, "wanted", module(row(backend="wanted")))
    distribution(tmp_path, "unwanted", "raise SystemExit('imported')")
    monkeypatch.setenv("OPKILN_PLUGINS", "wanted")
    assert [p.name for p in registry_plugins(registry)] == ["opkiln:torch", "wanted:it"]
    assert list(registry.of("rms_norm")) == ["torch", "torch-ref", "wanted"]


def test_doctor_is_content_with_good_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Registry
) -> None:
    distribution(tmp_path, "wanted", module(row(backend="wanted")))
    monkeypatch.setenv("OPKILN_PLUGINS", "wanted")
    done = CliRunner().invoke(commands.opkiln, ["doctor", "--json"])
    found = json.loads(done.output)
    assert done.exit_code == 0
    assert found["problems"] == []
    assert found["environment"]["OPKILN_PLUGINS"] == "wanted"
    assert found["plugins"][1]["name"] == "wanted:it"
    assert found["plugins"][1]["backends"] == ["wanted"]


def registry_plugins(registry: Registry) -> list:
    registry.load()
    return registry.plugins
