"""The Markdown pages, from synthetic records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opkiln_bench import pages
from opkiln_bench.analysis import results
from opkiln_bench.pages import milliseconds, write_pages
from opkiln_bench.records import Recorder, read_run

Make = Callable[..., Any]

FAMILY_PAGE = """\
# Normalization

1 ops, 3 workloads.

One table per op, one row per workload. Ratio is the fastest other implementation's device time \
divided by ours, so 🟢 is faster than it, plain is level with it, 🔴 is slower. Times are in ms. \
The last column has the figures of the other system's pages, taken on their machine, of \
implementations that are not timed here. \
[How these numbers are taken](method.md).

Regret of auto on 3 rows: median 0.0 %, largest 11.1 % (RMSNormFwd llama-8b-prefill f16), \
1 above 2 %.

## RMSNormFwd

`input: [*B, *normalized_shape]` `weight: [*normalized_shape]`

- llama-8b-prefill `input: [2048, 4096]` `weight: [4096]` eps=1e-06 dtype=f16, bf16
- llama-8b-decode `input: [2048, 4096]` `weight: [4096]` eps=1e-06 dtype=bf16

| Workload | dtype | Ratio<br>alt / ours | Device time<br>ms | Alternatives<br>name | <br>ms \
| Throughput<br>TFLOP/s | SOL<br>of ceiling | Floor<br>share | Bound<br>by \
| Regret<br>of auto | Theirs, unmeasured here<br>ms |
|---|---|---|---|---|---|---|---|---|---|---|---|
| llama-8b-prefill | f16 | 🔴 0.90× | 0.0200 | torch | 0.0180 | 1.68 | 36% | 46% | mem \
| 11.1 % opkiln | vllm 0.0125 |
|  | bf16 | 🟢 1.50× | 0.0100 | quack torch | 0.0150 0.0300 | 3.36 | 72% | 92% | mem | 0.0 % | – |
| llama-8b-decode | bf16 | 1.00× | 0.0100 | torch | 0.0100 | 3.36 | 72% | 92% | mem | 0.0 % | – |

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


