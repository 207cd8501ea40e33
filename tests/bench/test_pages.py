"""The Markdown pages, from synthetic records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opkiln_bench.analysis import results
from opkiln_bench.pages import milliseconds, write_pages

Make = Callable[..., Any]

FAMILY_PAGE = """\
# Normalization

1 ops, 3 workloads.

One table per op, one row per workload. Ratio is the fastest other implementation's device time \
divided by ours, so 🟢 is faster than it, plain is level with it, 🔴 is slower. Times are in ms. \
[How these numbers are taken](method.md).

## RMSNormFwd

`input: [*B, *normalized_shape]` `weight: [*normalized_shape]`

- llama-8b-prefill `input: [2048, 4096]` `weight: [4096]` eps=1e-06 dtype=f16, bf16
- llama-8b-decode `input: [2048, 4096]` `weight: [4096]` eps=1e-06 dtype=bf16

| Workload | dtype | Ratio<br>alt / ours | Device time<br>ms | Alternatives<br>name | <br>ms \
| Throughput<br>TFLOP/s | SOL<br>of ceiling | Floor<br>share | Bound<br>by |
|---|---|---|---|---|---|---|---|---|---|
| llama-8b-prefill | f16 | 🔴 0.90× | 0.0200 | torch | 0.0180 | 1.68 | 36% | 46% | mem |
|  | bf16 | 🟢 1.50× | 0.0100 | quack torch | 0.0150 0.0300 | 3.36 | 72% | 92% | mem |
| llama-8b-decode | bf16 | 1.00× | 0.0100 | torch | 0.0100 | 3.36 | 72% | 92% | mem |

- llama-8b-decode bf16: quack not timed: ImportError: no module named cutlass
"""


def steady(row: dict[str, Any]) -> dict[str, Any]:
    """The same row with times that do not vary, so that the page is one text."""
    for entry in row["backends"].values():
        if entry["status"] == "ok":
            center = round(sum(entry["forward_us"]) / len(entry["forward_us"]))
            entry |= {"forward_us": [float(center)] * 20, "reversed_us": [float(center)] * 20}
    return row


@pytest.fixture
def rows(make_row: Make) -> list[dict[str, Any]]:
    return [
        steady(make_row(dtype="bf16", times_us={"opkiln": 10.0, "torch": 30.0, "quack": 15.0})),
        steady(make_row(dtype="f16", times_us={"opkiln": 20.0, "torch": 18.0})),
        steady(
            make_row(
                label="llama-8b-decode",
                times_us={
                    "opkiln": 10.0,
                    "torch": 10.0,
                    "quack": "ImportError: no module named cutlass",
                },
            )
        ),
    ]


def written(rows: list[dict[str, Any]], make_run: Make, folder: Path) -> dict[str, str]:
    run = make_run("r", rows)
    return {p.name: p.read_text() for p in write_pages(folder, results([run]), [run])}


def test_the_page_of_a_family(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    assert written(rows, make_run, tmp_path)["normalization.md"] == FAMILY_PAGE


def test_the_page_of_all(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    page = written(rows, make_run, tmp_path)["all.md"]
    assert "\n1 ops, 3 workloads — Normalization 1.\n" in page
    assert "\n### RMSNormFwd (3 workloads)\n" in page
    assert "\n| llama-8b-prefill-float16 | 🔴 0.90× | 0.0200 | torch | 0.0180 | 1.68 |\n" in page


def test_ok_mark_needs_no_row_behind(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    page = written([rows[0], rows[2]], make_run, tmp_path)["all.md"]
    assert "### RMSNormFwd (2 workloads · ✅)" in page


def test_a_wrong_result_has_no_time(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    rows[0]["backends"]["opkiln"] = {"status": "wrong", "reason": "3 of 8 wrong"}
    page = written(rows, make_run, tmp_path)["normalization.md"]
    assert "|  | bf16 | wrong | – | quack torch | 0.0150 0.0300 | – | – | – | mem |" in page
    assert "- llama-8b-prefill bf16: ours wrong: 3 of 8 wrong" in page


def test_throttled_rows_are_flagged(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    rows[0]["clocks"] = {"sm_mhz": 900, "reasons": 8, "throttled": True}
    assert "|  | bf16 ⚠ throttled |" in written(rows, make_run, tmp_path)["normalization.md"]


def test_a_cpu_run_says_wall_clock(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    for row in rows:
        row["timer"] = {"name": "wall", "title": "CPU wall clock"}
    pages = written(rows, make_run, tmp_path)
    assert pages["normalization.md"].startswith("# Normalization (CPU wall clock)\n")
    assert "device time" not in pages["normalization.md"].lower()
    assert pages["all.md"].startswith("# Norm, Conv, Pool & Other (CPU wall clock)\n")


def test_the_method_page_states_what_ran(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    page = written(rows, make_run, tmp_path)["method.md"]
    assert "3 warm-up calls, then 20 to 60 timed ones" in page
    assert "zeroing 2 times its size" in page
    assert "bytes / 4.672 TB/s" in page
    assert "torch 2.11.0" in page and "commit abc" in page


def test_the_method_page_names_who_is_absent(
    rows: list[Any], make_run: Make, tmp_path: Path
) -> None:
    run = make_run("r", rows, absent={"quack": "quack-kernels is not installed"})
    (page, *_) = write_pages(tmp_path, results([run]), [run])
    text = page.read_text()
    assert "\n- Not measured: quack: quack-kernels is not installed.\n" in text
    assert "\n| FusedAddRMSNormFwd | llama-70b-prefill | f16 | vllm | 0.0358 |\n" in text


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(None, "–"), (1.92, "0.00192"), (10.84, "0.0108"), (2148.3, "2.1483"), (4.3, "0.0043")],
)
def test_milliseconds(time_us: float | None, text: str) -> None:
    assert milliseconds(time_us) == text
