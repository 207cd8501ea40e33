"""`verify` and `history`: one published row again, and through every run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opkiln_bench import commands, verify
from opkiln_bench.analysis import judge, results
from opkiln_bench.environment import device_name
from opkiln_bench.records import MULTIRUN, RecordError
from opkiln_bench.rows_csv import update_csv

Make = Callable[..., Any]


@pytest.fixture
def judged(make_row: Make) -> Callable[..., Any]:
    return lambda **times_us: judge(make_row(times_us=times_us), "r", None)


@pytest.mark.parametrize(
    ("ours", "other", "reproduced"),
    [
        (10.0, 20.0, [True, True, True]),
        (10.5, 20.5, [True, True, True]),
        (11.0, 20.0, [False, True, False]),
        (9.5, 21.0, [True, True, False]),
    ],
    ids=["same", "within", "slower", "ratio"],
)
def test_figures(judged: Any, ours: float, other: float, reproduced: list[bool]) -> None:
    found = verify.figures(judged(opkiln=10.0, torch=20.0), judged(opkiln=ours, torch=other))
    assert [f.name for f in found] == ["opkiln us", "torch us", "ratio"]
    assert [f.reproduced for f in found] == reproduced


def test_a_launchs_jitter_is_allowed_below_5_us(judged: Any) -> None:
    short = verify.figures(judged(opkiln=1.5), judged(opkiln=1.75))
    long = verify.figures(judged(opkiln=15.0), judged(opkiln=17.5))
    assert [f.reproduced for f in short + long] == [True, False]


def test_a_row_by_number_and_by_name(make_row: Make, make_run: Make) -> None:
    runs = [make_run("r", [make_row("a"), make_row("b"), make_row("b", dtype="f16")])]
    none = Path("no/rows.csv")
    assert verify.published_row(runs, "2", none).record["label"] == "b"
    for name in ("RMSNormFwd/b/f16", "rms_norm/b/f16", "rms*/b/f16"):
        assert verify.published_row(runs, name, none).record["dtype"] == "f16"
    with pytest.raises(RecordError, match=r"--row must be 1 to 3, .* got 9"):
        verify.published_row(runs, "9", none)
    with pytest.raises(RecordError, match=r"names 2 rows; such as RMSNormFwd/b/bf16"):
        verify.published_row(runs, "rms_norm/b", none)
    with pytest.raises(RecordError, match="names 0 rows"):
        verify.published_row(runs, "rms_norm/x", none)


def test_a_number_is_a_line_of_rows_csv(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    """The file keeps lines of earlier runs, whose records may lie elsewhere."""
    path = tmp_path / "rows.csv"
    update_csv(path, results([make_run("old", [make_row("gone"), make_row("a")])]))
    runs = [make_run("new", [make_row("a"), make_row("b")])]
    update_csv(path, results(runs))
    assert verify.published_row(runs, "2", path).record["label"] == "a"
    assert verify.published_row(runs, "3", path).record["label"] == "b"
    with pytest.raises(RecordError, match=r"row 1 of .*rows\.csv is RMSNormFwd/gone/bf16, which"):
        verify.published_row(runs, "1", path)
    with pytest.raises(RecordError, match="--row must be 1 to 3"):
        verify.published_row(runs, "4", path)


def test_verify_needs_a_gpu_for_a_row_of_one(
    make_row: Make,
    make_run: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    make_run("r", [make_row("llama-8b-decode")])
    assert commands.main(["verify", str(tmp_path / "r"), "--row", "1"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.fixture
def of_this_machine(make_row: Make, make_run: Make, tmp_path: Path) -> Callable[[float], Path]:
    """A record that says that this CPU took so long for llama-8b-decode."""

    def build(time_us: float) -> Path:
        row = make_row(
            "llama-8b-decode",
            times_us={"torch": time_us, "torch-ref": 9 * time_us},
            timer={"name": "wall", "title": "CPU wall clock"},
            gpu=device_name(verify_device()),
        )
        make_run("cpu", [row], known_device=False)
        return tmp_path / "cpu"

    return build


def verify_device() -> Any:
    return torch.device("cpu")


def test_verify_measures_again(
    of_this_machine: Callable[[float], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(of_this_machine(20.0))
    arguments = ["verify", folder, "--row", "1", "--within"]
    assert commands.main([*arguments, "1000"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("RMSNormFwd/llama-8b-decode/bf16, run cpu, commit abc\n")
    assert "  torch us: 20" in said and said.endswith("\nreproduced\n")
    assert commands.main([*arguments, "1e-9"]) == 1
    assert capsys.readouterr().out.endswith("\nnot reproduced\n")


def test_verify_needs_the_same_machine(
    make_row: Make, make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wall = {"name": "wall", "title": "CPU wall clock"}
    make_run("r", [make_row("llama-8b-decode", timer=wall, gpu="CPU of 1999")])
    assert commands.main(["verify", str(tmp_path / "r"), "--row", "1"]) == 2
    assert "published on CPU of 1999, this machine has CPU" in capsys.readouterr().err


def test_history(
    make_row: Make, make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day, ours in ((1, 12.0), (2, 10.0)):
        name, date = f"run{day}", f"2026-12-0{day}T00:00:00Z"
        row = make_row("a", times_us={"opkiln": ours, "torch": 15.0}, date=date)
        make_run(name, [row, make_row("b")], date=date)
    assert commands.main(["history", "rms_norm/a", str(tmp_path)]) == 0
    heading, old, new = capsys.readouterr().out.splitlines()
    assert heading == "RMSNormFwd/a/bf16"
    assert old.startswith("  2026-12-01T00:00:00Z abc run1: 12.0") and "1.25x ahead" in old
    assert "run2: 10.0" in new and "torch 15.0" in new and "1.50x ahead" in new
    assert commands.main(["history", "rms_nrm/a/bf16", str(tmp_path)]) == 2
    assert "no run has a row rms_nrm/a/bf16; the nearest are RMS" in capsys.readouterr().err


def test_history_names_shards_after_their_run(
    make_row: Make, make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("split/0", [make_row("a")])
    (tmp_path / "split" / MULTIRUN).touch()
    assert commands.main(["history", "rms_norm/a", str(tmp_path)]) == 0
    assert " abc split/0: 10." in capsys.readouterr().out
