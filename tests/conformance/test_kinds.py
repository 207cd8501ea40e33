"""Every op has a row of every kind of input, or a reason why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from opkiln.conformance.cases import Row, allowed
from opkiln.conformance.rows import TABLES
from opkiln.conformance.tensors import T
from opkiln.ops import CATALOGUE


def tensors(row: Row) -> list[T]:
    return [value for value in row.arguments.values() if isinstance(value, T)]


def filled(*fills: str) -> Callable[[Row], bool]:
    return lambda row: any(t.fill in fills for t in tensors(row))


def laid(layout: str) -> Callable[[Row], bool]:
    return lambda row: any(t.layout == layout for t in tensors(row))


KINDS: dict[str, Callable[[Row], bool]] = {
    "nan": filled("nan", "one nan"),
    "inf": filled("inf", "one inf"),
    "large": filled("large"),
    "empty": lambda row: any(0 in t.shape for t in tensors(row)),
    "no power of two": lambda row: any(
        t.shape and t.shape[-1].bit_count() > 1 for t in tensors(row)
    ),
    **{name: laid(name) for name in ("transposed", "strided", "padded", "shifted", "expanded")},
    "channels_last": laid("channels_last"),
}
INF_MINUS_INF = "what inf - inf and inf * 0 meet depends on the order of the sums"
NO_PLANE = "has no [N, C, H, W] input"
PLANES = {"conv2d", "conv3d", "avg_pool2d", "avg_pool3d", "batch_norm", "group_norm"}
PLANES |= {op for op in TABLES if op.startswith(("max_pool2d", "max_pool3d", "adaptive"))}
PLANES |= {"instance_norm"}
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("inf", "fft"): INF_MINUS_INF,
    **{("channels_last", op): NO_PLANE for op in TABLES if op not in PLANES},
}


@pytest.mark.parametrize("op", TABLES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_op_has_a_row_of_every_kind(kind: str, op: str) -> None:
    found = [row.label for row in TABLES[op][1] if KINDS[kind](row)]
    assert bool(found) != ((kind, op) in EXCEPTIONS), found


@pytest.mark.parametrize("op", TABLES)
def test_every_op_has_a_row_of_every_dtype(op: str) -> None:
    rows = TABLES[op][1]
    tested = {dtype for row in rows for dtype in row.dtypes or allowed(CATALOGUE[op], row)}
    lead = {d for row in rows for d in allowed(CATALOGUE[op], row)}
    assert lead and lead <= tested
    assert torch.float64 in tested or torch.complex128 in tested


def test_exceptions_name_what_exists() -> None:
    assert {kind for kind, _ in EXCEPTIONS} <= set(KINDS)
    assert {op for _, op in EXCEPTIONS} <= set(TABLES)
