"""Two runs against each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opkiln_bench import commands
from opkiln_bench.compare import agreement, changes

Make = Callable[..., Any]


@pytest.fixture
def two_runs(make_row: Make, make_run: Make) -> tuple[Any, Any]:
    before = [make_row(n, times_us={"opkiln": 10.0}) for n in ("same", "slower", "faster", "gone")]
    after = [
        make_row("same", times_us={"opkiln": 10.02}),
        make_row("slower", times_us={"opkiln": 10.5}),
        make_row("faster", times_us={"opkiln": 8.0}),
        make_row("new", times_us={"opkiln": 1.0}),
    ]
    return make_run("A", before), make_run("B", after)


def test_changes_beyond_noise(two_runs: tuple[Any, Any]) -> None:
    kinds = {c.key[1]: c.kind for c in changes(*two_runs)}
    assert kinds == {"same": "level", "slower": "slower", "faster": "faster"}


def test_command_prints_and_fails_on_regression(
    two_runs: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / "A"), str(tmp_path / "B")]
    assert commands.main(["compare", *paths]) == 0
    assert commands.main(["compare", *paths, "--fail-on", "regression"]) == 1
    assert commands.main(["compare", paths[0], paths[0], "--fail-on", "regression"]) == 0
    out = capsys.readouterr().out
    assert "slower: RMSNormFwd slower bf16 10.0" in out
    assert "3 rows in both: 1 slower, 1 faster" in out


def test_a_missing_record_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["compare", str(tmp_path / "no"), str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_agreement_counts_long_rows_apart(make_row: Make, make_run: Make) -> None:
    centers = {"a": (10.0, 10.1), "b": (20.0, 20.2), "c": (100.0, 106.0), "short": (2.0, 2.6)}
    rows = [[make_row(n, times_us={"opkiln": c[i]}) for n, c in centers.items()] for i in (0, 1)]
    found = agreement(make_run("A", rows[0]), make_run("B", rows[1]))
    assert found is not None
    assert (found.rows, found.long_rows) == (4, 3)
    assert found.median == pytest.approx(0.035, abs=0.004)  # of 1, 1, 6 and 30 %
    assert found.worst == pytest.approx(0.06, abs=0.003)
    assert found.worst_row == "RMSNormFwd c bf16"
    assert not found.within and str(found).endswith("wanted: 3% and 8%, missed")


def test_agreement_of_a_run_with_itself(make_row: Make, make_run: Make) -> None:
    run = make_run("A", [make_row()])
    found = agreement(run, run)
    assert found is not None and found.within
    assert "agree within 0.0% on the median of 1 rows" in str(found)
    assert agreement(run, make_run("B", [make_row("other")])) is None


def test_command_prints_the_agreement(
    two_runs: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.main(["compare", str(tmp_path / "A"), str(tmp_path / "B")])
    assert "A and B agree within 5.0% on the median of 3 rows" in capsys.readouterr().out


def test_calibrate_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert commands.main(["calibrate"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err
