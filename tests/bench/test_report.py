"""`report`: what a published folder holds, and what a second run changes in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opkiln_bench import commands
from opkiln_bench.records import MULTIRUN
from opkiln_bench.rows_csv import read_csv

Make = Callable[..., Any]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def report(*runs: Path, into: Path) -> dict[str, bytes]:
    assert commands.main(["report", *map(str, runs), "--into", str(into)]) == 0
    return contents(into)


@pytest.fixture
def first(make_row: Make, make_run: Make, tmp_path: Path) -> Path:
    make_run("first", [make_row("a"), make_row("b")], date="2026-11-30T10:00:00Z")
    return tmp_path / "first"


@pytest.fixture
def second(make_row: Make, make_run: Make, tmp_path: Path) -> Path:
    faster = make_row("b", times_us={"opkiln": 5.0, "torch": 9.0})
    make_run("second", [faster, make_row("c")], date="2026-11-30T11:00:00Z")
    return tmp_path / "second"


def test_is_complete_and_repeats_itself(first: Path, tmp_path: Path) -> None:
    once = report(first, into=tmp_path / "out")
    pages = {"all.md", "method.md", "normalization.md", "index.html", "rows.csv"}
    assert set(once) == {*pages, "records/first.jsonl"}
    assert report(first, into=tmp_path / "out") == once
    assert report(tmp_path / "out", into=tmp_path / "out") == once  # from its own records


def test_a_later_run_replaces_its_rows_on_every_page(
    first: Path, second: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report(first, into=out)
    files = report(second, into=out)
    assert {r["label"]: r["run"] for r in read_csv(out / "rows.csv")} == {
        "a": "first",
        "b": "second",
        "c": "second",
    }
    page = files["normalization.md"].decode()
    assert [line[2:3] for line in page.splitlines() if "| bf16 |" in line] == ["a", "b", "c"]
    assert report(first, second, into=tmp_path / "at-once") == files
    assert report(second, first, into=tmp_path / "reversed") == files


def test_a_repeat_of_ours_alone_replaces_no_comparison(
    first: Path, make_row: Make, make_run: Make, tmp_path: Path
) -> None:
    alone = make_row("a", times_us={"opkiln": 9.0})
    new = make_row("new", times_us={"opkiln": 7.0})
    repeat = make_run("repeat", [alone, new], date="2026-12-31T12:00:00Z").path.parent
    files = report(first, repeat, into=tmp_path / "out")
    rows = {r["label"]: r["run"] for r in read_csv(tmp_path / "out" / "rows.csv")}
    assert (rows["a"], rows["new"]) == ("first", "repeat")
    assert "- first and repeat agree within" in files["method.md"].decode()


def test_shards_of_two_runs_are_kept_apart(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    for hour, name in enumerate(("one", "two")):
        make_run(f"{name}/0", [make_row(name)], date=f"2026-11-30T1{hour}:00:00Z")
        (tmp_path / name / MULTIRUN).touch()
    out = tmp_path / "out"
    files = report(tmp_path / "one/0", tmp_path / "two/0", into=out)
    assert {"records/one/0.jsonl", "records/two/0.jsonl"} <= set(files)
    assert [r["run"] for r in read_csv(out / "rows.csv")] == ["one/0", "two/0"]
    assert report(out, into=out) == files


def test_the_method_page_says_how_far_two_runs_agree(
    first: Path, second: Path, tmp_path: Path
) -> None:
    alone = report(first, into=tmp_path / "one")["method.md"].decode()
    both = report(first, second, into=tmp_path / "two")["method.md"].decode()
    assert "agree within" not in alone
    assert "- first and second agree within 11" in both and "missed.\n" in both


def test_runs_of_two_commits_are_not_held_against_each_other(
    first: Path, make_row: Make, make_run: Make, tmp_path: Path
) -> None:
    make_run("later", [make_row("a")], date="2026-11-30T12:00:00Z", commit="def")
    page = report(first, tmp_path / "later", into=tmp_path / "out")["method.md"].decode()
    assert "agree within" not in page


def test_the_summary_goes_between_the_markers_of_a_readme(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# top\n<!-- table:begin -->\nold\n<!-- table:end -->\nbottom\n")
    arguments = ["report", str(first), "--into", str(tmp_path / "out"), "--readme", str(readme)]
    assert commands.main(arguments) == 0
    page = readme.read_text()
    total = "2 rows: 2 ahead, 0 level, 0 behind; geometric mean 1.21×"
    assert page.startswith(f"# top\n<!-- table:begin -->\n{total}\n\n| family | rows |")
    assert page.endswith("<!-- table:end -->\nbottom\n") and "old" not in page
    assert "| Normalization | 2 |" in page and "2026-11-30, abc" in page
    folded = page.partition("<details>")[2]
    assert "| RMSNormFwd | 2 |" in folded and "Normalization" not in folded


def test_the_summary_names_who_was_timed(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    rows = [
        make_row("a", times_us={"opkiln": 5.0, "torch": 9.0, "quack": 8.0}),
        make_row("b", times_us={"opkiln": 5.0, "torch": 9.0}),
    ]
    make_run("some", rows, date="2026-11-30T10:00:00Z")
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table:begin -->\n<!-- table:end -->\n")
    arguments = ["report", str(tmp_path / "some"), "--into", str(tmp_path / "out")]
    assert commands.main([*arguments, "--readme", str(readme)]) == 0
    assert "| torch, quack (1 of 2) |" in readme.read_text()
