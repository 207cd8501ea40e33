"""The record on disk: torn lines, resumed runs, shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opkiln_bench.records import (
    FILE,
    MULTIRUN,
    Recorder,
    RecordError,
    collect,
    read_run,
)

Make = Callable[..., Any]


def test_a_torn_last_line_loses_that_row_only(
    make_row: Make, make_run: Make, tmp_path: Path
) -> None:
    make_run("torn", [make_row("a"), make_row("b")])
    path = tmp_path / "torn" / FILE
    path.write_bytes(path.read_bytes()[:-40])
    assert [label for _, label, _ in read_run(tmp_path / "torn").rows] == ["a"]


def test_writing_after_a_torn_line(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    make_run("torn", [make_row("a")])
    path = tmp_path / "torn" / FILE
    path.write_bytes(path.read_bytes() + b'{"kind":"row","op":"RMSNor')
    Recorder(tmp_path / "torn").write("row", make_row("b"))
    assert [label for _, label, _ in read_run(tmp_path / "torn").rows] == ["a", "b"]


def test_a_row_measured_again_replaces_the_first(make_row: Make, make_run: Make) -> None:
    run = make_run("twice", [make_row(commit="one"), make_row(commit="two")])
    assert [r["commit"] for r in run.rows.values()] == ["two"]


def test_footers_of_a_resumed_run_add_up(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    make_run("parts", [make_row("a")])
    recorder = Recorder(tmp_path / "parts")
    recorder.write("footer", {"seconds": {"timing": 2.0, "checks": 4.0}, "wall_s": 7.5})
    recorder.write("row", make_row("b"))
    recorder.write("footer", {"seconds": {"timing": 3.0, "freeing": 0.01}, "wall_s": 4.0})
    run = read_run(tmp_path / "parts")
    assert [label for _, label, _ in run.rows] == ["a", "b"]
    assert (run.spent, run.wall_s) == ([("timing", 5.0), ("checks", 4.0)], 11.5)
    collect([run, run], tmp_path / "whole")
    assert len(read_run(tmp_path / "whole").footers) == 4


def test_a_kind_of_line_from_a_later_version_is_skipped(
    make_row: Make, make_run: Make, tmp_path: Path
) -> None:
    make_run("later", [make_row("a")])
    Recorder(tmp_path / "later").write("weather", {"op": "RMSNormFwd"})
    assert [label for _, label, _ in read_run(tmp_path / "later").rows] == ["a"]


def test_a_shard_carries_the_name_of_its_run(make_run: Make, tmp_path: Path) -> None:
    make_run("split/0", [])
    assert read_run(tmp_path / "split/0").name == "0"
    (tmp_path / "split" / MULTIRUN).touch()
    assert read_run(tmp_path / "split/0").name == "split/0"


def test_another_schema_is_refused(make_run: Make, tmp_path: Path) -> None:
    make_run("old", [])
    path = tmp_path / "old" / FILE
    path.write_text(path.read_text().replace('"schema_version":1', '"schema_version":99'))
    with pytest.raises(RecordError, match="schema 99, this version reads 1"):
        read_run(tmp_path / "old")


def test_a_folder_without_record_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=f"holds no {FILE}"):
        read_run(tmp_path)


def test_collect_folds_shards(make_row: Make, make_run: Make, tmp_path: Path) -> None:
    shards = [make_run("0", [make_row("a")]), make_run("1", [make_row("b")])]
    assert collect(shards, tmp_path / "whole") == 2
    whole = read_run(tmp_path / "whole")
    assert len(whole.rows) == 2
    assert whole.header["collected_from"] == ["0", "1"]
    with pytest.raises(RecordError, match="collect writes a new run"):
        collect(shards, tmp_path / "whole")
