"""The rows: which call of which op, with which shapes. Read from `conf/rows/*.yaml`.

A shape may end in a dtype (`[128, f32]`); without one the tensor has the row's dtype. A file of
`gradients` lists rows of backward ops by the rows of their forwards.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from opkiln_bench.row import ITEMSIZE, TORCH_NAMES, CatalogueError, Row, TensorRow
from opkiln_bench.searchpath import workload_packages

__all__ = [
    "ITEMSIZE",
    "MODES",
    "TORCH_NAMES",
    "CatalogueError",
    "Row",
    "TensorRow",
    "as_patterns",
    "choose",
    "in_mode",
    "in_shard",
    "in_suite",
    "load_rows",
    "parse_gradients",
    "parse_rows",
    "select",
]

MODES = ("fwd", "bwd", "all")


def _tensor(values: Sequence[Any], row_dtype: str, fill: Any, where: str) -> TensorRow:
    *sizes, last = values
    dtype = row_dtype
    if isinstance(last, str):
        dtype = last
    else:
        sizes.append(last)
    if dtype not in ITEMSIZE or not all(type(size) is int and size >= 0 for size in sizes):
        raise CatalogueError(f"{where}: cannot read the shape {list(values)}")
    return TensorRow(tuple(sizes), dtype, fill)


def parse_rows(document: dict[str, Any], where: str) -> list[Row]:
    """The rows of one file."""
    try:
        shared = {k: document[k] for k in ("op", "name", "function", "family")}
        entries = document["rows"]
    except (KeyError, TypeError) as exc:
        raise CatalogueError(f"{where}: a row file needs op, name, function, family, rows") from exc
    rows = []
    for number, entry in enumerate(entries or [], 1):
        try:
            rows += list(_rows_of(entry, shared, document, where))
        except CatalogueError:
            raise
        except KeyError as exc:
            raise CatalogueError(f"{where}: row {number} has no {exc.args[0]}") from exc
        except (TypeError, AttributeError, ValueError) as exc:
            raise CatalogueError(f"{where}: row {number} cannot be read: {exc}") from exc
    return rows


def _rows_of(
    entry: dict[str, Any], shared: dict[str, str], document: dict[str, Any], where: str
) -> Iterator[Row]:
    """One entry of a row file: a row for each of its dtypes."""
    label = entry["label"]
    fill = entry.get("fill", {})
    for name in fill:
        if name not in entry["tensors"]:
            raise CatalogueError(f"{where}: {label}: fill names {name}, which is no tensor of it")
    for dtype in entry["dtypes"]:
        tensors = {
            n: _tensor(v, dtype, fill.get(n, "normal"), f"{where}: {label}")
            for n, v in entry["tensors"].items()
        }
        pages = {}
        if dtype in entry.get("page_all", entry["dtypes"]):
            pages["all"] = label
        if shared["family"] == "normalization":
            pages["norm"] = entry.get("label_page_norm", label)
        yield Row(
            **shared,
            label=label,
            dtype=dtype,
            tensors=tensors,
            args=entry.get("args", {}),
            pages=pages,
            peak=entry.get("peak", document.get("peak", "vector")),
            condition=entry.get("condition", document.get("condition", 1.0)),
            model=entry.get("model"),
            note=entry.get("note", document.get("note")),
            where=where,
        )


def _document(text: str, where: str) -> dict[str, Any]:
    """A row file's YAML. CatalogueError, one line, where it is none."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise CatalogueError(f"{where}: {' '.join(str(exc).split())}") from exc


def _order(document: Any, where: str) -> float:
    """A file's place among the files; one without comes last."""
    order = document.get("order", math.inf) if isinstance(document, dict) else math.inf
    if type(order) is not int and order is not math.inf:
        raise CatalogueError(f"{where}: order must be an integer, got {order!r}")
    return float(order)


def parse_gradients(document: dict[str, Any], forwards: Sequence[Row], where: str) -> list[Row]:
    """The rows of a file of gradients, made from `forwards`."""
    known = {row.key: row for row in forwards}
    rows = []
    for number, entry in enumerate(document["gradients"] or [], 1):
        try:
            op, of, args = entry["op"], entry["of"], dict(entry.get("args", {}))
            keys = [(of, label, d) for label, dtypes in entry["rows"].items() for d in dtypes]
        except KeyError as exc:
            raise CatalogueError(f"{where}: gradient {number} has no {exc.args[0]}") from exc
        except (TypeError, AttributeError, ValueError) as exc:
            raise CatalogueError(f"{where}: gradient {number} cannot be read: {exc}") from exc
        for key in keys:
            if key not in known:
                raise CatalogueError(f"{where}: {op}: there is no row {' '.join(map(str, key))}")
            row = known[key]
            name = f"{row.name}_backward"
            changes: dict[str, Any] = {"op": op, "name": name, "args": row.args | args}
            rows.append(replace(row, **changes, pages={}, where=where, forward=of))
    return rows


