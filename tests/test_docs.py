"""What the documents say is so: links, paths, code, commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from opkiln.cli.commands import opkiln as command

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    str(p.relative_to(ROOT))
    for pattern in (
        "*.md",
        "docs/*.md",
        "core/*.md",
        "packages/*/*.md",
        "bench/*.md",
        "examples/*/*.md",
    )
    for p in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
WRITTEN_BY_RUNS = ("runs/", "pages/")


def blocks(document: str, language: str) -> list[str]:
    found = BLOCK.findall((ROOT / document).read_text(encoding="utf-8"))
    return [code for name, code in found if name == language]


def readme_command(name: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^<!-- command: {name} -->\n```\n(.*)\n```\n<!-- end -->$", text, re.M)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    folder = (ROOT / document).parent
    missing = [link for link in LINK.findall(text) if not (folder / link).exists()]
    for path in PATH.findall(text):
        here = (folder / path).exists() or (ROOT / path).exists()
        if not here and not path.startswith(WRITTEN_BY_RUNS):
            missing.append(path)
    assert missing == []


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")])
def test_python_blocks_run(document: str) -> None:
    namespace: dict[str, object] = {"__name__": "document"}
    for code in blocks(document, "python"):
        exec(compile(code, document, "exec"), namespace)


def opkiln_lines() -> list[tuple[str, list[str]]]:
    """The `opkiln ...` commands of all documents; what follows two spaces is an explanation."""
    found = []
    for document in DOCUMENTS:
        for line in "".join(blocks(document, "")).splitlines():
            if line.startswith("opkiln ") and "--backend demo" not in line:
                found.append((document, shlex.split(re.split(r"\s{2,}", line)[0])[1:]))
    return found


@pytest.mark.parametrize(("document", "args"), opkiln_lines(), ids=str)
def test_commands_run(document: str, args: list[str]) -> None:
    done = CliRunner().invoke(command, args)
    assert done.exit_code == 0, done.output


def test_the_demo_module_is_shown_as_it_is() -> None:
    source = ROOT / "examples/opkiln-backend-demo/src/opkiln_backend_demo/__init__.py"
    assert source.read_text(encoding="utf-8") in blocks("docs/writing-a-backend.md", "python")
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 40


def test_readme_commands_set_up_everything() -> None:
    setup = "python3 -m venv .venv && .venv/bin/python -m pip install -r requirements-dev.txt && "
    assert readme_command("bench") == f"{setup}.venv/bin/opkiln-bench"
    assert readme_command("tests") == f"{setup}.venv/bin/python -m pytest -n 2 --dist worksteal"
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    members = [line.removeprefix("-e ") for line in lines if line.startswith("-e ")]
    projects = [*ROOT.glob("core/pyproject.toml"), *ROOT.glob("packages/*/pyproject.toml")]
    projects += ROOT.glob("bench/pyproject.toml")
    assert sorted(members) == sorted(str(p.parent.relative_to(ROOT)) for p in projects)


def test_ci_runs_the_readme_command(tmp_path: Path) -> None:
    """With stand-ins for what it starts, .ci/run does the README's steps, then the lint."""
    log = tmp_path / "log"
    stand_in = f'#!/bin/bash\necho "$(basename "$0") $*" >> {log}\n'
    make_venv = 'if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi\n'
    for name in ("python3", "ruff", "mypy", "lint-imports"):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(stand_in + (make_venv if name == "python3" else ""))
        tool.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    steps = [re.sub(r"/\S+/venv$", ".venv", line) for line in log.read_text().splitlines()]
    assert steps == [
        "python3 -m venv .venv",
        "python -m pip install -r requirements-dev.txt",
        "python -m pytest -n 2 --dist worksteal",
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "lint-imports ",
    ]
