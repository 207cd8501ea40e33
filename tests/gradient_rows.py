"""The bench's rows of gradients, cut to what a CPU measures in a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln_bench import check
from opkiln_bench.catalogue import (
    Row,
    load_rows,
)
from opkiln_bench.contestants import Subject

CPU = torch.device("cpu")
OWN = load_rows(["opkiln_bench.conf"])
BACKWARD = load_rows(["opkiln_bench.conf"], "bwd")
GRADIENTS = [r for r in BACKWARD if r.forward]

# Axis -> size: a batch, channels, rows or heads that the op treats independently.
POOL = {0: 1, 1: 3}
FEWER: dict[str, dict[int, int]] = {
    "mean_pooling": {2: 2, 3: 8},
    "rope_neox_position_ids": {1: 2},
    **{n: {0: 8} for n in CATALOGUE if "layer_norm" in n or "rms_norm" in n},
    **{n: POOL for n in CATALOGUE if "max_pool" in n or "avg_pool" in n},
}


def small(row: Row, dtype: str | None = None) -> Row:
    """The row with the axes of FEWER cut, in another dtype where one is given."""
    fewer = FEWER.get(row.name.removesuffix("_backward"), {})
    tensors = {
        n: replace(
            t,
            shape=tuple(fewer.get(i, s) for i, s in enumerate(t.shape))
            if len(t.shape) > 1
            else t.shape,
            dtype=dtype if dtype and t.dtype == row.dtype else t.dtype,
        )
        for n, t in row.tensors.items()
    }
    return replace(row, tensors=tensors, dtype=dtype or row.dtype)


SMALLEST = {
    name: min((small(r) for r in GRADIENTS if r.name == name), key=lambda r: r.input_bytes)
    for name in dict.fromkeys(r.name for r in GRADIENTS)
}


def is_right(subject: Subject, out: Any) -> bool:
    outputs = list(out) if isinstance(out, tuple) else [out]
    found = check.against_reference(subject, {"peer": outputs})["peer"]
    assert found.ok, found.reason
    return True


def in_float32(name: str) -> Row:
    """A small row in the dtype in which torch sums in float32 on a CPU too."""
    row = SMALLEST[name]
    return row if row.dtype.startswith("c") else small(row, "f32")
