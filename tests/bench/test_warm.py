"""Who compiles what ahead of a sweep."""

from __future__ import annotations

from opkiln_bench.catalogue import load_rows
from opkiln_bench.warm import LARGE_BYTES, shares

ROWS = load_rows(["opkiln_bench.conf"])


def test_every_row_goes_to_one_process() -> None:
    parts = shares(ROWS, 8)
    assert len(parts) == 8
    assert sorted(r.key for p in parts for r in p) == sorted(r.key for r in ROWS)


def test_large_rows_share_one_process() -> None:
    holders = {i for i, p in enumerate(shares(ROWS, 8)) for r in p if r.input_bytes > LARGE_BYTES}
    assert holders == {0}


def test_few_rows_take_few_processes() -> None:
    small = [r for r in ROWS if r.name == "fft"]
    assert [len(p) for p in shares(small, 8)] == [1, 1, 1]
