"""Regret: what auto would pick by the shipped tables, against the faster of ours and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opkiln.measured import Bucket, Entry
from opkiln.registry import REGISTRY
from opkiln_bench import regret
from opkiln_bench.analysis import results
from opkiln_bench.html import render
from opkiln_bench.pages import write_pages
from opkiln_bench.regret import Regret, regret_of, summary
from opkiln_bench.rows_csv import read_csv, update_csv

Make = Callable[..., Any]
BUCKET = {"kind": "bfloat16 2d", "sizes": [2048, 4096, 33554432, 16777216]}


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets a test state what the families ship for the row's call on an sm90."""

    def state(**us: float) -> None:
        bucket = Bucket("rms_norm", BUCKET["kind"], tuple(BUCKET["sizes"]))
        table = {(bucket.op, bucket.kind): [Entry(bucket, us, "there, then")]}
        monkeypatch.setattr(regret, "tables", {"sm90": table}.__getitem__)

    state()
    yield state


def found(row: dict[str, Any]) -> tuple[str, float] | None:
    regretted = regret_of(row)
    return regretted and (regretted.picked, pytest.approx(regretted.value, abs=0.01))


def test_auto_follows_the_shipped_table(make_row: Make, shipped: Callable[..., None]) -> None:
    row = make_row(bucket=BUCKET, times_us={"opkiln": 10.0, "torch": 8.0, "liger": 1.0})
    assert found(row) == ("opkiln", 0.25)  # by priority: nothing is known of the call
    shipped(opkiln=10.0, torch=8.0)
    assert found(row) == ("torch", 0.0)
    shipped(opkiln=8.0, torch=10.0)
    assert found(row) == ("opkiln", 0.25)
    assert found({**row, "bucket": {**BUCKET, "kind": "float32 2d"}}) == ("opkiln", 0.25)


def test_a_row_without_two_contestants_has_none(
    make_row: Make, shipped: Callable[..., None]
) -> None:
    assert regret_of(make_row(times_us={"opkiln": 10.0, "liger": 8.0})) is None
    assert regret_of(make_row(times_us={"opkiln": "out of memory", "torch": 8.0})) is None
    assert regret_of(make_row(name="op_of_yesterday")) is None


def test_who_may_not_be_picked_is_no_candidate(
    make_row: Make, shipped: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that the record has a time of, and that dispatch reaches by name only."""
    impls = dict(REGISTRY.of("rms_norm"))
    monkeypatch.setitem(impls, "opkiln", replace(impls["opkiln"], auto=False))
    monkeypatch.setattr(REGISTRY, "of", lambda op: impls)
    row = make_row(bucket=BUCKET, times_us={"opkiln": 8.0, "torch": 10.0})
    assert found(row) == ("torch", 0.25)
    del impls["opkiln"]  # the family is not installed: nothing can be said
    assert regret_of(row) is None


def test_the_architecture_of_a_record(make_row: Make, shipped: Callable[..., None]) -> None:
    row = make_row(bucket=BUCKET, times_us={"opkiln": 10.0, "torch": 8.0})
    shipped(opkiln=10.0, torch=8.0)
    assert found({**row, "gpu": "NVIDIA H300", "arch": "sm90"}) == ("torch", 0.0)
    assert found({**row, "gpu": "NVIDIA H300"}) == ("opkiln", 0.25)


def test_the_sentence() -> None:
    named = [("a", Regret("torch", 0.0)), ("b", None), ("c", Regret("opkiln", 0.031))]
    assert summary(named, 0.02) == (
        "Regret of auto on 2 rows: median 1.6 %, largest 3.1 % (c), 1 above 2 %"
    )
    assert summary(named, 0.05).endswith("0 above 5 %")
    assert summary([("b", None)], 0.02) == ""


def test_in_rows_csv_and_on_the_pages(
    make_row: Make, make_run: Make, shipped: Callable[..., None], tmp_path: Path
) -> None:
    rows = [
        make_row("slow", bucket=BUCKET, times_us={"opkiln": 10.0, "torch": 8.0}),
        make_row("alone", bucket=BUCKET, times_us={"opkiln": 10.0, "liger": 8.0}),
    ]
    run = make_run("r", rows)
    judged = results([run])
    update_csv(tmp_path / "rows.csv", judged)
    slow, alone = read_csv(tmp_path / "rows.csv")
    assert slow["auto"] == "opkiln" and float(slow["regret"]) == pytest.approx(0.25, abs=0.01)
    assert (alone["auto"], alone["regret"]) == ("", "")
    pages = {p.name: p.read_text() for p in write_pages(tmp_path, judged, [run])}
    told = "Regret of auto on 1 rows: median 2"
    assert told in pages["normalization.md"] and told in pages["all.md"]
    assert " % opkiln | – |\n" in pages["normalization.md"]
    assert told in render(judged, None) and '"auto":"opkiln","regret":0.2' in render(judged, None)