def in_mode(row: Row, mode: str) -> bool:
    """fwd: the rows of the pages, which have batch norm's backward too; bwd: every backward."""
    return {
        "fwd": row.forward is None,
        "bwd": row.name.endswith("_backward"),
        "all": True,
    }[mode]


def load_rows(packages: Iterable[str] | None = None, mode: str = "fwd") -> list[Row]:
    """The rows of this package and of the plugins; two rows of one key are an error.

    Files come by their `order`, which is the pages' order of ops; those without one come after, and
    gradients last. mode: see `in_mode`.
    """
    if packages is None:
        packages = ["opkiln_bench.conf", *workload_packages().values()]
    documents = []
    for package in packages:
        folder = files(package) / "rows"
        for path in sorted((p for p in folder.iterdir()), key=lambda p: p.name):
            if path.name.endswith(".yaml"):
                where = f"{package}/rows/{path.name}"
                document = _document(path.read_text(encoding="utf-8"), where)
                documents.append((_order(document, where), where, document))
    found: dict[tuple[str, str, str], tuple[Row, str]] = {}
    documents.sort(key=lambda d: (_is_gradients(d[2]), d[0]))
    for _, where, document in documents:
        if not _is_gradients(document):
            rows = parse_rows(document, where)
        elif mode == "fwd":
            continue
        else:
            rows = parse_gradients(document, [row for row, _ in found.values()], where)
        for row in rows:
            if row.key in found:
                other = found[row.key][1]
                raise CatalogueError(f"{where}: {row} is already a row of {other}")
            found[row.key] = row, where
    return [row for row, _ in found.values() if in_mode(row, mode)]


def _is_gradients(document: Any) -> bool:
    return isinstance(document, dict) and "gradients" in document


def as_patterns(value: Any) -> list[str]:
    """A pattern, or a list of them, as a list."""
    return [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]


def choose(patterns: Sequence[str], names: Iterable[str], what: str) -> set[str]:
    """The names that match a pattern. A pattern that matches none lists the nearest names."""
    known = sorted(set(names))
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {name for name in known if fnmatchcase(name, pattern)}
        if not hits:
            near = difflib.get_close_matches(pattern, known, n=4, cutoff=0.3) or known[:4]
            raise CatalogueError(f"unknown {what} {pattern!r}; the nearest are {', '.join(near)}")
        chosen |= hits
    return chosen


def select(rows: Sequence[Row], op: Any, workload: Any, dtype: Any) -> list[Row]:
    """Rows whose op (either name), label and dtype match. An empty selection is an error."""
    ops = choose(as_patterns(op), [n for r in rows for n in (r.op, r.name)], "op")
    rows = [r for r in rows if r.op in ops or r.name in ops]
    labels = choose(as_patterns(workload), [r.label for r in rows], "workload")
    rows = [r for r in rows if r.label in labels]
    dtypes = choose(as_patterns(dtype), [r.dtype for r in rows], "dtype")
    return [r for r in rows if r.dtype in dtypes]


def in_suite(
    rows: Sequence[Row],
    page: str | None = None,
    max_row_mbytes: float | None = None,
    rows_per_op: int | None = None,
    args: Mapping[str, Any] = MappingProxyType({}),
) -> list[Row]:
    """The rows of a suite, in catalogue order. args: values that a row's call must pass."""
    chosen = [
        r
        for r in rows
        if (page is None or page in r.pages)
        and args.items() <= {k: v for k, v in r.args.items() if k in args}.items()
        and (max_row_mbytes is None or r.input_bytes <= max_row_mbytes * 1e6)
    ]
    if rows_per_op is None:
        return chosen
    kept = set()
    for op in {r.op for r in chosen}:
        by_size = sorted((r for r in chosen if r.op == op), key=lambda r: r.input_bytes)
        kept |= {r.key for r in by_size[:rows_per_op]}
    return [r for r in chosen if r.key in kept]


def in_shard(rows: Sequence[Row], shard: str) -> list[Row]:
    """Part i of n (`i/n`). Ops stay whole; the largest go first to the lightest part."""
    try:
        index, count = (int(x) for x in shard.split("/"))
    except ValueError as exc:
        raise CatalogueError(f"shard must be i/n, got {shard!r}") from exc
    if not 0 <= index < count:
        raise CatalogueError(f"shard i/n needs 0 <= i < n, got {shard!r}")
    weights: dict[str, int] = {}
    for row in rows:
        weights[row.op] = weights.get(row.op, 0) + row.input_bytes + 10_000_000
    loads = [0] * count
    home = {}
    for op in sorted(weights, key=lambda o: (-weights[o], o)):
        lightest = loads.index(min(loads))
        home[op] = lightest
        loads[lightest] += weights[op]
    return [r for r in rows if home[r.op] == index]
