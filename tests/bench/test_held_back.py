"""The held-back sample: what is drawn, that no table is made from it, and its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.test_app import bench
from opkiln.measured import Bucket, Entry
from opkiln_bench import commands, regret
from opkiln_bench.catalogue import Row, load_rows
from opkiln_bench.contestants import bring
from opkiln_bench.held_back import MAX_BYTES, MAX_STEP, PAGE, held_back, sizes_of
from opkiln_bench.records import read_run
from opkiln_bench.rows_csv import read_csv

Make = Callable[..., Any]
ROWS = load_rows(["opkiln_bench.conf"], mode="all")
SAMPLE = held_back(ROWS)
FEW = ("FFTC2CFwd", "FFTC2CBwd")  # powers of two in the reach of one size

KINDS = {"one", "some", "depthwise"}


def of(op: str, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.op == op]


def test_twenty_of_every_op() -> None:
    counts = Counter(row.op for row in SAMPLE)
    assert counts.keys() == {row.op for row in ROWS}
    assert {n for op, n in counts.items() if op not in FEW} == {20}
    assert all(counts[op] >= 9 for op in FEW)
    assert len({row.key for row in SAMPLE}) == len(SAMPLE)


def test_everyone_draws_the_same() -> None:
    assert held_back(ROWS) == SAMPLE
    few = held_back([row for row in ROWS if row.name == "rms_norm"], 5)
    assert few == of("RMSNormFwd", SAMPLE)[:5]  # whatever else is asked for


@pytest.mark.parametrize("op", sorted({row.op for row in ROWS}))
def test_shapes_lie_between_those_of_the_pages(op: str) -> None:
    spans: dict[str, list[int]] = {}
    for row in of(op, ROWS):
        for letter, size in sizes_of(row).items():
            spans.setdefault(letter, []).append(size)
    known = [{n: t.shape for n, t in row.tensors.items()} for row in of(op, ROWS)]
    new = 0
    for row in of(op, SAMPLE):
        assert row.input_bytes <= MAX_BYTES and row.pages == {PAGE: row.label}
        for letter, size in sizes_of(row).items():
            if letter in ("O", "I", "W"):  # follow from others in part of the rows
                continue
            low, high = min(spans[letter]), max(spans[letter])
            assert low // (4 if low == high else 1) - MAX_STEP < size < high + MAX_STEP
        new += {n: t.shape for n, t in row.tensors.items()} not in known
    assert new > 0


SMALL = [row for row in SAMPLE if row.input_bytes < 150_000 and row.label < "held-back-08"]


@pytest.mark.parametrize("row", SMALL, ids=str)
def test_the_calls_can_be_made(row: Row) -> None:
    subject = bring(row, torch.device("cpu"))
    assert subject.call.outputs or subject.spec.mutates(subject.call)


def test_groups_divide_the_channels() -> None:
    kinds = set()
    for row in SAMPLE:
        if row.function.startswith("conv"):
            groups, channels = row.args["groups"], row.tensors["input"].shape[1]
            out, inside = row.tensors["weight"].shape[:2]
            assert inside * groups == channels and out % groups == 0
            kinds.add("depthwise" if groups == channels > 1 else "some" if groups > 1 else "one")
    assert kinds == KINDS


def test_no_table_is_made_from_it(
    make_row: Make, make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = {"kind": "bfloat16 2d", "sizes": [2, 4, 8, 16]}
    sampled = make_row("held-back-01", pages={PAGE: "held-back-01"}, bucket=bucket)
    run = make_run("sample", [sampled])
    out = tmp_path / "x.json"
    assert commands.main(["table", str(run.path.parent), "--out", str(out)]) == 1
    assert "1 rows left out: they are of the held-back sample" in capsys.readouterr().out
    assert not out.exists()
    both = make_run("both", [sampled, make_row("mine", bucket=bucket)])
    assert commands.main(["table", str(both.path.parent), "--out", str(out)]) == 0
    assert out.read_text().count('"op"') == 1


def test_its_page_and_csv(
    make_row: Make, make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket("rms_norm", "k", (64,))
    table = {("rms_norm", "k"): [Entry(bucket, {"opkiln": 9.0, "torch": 10.0}, "then")]}
    monkeypatch.setattr(regret, "tables", {"sm90": table}.__getitem__)
    stated = {"bucket": {"kind": "k", "sizes": [64]}}
    rows = [
        make_row(
            f"held-back-{i:02}",
            pages={PAGE: f"held-back-{i:02}"},
            times_us={"opkiln": ours, "torch": 10.0},
            **stated,
        )
        for i, ours in enumerate((5.0, 10.0, 20.0), 1)
    ]
    run = make_run("r", [*rows, make_row("on-the-page")])
    out = tmp_path / "out"
    assert commands.main(["report", str(run.path.parent), "--into", str(out)]) == 0
    page = (out / "held_back.md").read_text()
    assert "Regret of auto on 3 rows: median 0." in page and "1 above 5 %" in page
    assert "\n| RMSNormFwd | 3 | 3 | 0." in page
    (line,) = [line for line in page.splitlines() if "`input: [2048, 4096]`" in line]
    assert "| opkiln | 0.0" in line and line.endswith(" % opkiln |")
    assert [r["label"] for r in read_csv(out / "rows.csv")] == ["on-the-page"]
    assert len(read_csv(out / "rows_held_back.csv")) == 3
    for name in ("normalization.md", "index.html", "all.md"):
        assert "held-back" not in (out / name).read_text()


def test_a_run_of_it(tmp_path: Path) -> None:
    small = ["device=cpu", "suite=held_back", "op=mhc_post", "suite.held_back=3"]
    done = bench(tmp_path, *small, "run=sample", "backends=[torch]")
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "runs" / "sample")
    assert [label for _, label, _ in run.rows] == [f"held-back-0{i}" for i in (1, 2, 3)]
    assert (tmp_path / "runs/sample/pages/held_back.md").is_file()
    shown = bench(tmp_path, "--cfg", "job", "suite=held_back")
    assert "backends:\n  - opkiln\n  - torch\n" in shown.stdout
    more = bench(tmp_path, *small[:3], "suite.held_back=21")
    assert more.returncode == 2 and "suite.held_back must be at most 20, got 21" in more.stderr
