"""rows.csv: the columns, and a sweep that replaces exactly what it measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opkiln_bench.analysis import results
from opkiln_bench.rows_csv import read_csv, update_csv

Make = Callable[..., Any]
PROMISED = (  # other tools read these
    *("op", "label", "dtype", "ours_ms", "best_alt", "best_alt_ms", "ratio", "ratio_lo"),
    *("ratio_hi", "verdict", "floor_ms", "share_of_floor", "sol", "bound", "status", "gpu"),
    *("date", "commit", "run"),
)


def test_columns_and_values(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    update_csv(tmp_path / "rows.csv", results([make_run("r", [make_row()])]))
    (line,) = read_csv(tmp_path / "rows.csv")
    assert tuple(line)[: len(PROMISED)] == PROMISED
    assert (line["op"], line["label"], line["dtype"]) == ("RMSNormFwd", "llama-8b-prefill", "bf16")
    assert (line["status"], line["verdict"], line["best_alt"]) == ("ok", "ahead", "torch-compile")
    assert float(line["ours_ms"]) == pytest.approx(0.0108, rel=0.01)
    assert float(line["ratio"]) == pytest.approx(13.1 / 10.8, rel=0.01)
    assert float(line["ratio_lo"]) < float(line["ratio"]) < float(line["ratio_hi"])
    assert float(line["share_of_floor"]) == pytest.approx(9.152 / 10.8, rel=0.01)
    assert (line["bound"], line["run"], line["commit"]) == ("mem", "r", "abc")


def test_a_sweep_replaces_only_its_rows(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    update_csv(path, results([make_run("one", [make_row("a"), make_row("b"), make_row("c")])]))
    untouched = [line for line in path.read_text().splitlines() if ",b," not in line]
    again = make_row("b", times_us={"opkiln": 5.0, "torch": 9.0})
    update_csv(path, results([make_run("two", [again, make_row("d")])]))
    lines = path.read_text().splitlines()
    assert [line for line in lines if ",b," not in line and ",d," not in line] == untouched
    assert {r["label"]: r["run"] for r in read_csv(path)} == {
        "a": "one",
        "b": "two",
        "c": "one",
        "d": "two",
    }


def test_lines_follow_the_catalogue(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    order = [("RMSNormFwd", label, "bf16") for label in ("z", "a")]
    path = tmp_path / "rows.csv"
    rows = [make_row("a"), make_row("plugin"), make_row("z")]
    update_csv(path, results([make_run("r", rows)]), order)
    assert [r["label"] for r in read_csv(path)] == ["z", "a", "plugin"]


@pytest.mark.parametrize(
    ("ours", "status"),
    [("wrong", "wrong"), ("failed", "failed"), ("missing", "missing"), ("refused", "missing")],
)
def test_a_row_without_our_time(
    make_row: Make, make_run: Make, tmp_path: Path, ours: str, status: str
) -> None:
    row = make_row()
    row["backends"]["opkiln"] = {"status": ours, "reason": "because"}
    update_csv(tmp_path / "rows.csv", results([make_run("r", [row])]))
    (line,) = read_csv(tmp_path / "rows.csv")
    assert line["status"] == status
    assert (line["ours_ms"], line["ratio"], line["verdict"]) == ("", "", "")
    assert float(line["best_alt_ms"]) > 0
