"""Patterns, suites, shards, and rows that another distribution brings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from opkiln_bench.catalogue import (
    CatalogueError,
    choose,
    in_shard,
    in_suite,
    load_rows,
    parse_rows,
    select,
)

ROWS = load_rows(["opkiln_bench.conf"])


def test_patterns_take_either_name_of_an_op() -> None:
    by_page_name = select(ROWS, "RMSNormFwd", "*", "*")
    assert by_page_name == select(ROWS, "rms_norm", "*", "*")
    assert len(by_page_name) == 34


def test_patterns_combine_and_take_lists() -> None:
    rows = select(ROWS, ["*norm", "fft"], ["llama-8b-*", "fft-4k-c64-b64"], ["bf16", "c64"])
    assert {r.dtype for r in rows} == {"bf16", "c64"}
    assert {r.label for r in rows} == {"llama-8b-prefill", "llama-8b-decode", "fft-4k-c64-b64"}


@pytest.mark.parametrize(
    ("op", "workload", "dtype", "message"),
    [
        ("rms_nrm", "*", "*", "unknown op 'rms_nrm'; the nearest are rms_norm"),
        ("rms_norm", "lama-8b-decode", "*", "unknown workload .*llama-8b-decode"),
        ("rms_norm", "*", "fp16", "unknown dtype 'fp16'; the nearest are f16, bf16"),
    ],
    ids=["op", "workload", "dtype"],
)
def test_an_unknown_name_lists_the_nearest(
    op: str, workload: str, dtype: str, message: str
) -> None:
    with pytest.raises(CatalogueError, match=message) as error:
        select(ROWS, op, workload, dtype)
    assert "\n" not in str(error.value)


def test_one_bad_pattern_of_a_list_is_an_error() -> None:
    with pytest.raises(CatalogueError, match=r"torhc.*torch"):
        choose(["opkiln", "torhc"], ["opkiln", "torch", "quack"], "backend")


def test_suites_are_the_pages() -> None:
    assert len(in_suite(ROWS, page="norm")) == 112
    assert len(in_suite(ROWS, page="all")) == 200
    smoke = in_suite(ROWS, max_row_mbytes=4.0, rows_per_op=1)
    assert len({r.op for r in smoke}) == len(smoke)
    assert all(r.input_bytes <= 4e6 for r in smoke)
    train = in_suite(ROWS, args={"training": True})
    assert {r.name for r in train} == {"batch_norm", "batch_norm_backward"}
    assert all(r.args["training"] is True for r in train)
    assert len(train) == 15


def test_shards_split_the_rows_and_keep_ops_whole() -> None:
    parts = [in_shard(ROWS, f"{i}/4") for i in range(4)]
    assert sorted(r.key for p in parts for r in p) == sorted(r.key for r in ROWS)
    for op in {r.op for r in ROWS}:
        assert sum(any(r.op == op for r in p) for p in parts) == 1


@pytest.mark.parametrize("shard", ["4/4", "1", "a/b", "-1/2"])
def test_a_bad_shard_is_one_line(shard: str) -> None:
    with pytest.raises(CatalogueError, match="shard"):
        in_shard(ROWS, shard)


PLUGIN = """
op: RMSNormFwd
name: rms_norm
function: rms_norm
family: normalization
rows:
  - label: my-model
    dtypes: [bf16]
    tensors: {input: [4, 96], weight: [96, f32]}
    args: {normalized_shape: [96], eps: 1.0e-6}
"""


def test_rows_of_another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "rows_of_a_plugin"
    (package / "rows").mkdir(parents=True)
    (package / "__init__.py").touch()
    own = package / "rows" / "rms_norm.yaml"
    own.write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = load_rows(["opkiln_bench.conf", "rows_of_a_plugin"])
    (mine,) = [r for r in rows if r.label == "my-model"]
    assert mine.tensors["weight"].dtype == "f32"
    assert len(rows) == 244
    assert rows[-1] is mine  # its file has no order
    own.write_text(PLUGIN.replace("rows:", "order: 0\nrows:"))
    assert load_rows(["opkiln_bench.conf", "rows_of_a_plugin"])[0].label == "my-model"
    own.write_text(PLUGIN.replace("rows:", "order: first\nrows:"))
    with pytest.raises(CatalogueError, match=r"rms_norm.yaml: order must be an integer, got 'fi"):
        load_rows(["rows_of_a_plugin"])
    own.write_text(PLUGIN)
    with pytest.raises(CatalogueError, match=r"already a row of rows_of_a_plugin"):
        load_rows(["rows_of_a_plugin", "rows_of_a_plugin"])
    sys.modules.pop("rows_of_a_plugin")


def test_a_broken_row_file_is_one_line() -> None:
    with pytest.raises(CatalogueError, match=r"x\.yaml: a row file needs op"):
        parse_rows({"op": "A"}, "x.yaml")
    document = {
        "op": "A",
        "name": "a",
        "function": "a",
        "family": "f",
        "rows": [{"label": "l", "dtypes": ["f16"], "tensors": {"input": [4, "half"]}}],
    }
    with pytest.raises(CatalogueError, match=r"x\.yaml: l: cannot read the shape"):
        parse_rows(document, "x.yaml")
