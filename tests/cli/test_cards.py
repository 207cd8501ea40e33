"""Capability cards: every cell is backed by a case of a conformance summary, or "not tested"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import opkiln
import pytest
from click.testing import CliRunner, Result
from opkiln.cards import NOT_TESTED, Card
from opkiln.cli.cards import COLUMNS
from opkiln.cli.commands import opkiln as command
from opkiln.conformance import cases_of, conform
from opkiln.errors import ArgumentError
from opkiln.ops import CATALOGUE
from opkiln.policy import DEFAULT
from opkiln.summary import SCHEMA_VERSION, shipped

ROOT = Path(__file__).parents[2]
OPS = ["rms_norm", "rms_norm_backward"]


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of backend torch on a CPU, as `opkiln conform --json` writes it."""
    file = tmp_path_factory.mktemp("cards") / "conformance.json"
    file.write_text(json.dumps(conform("torch", OPS).to_json()))
    return file


@pytest.fixture(scope="module")
def card(summary: Path) -> Card:
    return opkiln.card("rms_norm", "torch", summary)


def changed(summary: Path, tmp_path: Path, **values: Any) -> Path:
    """A copy of the summary whose head has other values."""
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(json.loads(summary.read_text()) | values))
    return file


def invoke(*args: str) -> Result:
    return CliRunner().invoke(command, args)


def test_what_the_cases_show(card: Card) -> None:
    """torch serves all of it, but does not promise batch invariance; only a GPU has graphs."""
    status = {name: cell.status for name, cell in card.cells.items()}
    yes = ("forward", "saved_tensors", "backward", "double_backward", "compile", "export")
    assert {status[n] for n in (*yes, "autocast", "deterministic")} == {"yes"}
    assert status["batch_invariant"] == "no"
    assert "does not promise batch_invariant" in card.cells["batch_invariant"].reason
    assert status["graph_capture"] == status["second_device"] == NOT_TESTED
    assert {d: c.status for d, c in card.dtypes.items()} == dict.fromkeys(
        ("f16", "bf16", "f32", "f64"), "yes"
    )
    assert card.layouts["strided"].status == "yes"
    assert card.layouts["channels_last"].status == NOT_TESTED


def test_every_cell_names_a_case(card: Card) -> None:
    """One of the op's or of its backward's; what torch does with it has its feature's name."""
    known = {c.id for op in OPS for c in cases_of(op)}
    cells = [*card.cells.items(), *card.dtypes.items(), *card.layouts.items()]
    for name, cell in cells:
        if cell.status == NOT_TESTED:
            assert cell.case == ""
        else:
            base = cell.case.removesuffix(f"-{name}").removesuffix("-row_counts")
            assert base in known or cell.case in known, (name, cell)
    assert all(case in known for _, case in card.errors.values())


def test_counts_are_those_of_the_cases(card: Card) -> None:
    forward = [c for c in cases_of("rms_norm") if c.kind == "forward" and c.policy == DEFAULT]
    cell = card.cells["forward"]
    assert cell.passed + cell.refused + cell.failed == len(forward)


def test_largest_error_is_rounding_alone_in_16_bits(card: Card) -> None:
    """Half a unit is the rounding of the result; float32 arithmetic adds a few of its own."""
    assert 0.4 < card.errors["f16"][0] <= 0.6
    assert 0.4 < card.errors["f32"][0] < 16


def test_a_failed_case_decides_its_cells(summary: Path, tmp_path: Path) -> None:
    ops = json.loads(summary.read_text())["ops"]
    ops[0]["cells"]["forward"] |= {"failed": 1, "case": "odd-f16", "reason": "odd-f16: off"}
    found = opkiln.card("rms_norm", "torch", changed(summary, tmp_path, ops=ops))
    assert found.cells["forward"].status == "failed"
    assert str(found.cells["forward"]) == "failed: odd-f16: off"


def test_without_a_summary_nothing_is_tested() -> None:
    for op in ("rms_norm", "topk_selector", "max_pool2d"):
        found = opkiln.card(op, "torch-ref")
        assert set(found.cells.values()) | set(found.layouts.values()) == {
            next(iter(found.cells.values()))
        }
        assert found.cells["forward"].status == NOT_TESTED
        assert not found.errors
        assert "no summary" in str(found)


def test_an_op_without_a_derivative_has_no_backward_cell() -> None:
    assert CATALOGUE["topk_selector"].backward is None
    assert "backward" not in opkiln.card("topk_selector", "torch-ref").cells


