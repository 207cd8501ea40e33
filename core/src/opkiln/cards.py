"""Capability cards: what a backend's implementation of an op was shown to do, and by which test.

    print(opkiln.card("rms_norm", backend="opkiln"))

A card is read from a summary of `opkiln conform`: one that the package of the backend ships, or a
file next to a run (opkiln.summary). Every cell names a conformance case of that summary; what no
case showed is "not tested".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from opkiln.errors import ArgumentError, nearest
from opkiln.meta import dtype_name
from opkiln.ops import CATALOGUE
from opkiln.spec import OpSpec
from opkiln.summary import Summary, provenance, read, shipped

NOT_TESTED = "not tested"

# cell: (feature in the summary, of which spec: `specs_of`). Batch invariance: over row counts.
CELLS = {
    "forward": ("forward", "own"),
    "saved_tensors": ("train", "saving"),
    "backward": ("backward", "backward"),
    "double_backward": ("double_backward", "differentiable"),
    "in_place": ("inplace", "inplace"),
    "compile": ("compile", "own"),
    "graph_capture": ("cuda_graph", "any"),
    "export": ("export", "own"),
    "autocast": ("autocast", "own"),
    "deterministic": ("deterministic", "any"),
    "batch_invariant": ("row_counts", "own"),
    "side_stream": ("side_stream", "any"),
    "second_device": ("second_device", "any"),
    "many_rows": ("many_rows", "any"),
    "above_32_bits": ("above_32_bits", "any"),
}
DTYPES = ("f16", "bf16", "f32", "f64", "c64", "c128")
LAYOUTS = (
    "contiguous", "padded", "strided", "shifted", "transposed", "batch_last", "channels_last",
    "expanded", "constant",
)  # fmt: skip
ONLY_GRADIENTS = ("constant",)  # layouts that only a gradient has


@dataclass(frozen=True)
class Cell:
    """status: "yes", "no" (refused), "failed" or "not tested"; case: of the op's, that shows it.

    passed, failed, refused: cases of this feature; reason: of the first that did not pass.
    """

    status: str = NOT_TESTED
    case: str = ""
    passed: int = 0
    failed: int = 0
    refused: int = 0
    reason: str = ""

    def __str__(self) -> str:
        if self.status == NOT_TESTED:
            return NOT_TESTED
        if self.status != "yes":
            return f"{self.status}: {self.reason}"
        count = self.passed + self.refused
        cases = f"{self.passed} of {count} cases" if count > 1 else ""
        return f"yes  {self.case}" + (f", {cases}" if cases else "")


@dataclass(frozen=True)
class Card:
    """One op by one backend. `str()` is a table; `as_dict()` the same as JSON.

    errors: dtype -> (largest error in units in the last place, its case), against float64.
    device: a GPU's name, or "cpu"; empty where there is no summary of this op and backend.
    """

    op: str
    page_op: str
    backend: str
    device: str = ""
    date: str = ""
    commit: str = ""
    cells: Mapping[str, Cell] = field(default_factory=dict)
    dtypes: Mapping[str, Cell] = field(default_factory=dict)
    layouts: Mapping[str, Cell] = field(default_factory=dict)
    errors: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        errors = {d: {"ulp": ulp, "case": case} for d, (ulp, case) in self.errors.items()}
        return asdict(self) | {"errors": errors}

    @property
    def source(self) -> str:
        if not self.device:
            return f"no summary of {self.op} by {self.backend}: run `opkiln conform`"
        return f"{self.device}, {self.date[:10]}, commit {self.commit[:12] or 'unknown'}"

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each cell's title and text."""
        for name, cell in self.cells.items():
            yield name.replace("_", " "), str(cell)
        for dtype, cell in self.dtypes.items():
            yield f"dtype {dtype}", str(cell)
        for layout, cell in self.layouts.items():
            yield f"layout {layout.replace('_', ' ')}", str(cell)
        for dtype in self.dtypes:
            if dtype not in ("f64", "c128"):  # as wide as what they are compared with
                yield f"largest error {dtype}", self.error(dtype)

    def error(self, dtype: str) -> str:
        found = self.errors.get(dtype)
        return NOT_TESTED if found is None else f"{found[0]:g} ulp  {found[1]}"

    def __str__(self) -> str:
        rows = list(self.lines())
        width = max(len(title) for title, _ in rows)
        head = f"{self.op} ({self.page_op}) by {self.backend}: {self.source}"
        return "\n".join([head, *[f"  {title:<{width}}  {text}" for title, text in rows]])


