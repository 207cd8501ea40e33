"""Rows of gradients: which there are, their calls, where they are shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_rows import BACKWARD, CPU, GRADIENTS, OWN, SMALLEST, is_right
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln_bench import check, html, pages, report, rows_csv, summary
from opkiln_bench.analysis import results
from opkiln_bench.catalogue import (
    CatalogueError,
    in_suite,
    load_rows,
    parse_gradients,
    select,
)
from opkiln_bench.contestants import bring, cost_of
from opkiln_bench.records import Run
from opkiln_bench.settings import Bench
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.sweep import Sweep
from opkiln_bench.timing.wall import WallTimer
from opkiln_bench.validate import check_calls, check_config, check_ops


def test_the_modes() -> None:
    everything = load_rows(["opkiln_bench.conf"], "all")
    assert len(OWN) == 243 and not any(r.forward for r in OWN)
    assert everything == [*OWN, *GRADIENTS]
    assert {r.op for r in BACKWARD} - {r.op for r in GRADIENTS} == {"BatchNormBwd"}
    assert {r.op for r in BACKWARD} & {r.op for r in OWN} == {"BatchNormBwd"}
    assert len({r.key for r in everything}) == len(everything)


def test_every_backward_has_two_rows_or_more() -> None:
    names = [r.name for r in BACKWARD]
    assert set(names) == {n for n in CATALOGUE if n.endswith("_backward")}
    assert min(names.count(n) for n in names) >= 2
    check_ops(GRADIENTS)
    check_calls(GRADIENTS)


MILD = {"alpha_pre", "alpha_post", "alpha_res"}


def test_a_gradient_is_of_a_row_of_the_pages() -> None:
    known = {r.key: r for r in OWN}
    for row in GRADIENTS:
        forward = known[str(row.forward), row.label, row.dtype]
        assert (row.tensors, row.function) == (forward.tensors, forward.function)
        changed = {k for k, v in row.args.items() if forward.args.get(k) != v}
        assert changed == (MILD if row.op == "MHCPreBwd" else set())
        assert row.pages == {} and row.family == forward.family
        assert "decode" not in row.label  # no training step has one token


def test_no_suite_of_a_page_has_a_gradient() -> None:
    assert in_suite(GRADIENTS, page="all") == in_suite(GRADIENTS, page="norm") == []
    assert {r.op for r in select(GRADIENTS, "*rms_norm*", "*", "bf16")} == {
        "RMSNormBwd",
        "FusedAddRMSNormBwd",
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"op": "ABwd", "rows": {}}, r"x\.yaml: gradient 1 has no of"),
        ({"op": "ABwd", "of": "RMSNormFwd", "rows": ["a"]}, r"x\.yaml: gradient 1 cannot be read"),
        (
            {"op": "ABwd", "of": "RMSNormFwd", "rows": {"llama-8b-decode": ["f32"]}},
            r"x\.yaml: ABwd: there is no row RMSNormFwd llama-8b-decode f32",
        ),
    ],
    ids=["key", "shape", "row"],
)
def test_a_broken_file_of_gradients_is_one_line(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogueError, match=message) as error:
        parse_gradients({"gradients": [entry]}, OWN, "x.yaml")
    assert "\n" not in str(error.value)


def test_another_mode_is_one_line() -> None:
    with pytest.raises(CatalogueError, match="mode must be one of fwd, bwd, all, got 'backward'"):
        check_config(Bench(mode="backward"))


@pytest.mark.parametrize("name", SMALLEST)
def test_the_call_of_a_gradient(name: str) -> None:
    """What the backward's spec demands, the same in every run; torch takes it and is right."""
    subject, again = bring(SMALLEST[name], CPU), bring(SMALLEST[name], CPU)
    assert subject.spec is CATALOGUE[name]
    pairs = list(zip(subject.tensors, again.tensors, strict=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]
    given = [t for t in subject.tensors if t is not None]
    assert cost_of(subject)["bytes_read"] == sum(t.nbytes for t in given)
    assert (given[0] != given[0].flatten()[0]).any()  # not the ones of a sum()
    shown = subject.shown_tensors
    assert [t.shape for t in shown.values()] == [tuple(t.shape) for t in given if t.numel()]
    assert next(iter(shown)).startswith("grad_")
    launch = REGISTRY.of(name)["torch"].loader()(subject.call)
    assert is_right(subject, launch(*subject.tensors))


def test_saved_tensors_are_the_forwards() -> None:
    row = SMALLEST["layer_norm_backward"]
    _, x, weight, mean, rstd = bring(row, CPU).tensors
    assert x is not None and weight is not None and mean is not None and rstd is not None
    assert mean.dtype == rstd.dtype == torch.float32
    assert torch.allclose(mean, x.float().mean(-1), atol=1e-6)
    assert torch.allclose(rstd, x.float().var(-1, correction=0).add(1e-6).rsqrt())


def test_a_wrong_gradient_is_found() -> None:
    subject = bring(SMALLEST["mhc_post_backward"], CPU)
    grads = list(subject.spec.reference(*subject.tensors, **subject.params))
    grads[1] = grads[1] * 1.01
    found = check.against_reference(subject, {"opkiln": grads})["opkiln"]
    assert not found.ok and found.reason.startswith("grad_h_post[")


@pytest.fixture
def measured() -> dict[str, Any]:
    settings = TimerSettings(min_samples=4, max_samples=4, warmup_calls=1, host_calls=1)
    sweep = Sweep(CPU, WallTimer(settings), settings, ["opkiln", "torch", "torch-ref"], "test")
    return sweep.measure(SMALLEST["max_pool1d_backward"])


def test_the_record_of_a_gradient(measured: dict[str, Any]) -> None:
    assert (measured["op"], measured["forward"], measured["pages"]) == (
        "MaxPool1dBwd",
        "MaxPool1dFwd",
        {},
    )
    assert measured["backends"]["torch"]["status"] == "ok", measured["backends"]
    assert list(measured["tensors"]) == ["grad_out", "offset"]
    assert measured["tensors"]["offset"]["dtype"] == "u8"
    assert pages.dims(measured) == "`grad_out: [N, C, L]` `offset: [N, C, L], u8`"


Make = Callable[..., Any]


@pytest.fixture
def mixed(measured: dict[str, Any], make_row: Make, make_run: Make) -> Run:
    """A run with a row of the pages, and a gradient that ours has a time of."""
    page_row = make_row()
    gradient = {**measured, "timer": page_row["timer"], "gpu": page_row["gpu"]}
    gradient["backends"] = make_row(times_us={"opkiln": 4.0, "torch": 6.0})["backends"]
    return make_run("mixed", [page_row, gradient])


def test_gradients_are_published_apart(mixed: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report.publish_into([mixed.path], out)
    assert [line["op"] for line in rows_csv.read_csv(out / "rows.csv")] == ["RMSNormFwd"]
    assert [line["op"] for line in rows_csv.read_csv(out / "rows_bwd.csv")] == ["MaxPool1dBwd"]
    heads = {(out / name).read_text().splitlines()[0] for name in ("rows.csv", "rows_bwd.csv")}
    assert heads == {",".join(rows_csv.COLUMNS)}
    page = (out / "backward.md").read_text("utf-8")
    assert page.startswith("# Backward\n") and "## MaxPool1dBwd" in page and "1.50×" in page
    assert "MaxPool1dBwd" not in (out / "all.md").read_text("utf-8")
    assert not (out / "pooling.md").exists()
    assert "Bwd" not in (out / "normalization.md").read_text("utf-8")


def test_gradients_on_the_offline_page_and_in_the_summary(mixed: Run) -> None:
    rows = results([mixed])
    assert [html.row_data(r)["family"] for r in rows] == ["normalization", "backward"]
    text = summary.summary(rows, "NVIDIA H200", ["abc"], ["2026-11-30"])
    assert text.startswith("1 rows: 1 ahead")  # the pages' rows
    assert "| Backward | 1 | 1 | 0 | 0 | 1.50× | torch |" in text


def test_a_cpu_run_of_gradients(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opkiln_bench", "device=cpu", "mode=bwd", "op=mhc_post*", "run=b",
         "suite=smoke", "backends=[torch,torch-ref]"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OPKILN_COMMIT": "test"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = rows_csv.read_csv(tmp_path / "runs/b/rows_bwd.csv")
    assert (line["op"], line["label"], line["status"]) == ("MHCPostBwd", "post-small", "missing")
    assert line["best_alt"] in ("torch", "torch-ref")