def test_the_page_of_a_family(
    rows: list[Any], make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {("RMSNormFwd", "llama-8b-prefill", "f16"): [("vllm", 12.5)]}
    monkeypatch.setattr(pages, "unmeasured_figures", lambda *key: theirs.get(key, []))
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
    assert "|  | bf16 | wrong | – | quack torch | 0.0150 0.0300 | – | – | – | mem | – |" in page
    assert "- llama-8b-prefill bf16: ours wrong: 3 of 8 wrong" in page


def test_throttled_rows_are_flagged(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    rows[0]["clocks"] = {"sm_mhz": 900, "reasons": 8, "throttled": True}
    assert "|  | bf16 ⚠ throttled |" in written(rows, make_run, tmp_path)["normalization.md"]


def test_a_cpu_run_says_wall_clock(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    for row in rows:
        row["timer"] = {"name": "wall", "title": "CPU wall clock"}
    texts = written(rows, make_run, tmp_path)
    assert texts["normalization.md"].startswith("# Normalization (CPU wall clock)\n")
    assert "device time" not in texts["normalization.md"].lower()
    assert "Theirs" not in texts["normalization.md"]  # a GPU's figures beside a CPU's
    assert texts["all.md"].startswith("# Norm, Conv, Pool & Other (CPU wall clock)\n")


def test_the_method_page_states_what_ran(rows: list[Any], make_run: Make, tmp_path: Path) -> None:
    page = written(rows, make_run, tmp_path)["method.md"]
    assert "3 warm-up calls, then 20 to 60 timed ones" in page
    assert "flushed: zeroing 2 times its size, which lines that `evict_last`" in page
    assert "bytes / 4.672 TB/s" in page
    assert "torch 2.11.0" in page and "commit abc" in page


def test_the_method_page_names_who_is_absent(
    rows: list[Any], make_run: Make, tmp_path: Path
) -> None:
    run = make_run("r", rows, absent={"quack": "quack-kernels is not installed"})
    (page, *_) = write_pages(tmp_path, results([run]), [run])
    assert "\n- Not measured: quack: quack-kernels is not installed.\n" in page.read_text()


def test_the_method_page_says_where_the_time_went(
    rows: list[Any], make_run: Make, tmp_path: Path
) -> None:
    make_run("r", rows)
    parts = [{"timing": 61.25, "checks": 3.0}, {"timing": 10.0}]
    for seconds, wall_s, text in zip(
        parts,
        (70.4, 12.0),
        ("timing 61.2 s, checks 3.0 s; wall 70 s.", "timing 71.2 s, checks 3.0 s; wall 82 s in 2"),
        strict=True,
    ):
        Recorder(tmp_path / "r").write("footer", {"seconds": seconds, "wall_s": wall_s})
        run = read_run(tmp_path / "r")
        (page, *_) = write_pages(tmp_path, results([run]), [run])
        assert f"\n- Where the time went: {text}" in page.read_text()


def test_the_method_page_tells_of_the_clocks(
    rows: list[Any], make_run: Make, tmp_path: Path
) -> None:
    assert "SM clock" not in written(rows, make_run, tmp_path)["method.md"]  # one look, after it
    for row, lowest, throttled in zip(rows, (1980, 1650, 1980), (0, 1, 0), strict=True):
        row["clocks"] = {"sm_mhz": 1980, "sm_mhz_min": lowest, "throttled": bool(throttled)}
    page = written(rows, make_run, tmp_path)["method.md"]
    assert "median of the rows 1980 MHz, lowest 1650 MHz" in page
    assert "a reason to throttle on 1 of 3 rows" in page


@pytest.mark.parametrize(
    ("family", "tensors", "shown_args", "signature", "line"),
    [
        (
            "normalization",
            {"input": ([8, 64], "*B, N"), "scale": ([8, 64], "*scale_dims")},
            {},
            "`input, scale: [*B, N]`",
            "`input, scale: [8, 64]`",
        ),
        (
            "convolution",
            {"input": ([2, 3, 8, 8], "*NC_spatial"), "weight": ([4, 3, 1, 1], "O, I, *kernel")},
            {"stride": [2, 2]},
            "`input: [N, C, H, W]` `weight: [O, I, KH, KW]`",
            "`input: [2, 3, 8, 8]` `weight: [4, 3, 1, 1]` stride=[2, 2]",
        ),
        ("pooling", {"input": ([2, 3, 8], "*NC_spatial")}, {}, "`input: [N, C, L]`", ""),
        ("fft", {"input": ([64, 4096], "*shape")}, {"n": 4096}, "`input: [B, n]`", "4096]`"),
        ("fft", {"input": ([4096], "*shape")}, {"n": 2048}, "`input: [n]`", "n=2048"),
        ("positional-encoding", {"x": ([8, 64], "*shape")}, {}, "`x: [S, D]`", ""),
        ("a plugin's", {"x": ([8, 64], "*shape")}, {}, "`x: [*shape]`", ""),
    ],
)
def test_sizes_have_the_names_that_readers_use(
    make_row: Make, family: str, tensors: Any, shown_args: Any, signature: str, line: str
) -> None:
    row = make_row(
        family=family,
        shown_args=shown_args,
        tensors={
            name: {"shape": shape, "dtype": "bf16", "dims": dims, "fixed_dtype": False}
            for name, (shape, dims) in tensors.items()
        },
    )
    assert pages.dims(row) == signature
    assert pages.sizes(row).endswith(line)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(None, "–"), (1.92, "0.00192"), (10.84, "0.0108"), (2148.3, "2.1483"), (4.3, "0.0043")],
)
def test_milliseconds(time_us: float | None, text: str) -> None:
    assert milliseconds(time_us) == text