def card(op: str, backend: str = "opkiln", file: str | Path | None = None) -> Card:
    """The capability card of an op's implementation.

    file: a summary that `opkiln conform --json` wrote; None: what the installed packages hold, of a
    GPU before a CPU, the newest first. Without a summary every cell is "not tested". Raises
    ArgumentError for an unknown op, or a file that is no summary.
    """
    if op not in CATALOGUE:
        raise ArgumentError(f"opkiln.card: no op {op!r}{nearest(op, CATALOGUE)}")
    found = shipped() if file is None else read(Path(file))
    mine = [s for s in found if s["backend"] == backend and op in {o["op"] for o in s["ops"]}]
    return card_of(op, backend, max(mine, key=order, default=None))


def order(summary: Summary) -> tuple[bool, str]:
    environment = summary["environment"]
    return environment["gpu"] is not None, environment["date"]


def card_of(op: str, backend: str, summary: Summary | None) -> Card:
    """The card of an op by one summary."""
    spec = CATALOGUE[op]
    reports = {} if summary is None else {o["op"]: o for o in summary["ops"]}
    own, specs = reports.get(op, {}), specs_of(spec)
    cells = {
        name: cell_of(reports.get(specs[which], {}), feature)
        for name, (feature, which) in CELLS.items()
        if which in specs
    }
    absent = () if spec.forward_op else ONLY_GRADIENTS
    head = {} if summary is None else provenance(summary)
    return Card(
        op,
        spec.op,
        backend,
        **head,
        cells=cells,
        dtypes={d: cell_of(own, f"dtype {d}") for d in dtypes_of(spec)},
        layouts={x: cell_of(own, f"layout {x}") for x in LAYOUTS if x not in absent},
        errors={d: (float(ulp), str(case)) for d, (ulp, case) in own.get("errors", {}).items()},
    )


def specs_of(spec: OpSpec) -> dict[str, str]:
    """Which specs the cells of an op are about. A backward has no forward of its own."""
    if spec.forward_op is not None:
        kind = "inplace" if spec.name.endswith("_inplace") else "backward"
        return {kind: spec.name, "any": spec.name}
    found = {"own": spec.name, "any": spec.name, "inplace": f"{spec.name}_inplace"}
    if any(output.saved for output in spec.outputs):
        found["saving"] = spec.name
    if spec.backward is not None:
        found |= {"backward": spec.backward.spec.name, "differentiable": spec.name}
    return {which: name for which, name in found.items() if name in CATALOGUE}


def dtypes_of(spec: OpSpec) -> list[str]:
    """The dtypes that the spec allows, but for indices."""
    allowed = {short(d) for t in spec.tensors for d in t.dtypes}
    return [d for d in DTYPES if d in allowed]


def short(dtype: torch.dtype) -> str:
    """`f16` of float16, `c64` of complex64."""
    name = dtype_name(dtype)
    return name.replace("bfloat", "bf").replace("float", "f").replace("complex", "c")


def cell_of(report: Mapping[str, Any], feature: str) -> Cell:
    found = report.get("cells", {}).get(feature)
    if found is None:
        return Cell()
    status = "failed" if found.get("failed") else "yes" if found.get("passed") else "no"
    return Cell(status, **found)
