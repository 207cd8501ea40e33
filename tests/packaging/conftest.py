"""Wheels of every distribution, and an environment that has torch but no opkiln."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = ("norm", "conv", "pool", "rope", "misc")
PROJECTS = ("core", *(f"packages/{f}" for f in FAMILIES), "bench", "examples/opkiln-backend-demo")


def pip(*args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "-q", *args], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name -> its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    projects = [f"./{p}" for p in PROJECTS]
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), *projects)
    return {p.name.split("-")[0].replace("_", "-"): p for p in sorted(folder.glob("*.whl"))}


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything installed here (torch, pluggy, click, ...) except our own distributions."""
    folder = tmp_path_factory.mktemp("others")
    for packages in (Path(p) for p in site.getsitepackages()):
        for entry in packages.iterdir():
            if not entry.name.startswith("opkiln"):
                (folder / entry.name).symlink_to(entry)
    return folder


class Environment:
    """A folder with the installed wheels, used by processes that see nothing else of ours."""

    def __init__(self, folder: Path, others: Path) -> None:
        self.folder = folder
        self.others = others

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """python -S *args: no site-packages, so no editable install is visible."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPKILN_", "PYTHON"))}
        path = os.pathsep.join([str(self.folder), str(self.others)])
        return subprocess.run(
            [sys.executable, "-S", *args],
            env={**clean, "PYTHONPATH": path, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )

    def eval(self, code: str, **variables: str) -> Any:
        """What `code` prints, as JSON."""
        done = self.run("-c", code, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="session")
def install(
    wheels: dict[str, Path], others: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Sequence[str]], Environment]:
    """install(names) -> an environment that has these of our distributions alone."""

    def make(names: Sequence[str]) -> Environment:
        folder = tmp_path_factory.mktemp("-".join(names))
        pip("install", "--no-deps", "--target", str(folder), *(str(wheels[n]) for n in names))
        return Environment(folder, others)

    return make
