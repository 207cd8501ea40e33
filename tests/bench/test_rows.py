"""The row files: complete, consistent, and the same bytes and operations as the pages count."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from opkiln import functional
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_bench.catalogue import ITEMSIZE, TORCH_NAMES, Row, load_rows
from opkiln_bench.contestants import canonical

PAGE = {
    (r["op"], r["label"], r["dtype"]): r
    for r in csv.DictReader((Path(__file__).parent / "page_rows.csv").read_text().splitlines())
}
OWN = load_rows(["opkiln_bench.conf"])
PHASES = ("prefill", "decode")
BY_OP = {op: [r for r in OWN if r.op == op] for op in sorted({r.op for r in OWN})}


def test_the_243_rows_of_the_pages() -> None:
    assert len(OWN) == len(PAGE) == 243
    assert {r.key for r in OWN} == set(PAGE)


def test_each_page_shows_its_rows() -> None:
    for row in OWN:
        on_page = PAGE[row.key]
        assert ("all" in row.pages) == (on_page["page_all"] == "1"), row
        assert ("norm" in row.pages) == (on_page["page_norm"] == "1"), row
    assert sum("all" in r.pages for r in OWN) == 200
    assert sum("norm" in r.pages for r in OWN) == 112


def test_ops_and_workloads_come_in_the_pages_order() -> None:
    ops = list(dict.fromkeys(r.op for r in OWN))
    assert ops[:4] == ["LayerNormFwd", "FusedAddLayerNormFwd", "RMSNormFwd", "FusedAddRMSNormFwd"]
    assert ops[4:7] == ["AdaLayerNormFwd", "AdaLayerNormZeroFwd", "BatchNormFwd"]
    assert ops[10:14] == ["Conv1dFwd", "Conv2dFwd", "Conv3dFwd", "AdaptiveMaxPool2dFwd"]
    assert ops[-4:] == ["FFTC2CFwd", "MHCPostFwd", "MHCPreFwd", "TopkSelectorFwd"]
    labels = list(dict.fromkeys(r.label for r in OWN if r.op == "FusedAddRMSNormFwd"))
    sizes = [f"llama-{size}-{phase}" for size in ("8b", "70b", "405b") for phase in PHASES]
    assert labels == [*sizes, "llama-13b-prefill"]


def test_a_page_has_no_label_twice() -> None:
    for page in ("all", "norm"):
        shown = [(r.op, r.pages[page], r.dtype) for r in OWN if page in r.pages]
        assert len(shown) == len(set(shown))


@pytest.mark.parametrize("op", BY_OP)
def test_file_names_the_op(op: str) -> None:
    row = BY_OP[op][0]
    assert row.name in (row.function, f"{row.function}_indices")
    assert hasattr(functional, row.function)
    assert CATALOGUE[row.name].op == op


def call_of(row: Row) -> Call:
    """The row's call on the meta device: shapes and dtypes only."""
    tensors = {
        n: torch.empty(t.shape, dtype=getattr(torch, TORCH_NAMES[t.dtype]), device="meta")
        for n, t in row.tensors.items()
    }
    spec, bound, params = canonical(row.function, {**tensors, **row.args})
    assert spec.name == row.name
    return Call.of(spec, bound, params, real=False)


def bytes_that_peers_take_besides(row: Row) -> int:
    """What the pages' calls pass and ours do not: rotation tables, chunk lists."""
    if row.name.startswith("rope_"):
        tokens = row.tensors["x"].shape[-3 if len(row.tensors["x"].shape) > 2 else 0]
        return tokens * row.tensors["x"].shape[-1] * ITEMSIZE[row.dtype]
    if "cu_seqlens" in row.tensors:
        return row.args["num_chunks"] * 2 * ITEMSIZE["i32"]
    return 0


@pytest.mark.parametrize("op", BY_OP)
def test_a_row_holds_the_bytes_that_the_page_reads(op: str) -> None:
    for row in BY_OP[op]:
        page_bytes = int(PAGE[row.key]["bytes_read"])
        assert row.input_bytes == page_bytes - bytes_that_peers_take_besides(row), row


@pytest.mark.parametrize("op", BY_OP)
def test_the_cost_model_counts_as_the_page(op: str) -> None:
    for row in BY_OP[op]:
        cost, page = CATALOGUE[row.name].cost(call_of(row)), PAGE[row.key]
        besides = bytes_that_peers_take_besides(row)
        read = int(page["bytes_read"])
        assert cost.bytes_read in (read, read - besides), row
        assert cost.bytes_written == int(page["bytes_written"]), row
        assert cost.flops == int(page["flops"]), row
