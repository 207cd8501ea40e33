"""A row: one call of one op, as the catalogue and captured steps state it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# u8 and i16: of what max pools save, where their maxima lie
ITEMSIZE = {"u8": 1, "i16": 2, "i32": 4, "i64": 8}
ITEMSIZE |= {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
TORCH_NAMES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "u8": "uint8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
}


class CatalogueError(ValueError):
    """A row file or a pattern is wrong; one line."""


@dataclass(frozen=True)
class TensorRow:
    """Shape, dtype (short name), fill: how it is filled (see inputs.py), a number or a list.

    stride: None: contiguous.
    """

    shape: tuple[int, ...]
    dtype: str
    fill: Any = "normal"
    stride: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Row:
    """One workload of one op in one dtype.

    op, name: the op on the pages (RMSNormFwd) and in Python (rms_norm). function: the name in
    opkiln.functional. pages: label on each page that shows the row. peak: which unit bounds it.
    condition: how much the formula amplifies rounding errors (see opkiln.conformance.compare).
    forward: the op whose gradient the row takes; function, tensors and args are then that op's.
    params: of a captured call: the spec's own parameters, in place of function and args; train:
    it saves tensors for its backward; count: how often the step makes it.
    """

    op: str
    name: str
    function: str
    family: str
    label: str
    dtype: str
    tensors: dict[str, TensorRow]
    args: dict[str, Any]
    pages: dict[str, str]
    peak: str = "vector"
    condition: float = 1.0
    model: str | None = None
    note: str | None = None
    where: str = ""  # the file
    forward: str | None = None
    params: dict[str, Any] | None = None
    train: bool = False
    count: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.label, self.dtype

    @property
    def input_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def __str__(self) -> str:
        return f"{self.op} {self.label} {self.dtype}"
