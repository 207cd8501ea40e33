"""What cases show: features, the cells that count them, errors in units in the last place."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import opkiln.cards
import pytest
import torch
from opkiln.conformance import Outcome, cases_of, compare
from opkiln.conformance.cases import SHORT, Case
from opkiln.conformance.cells import Cell, cell_of, join, shown_by, to_json
from opkiln.conformance.compare import last_place
from opkiln.conformance.run import OpReport
from opkiln.conformance.tensors import LAYOUTS
from opkiln.ops import CATALOGUE
from opkiln.summary import as_text

F16, F32, F64 = torch.float16, torch.float32, torch.float64


def case(op: str, name: str) -> Case:
    (found,) = [c for c in cases_of(op) if c.id == name]
    return found


@pytest.mark.parametrize(
    ("op", "name", "features"),
    [
        ("rms_norm", "odd-f64", ("forward", "dtype f64", "layout contiguous")),
        ("rms_norm", "strided-f16-train", ("train", "dtype f16", "layout strided")),
        ("rms_norm_backward", "expanded-f32", ("backward", "dtype f32", "layout constant",
                                               "layout expanded")),
        ("rms_norm", "expanded-f32", ("forward", "dtype f32", "layout expanded")),
        ("rope_neox_inplace", "odd-bf16", ("inplace", "dtype bf16", "layout contiguous")),
        ("rms_norm", "odd-f32-deterministic", ("deterministic",)),
        ("rms_norm", "odd-f32-batch_invariant", ("batch_invariant",)),
        ("rms_norm_backward", "odd-f32-batch_invariant", ()),  # no rows are compared
        ("topk_selector", "odd-f32-batch_invariant", ()),
    ],
)  # fmt: skip
def test_features_of_a_case(op: str, name: str, features: tuple[str, ...]) -> None:
    assert shown_by(case(op, name)) == features


def test_cells_add_up_in_any_order() -> None:
    told = [
        ("b-f16", "passed", ""),
        ("a-f64", "refused", "no float64"),
        ("c-f16", "failed", "out[0] is 1"),
        ("d-f16", "failed", "out[0] is 2"),
    ]
    for order in itertools.permutations(told):
        cell = Cell()
        for one in order:
            cell.join(cell_of(*one))
        assert cell == Cell(1, 2, 1, "c-f16", "c-f16: out[0] is 1")
        assert cell.status == "failed"


def test_a_passed_case_is_named_and_the_refusal_told() -> None:
    cell = cell_of("a-f64", "refused", "no float64")
    assert (cell.status, cell.case) == ("refused", "a-f64")
    cell.join(cell_of("b-f16", "passed", ""))
    assert (cell.status, cell.case, cell.reason) == ("passed", "b-f16", "a-f64: no float64")


def test_a_cell_in_json_has_what_it_has() -> None:
    cells: dict[str, Cell] = {}
    join(cells, [("forward", cell_of("b-f16", "passed", ""))])
    assert to_json(cells) == {"forward": {"passed": 1, "case": "b-f16"}}


def test_a_report_keeps_the_largest_error_of_each_dtype() -> None:
    report = OpReport("rms_norm", "RMSNormFwd")
    for name, ulp in (("b-f16", 0.5), ("c-f16", 0.75), ("a-f16", 0.75)):
        report.add(Outcome("rms_norm", name, "passed", ulp=ulp, dtype="f16"))
    report.add(Outcome("rms_norm", "odd-f64", "passed"))
    assert report.errors == {"f16": (0.75, "a-f16")}
    assert report.to_json()["errors"] == {"f16": [0.75, "a-f16"]}


def test_the_summary_has_a_line_for_each_op() -> None:
    ops = [OpReport(op, CATALOGUE[op].op).to_json() for op in ("rms_norm", "fft")]
    for part in (ops, []):
        summary = {"schema_version": 2, "environment": {"gpu": None}, "ops": part}
        text = as_text(summary)
        assert json.loads(text) == summary
        assert sum('"page_op"' in line for line in text.splitlines()) == len(part)


@pytest.mark.parametrize(
    ("dtype", "size", "unit"),
    [
        (F32, 1.0, 2.0**-23),
        (F32, 1.999, 2.0**-23),
        (F32, 2.0, 2.0**-22),
        (F16, 0.75, 2.0**-11),
        (F16, 65000.0, 32.0),
        (torch.bfloat16, 1.0, 2.0**-7),
        (F16, 0.0, 2.0**-24),  # the smallest number that is no zero
    ],
)
def test_unit_in_the_last_place(dtype: torch.dtype, size: float, unit: float) -> None:
    assert last_place(torch.tensor([size], dtype=F64), dtype).item() == unit


def test_an_error_is_told_in_units() -> None:
    expected = torch.tensor([1.0, -1.5, 1.25], dtype=F64)
    assert compare("out", expected.float(), expected).ulp == 0
    off = torch.tensor([1.0, -1.5 - 3 * 2.0**-23, 1.25])
    assert compare("out", off, expected).ulp == 3
    small = torch.tensor([1.0, 1.0, 2.0**-20], dtype=F64)  # its own unit would make this 2^20
    assert compare("out", (small + 2.0**-23).float(), small).ulp == 2  # at the RMS, below 1


def test_cards_know_every_layout_and_dtype() -> None:
    assert set(opkiln.cards.LAYOUTS) == set(LAYOUTS)
    assert set(opkiln.cards.DTYPES) == set(SHORT.values())
    assert all(opkiln.cards.short(dtype) == name for dtype, name in SHORT.items())


def test_a_case_with_several_layouts_shows_them_all() -> None:
    strided = case("conv2d", "weight_strided-f16")
    shown = replace(strided, kind="backward", row=replace(strided.row, upstream="constant"))
    assert shown_by(shown)[2:] == ("layout constant", "layout strided")
