"""The documentation site builds without warnings and shows every op and every result."""

from __future__ import annotations

import csv
import html
import subprocess
import sys
from pathlib import Path

import opkiln
import pytest
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_every_op_has_its_section(site: Path) -> None:
    pages = {p.stem: p.read_text(encoding="utf-8") for p in (site / "generated/ops").glob("*.html")}
    for spec in CATALOGUE.values():
        if spec.forward_op is None:
            anchor = spec.name.replace("_", "-")
            assert f'<section id="{anchor}">' in pages[spec.family], spec.name
            assert spec.op in pages[spec.family]


def test_every_implementation_has_its_card(site: Path) -> None:
    """With the cells that opkiln.card gives, whether or not a summary is shipped."""
    pages = {
        p.stem: html.unescape(p.read_text(encoding="utf-8"))
        for p in (site / "generated/cards").glob("*.html")
    }
    for spec in CATALOGUE.values():
        if "opkiln" in REGISTRY.of(spec.name):
            anchor = spec.name.replace("_", "-")
            assert f'<section id="{anchor}">' in pages[spec.family], spec.name
            for line in str(opkiln.card(spec.name, "opkiln")).splitlines():
                assert line in pages[spec.family], (spec.name, line)


def test_results_show_every_op_of_the_table(site: Path) -> None:
    page = (site / "generated/results.html").read_text(encoding="utf-8")
    with (ROOT / "results/h200/rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["op"] for row in rows if f"<p>{row['op']}</p>" in page} == {r["op"] for r in rows}
    assert all(row["gpu"] in page and row["commit"][:12] in page for row in rows)
