"""Cards of several ops as the rows of one table: `opkiln list --backend` and the site's pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from opkiln.cards import NOT_TESTED, Card, Cell, card
from opkiln.errors import ArgumentError, nearest
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY

NONE = "-"  # the op has no such form
COLUMNS = {
    "forward": "forward",
    "backward": "backward",
    "double_backward": "double backward",
    "compile": "compile",
    "graph_capture": "graph capture",
    "export": "export",
    "autocast": "autocast",
    "deterministic": "deterministic",
    "batch_invariant": "batch-invariant",
}
HEAD = ("op", *COLUMNS.values(), "dtypes", "layouts", "largest error in ulp")


def cards_of(ops: Sequence[str], backend: str, summary: str | None = None) -> list[Card]:
    """Of the ops that the summary, or else the backend, has; of several the forward ones alone.

    ArgumentError for an unknown backend where no summary is given, or where no card is left.
    """
    if summary is None and backend not in REGISTRY.backends():
        raise ArgumentError(f"no backend {backend!r}{nearest(backend, REGISTRY.backends())}")
    file = None if summary is None else Path(summary)
    chosen = [op for op in ops if len(ops) == 1 or CATALOGUE[op].forward_op is None]
    found = [card(op, backend, file) for op in chosen if file or backend in REGISTRY.of(op)]
    found = [c for c in found if c.device or file is None]
    if not found:
        raise ArgumentError(f"no card: nothing is known of {', '.join(ops)} by {backend}")
    return found


def row(found: Card) -> list[str]:
    """Under HEAD: of each cell its word, the dtypes and layouts that were served, the errors."""
    marks = [c.status if (c := found.cells.get(name)) else NONE for name in COLUMNS]
    errors = [f"{dtype} {ulp:.1f}" for dtype, (ulp, _) in found.errors.items()]
    lists = (served(found.dtypes), served(found.layouts), errors)
    return [found.op, *marks, *[", ".join(names) or NOT_TESTED for names in lists]]


def served(cells: Mapping[str, Cell]) -> list[str]:
    """The names under which a case passed and none failed."""
    return [name for name, cell in cells.items() if cell.status == "yes"]