def test_as_dict_is_json_and_complete(card: Card) -> None:
    found = json.loads(json.dumps(card.as_dict()))
    assert set(found["cells"]) == set(card.cells)
    assert list(found["layouts"]) == list(card.layouts)
    assert found["errors"]["f16"] == {"ulp": card.errors["f16"][0], "case": card.errors["f16"][1]}
    assert (found["op"], found["page_op"], found["backend"]) == ("rms_norm", "RMSNormFwd", "torch")


def test_text_has_a_line_for_each_cell(card: Card) -> None:
    head, *lines = str(card).splitlines()
    assert head.startswith("rms_norm (RMSNormFwd) by torch: cpu, 20")
    assert len(lines) == len(list(card.lines()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema_version": 1}, "has schema 1, cards are made of schema 2"),
        ({"environment": {}}, "is no summary of `opkiln conform`"),
    ],
)
def test_what_is_no_summary(
    summary: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        opkiln.card("rms_norm", "torch", changed(summary, tmp_path, **values))


def test_unknown_op_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no op 'rmsnorm'; the nearest are rms_norm"):
        opkiln.card("rmsnorm")
    with pytest.raises(ArgumentError, match=r"absent\.json"):
        opkiln.card("rms_norm", "torch", tmp_path / "absent.json")


def test_list_shows_a_line_for_each_card(summary: Path) -> None:
    done = invoke("list", "--backend", "torch", "--summary", str(summary))
    assert done.exit_code == 0, done.output
    head, line, source = done.output.splitlines()
    assert all(title in head for title in COLUMNS.values())
    assert line.split()[:3] == ["rms_norm", "yes", "yes"]
    assert source.startswith("cpu, 20")


def test_list_shows_a_whole_card(summary: Path, card: Card) -> None:
    args = ["list", "--op", "RMSNormFwd", "--backend", "torch", "--summary", str(summary)]
    assert invoke(*args).output == f"{card}\n"
    assert json.loads(invoke(*args, "--json").output) == [json.loads(json.dumps(card.as_dict()))]


def test_list_of_wrong_usage_is_one_line(summary: Path) -> None:
    for args, message in (
        (["--backend", "torhc"], "no backend 'torhc'; the nearest are torch"),
        (["--summary", str(summary)], "--summary needs --backend"),
        (["--backend", "demo", "--summary", str(summary)], "no card: nothing is known of"),
    ):
        done = invoke("list", *args)
        assert done.exit_code == 2
        assert done.stderr.startswith("opkiln: ") and message in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_shipped_summary_is_found(summary: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """`opkiln cards` puts each package's ops into it, and cards come from there."""
    monkeypatch.setattr(
        "opkiln.summary.packages", lambda: {"opkiln:torch": "shipping", "other:one": "another"}
    )
    (tmp_path / "shipping").mkdir()
    (tmp_path / "shipping/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    done = invoke("cards", str(summary))
    assert done.exit_code == 0, done.output
    file = tmp_path / "shipping/cards/torch-cpu.json"
    assert done.output == f"{file}\n"
    assert json.loads(file.read_text()) == json.loads(summary.read_text())
    assert opkiln.card("rms_norm", "torch") == opkiln.card("rms_norm", "torch", summary)
    assert opkiln.card("layer_norm", "torch").source.startswith("no summary")


def test_what_no_package_has_cannot_be_shipped(summary: Path, tmp_path: Path) -> None:
    for file, message in (
        (changed(summary, tmp_path, backend="nobody"), "no installed package has"),
        (tmp_path / "absent.json", "absent.json: No such file"),
    ):
        done = invoke("cards", str(file))
        assert done.exit_code == 2
        assert message in done.stderr and done.stderr.count("\n") == 1


def test_the_families_ship_the_committed_summary() -> None:
    """`opkiln cards results/h200/conformance.json` was run after it changed; of an earlier schema
    nothing can be shipped.
    """
    committed = json.loads((ROOT / "results/h200/conformance.json").read_text())
    readable = committed["schema_version"] == SCHEMA_VERSION
    found = [s for s in shipped() if s["backend"] == "opkiln"]
    ops = {op["op"]: op for summary in found for op in summary["ops"]}
    assert ops == ({op["op"]: op for op in committed["ops"]} if readable else {})
    assert all(s["environment"] == committed["environment"] for s in found)
