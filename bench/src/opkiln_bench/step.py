"""The calls that `opkiln.capture` recorded, as rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opkiln.ops import CATALOGUE
from opkiln.step import SCHEMA

from opkiln_bench.catalogue import load_rows
from opkiln_bench.inputs import check_fill
from opkiln_bench.records import RecordError
from opkiln_bench.row import ITEMSIZE, CatalogueError, Row, TensorRow

# Headings of the pages; an op that has rows there has theirs.
FAMILIES = {
    "norm": "normalization",
    "conv": "convolution",
    "pool": "pooling",
    "rope": "positional-encoding",
}
POSITIVE = ("rstd", "running_var")  # of random values their formulas take a root, or are one


def read_step(path: Path) -> list[Row]:
    """The rows of a captured step. RecordError, one line, where it cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise RecordError(f"{path} has schema {document['schema']}, this reads {SCHEMA}")
        return [row for file in document["files"] for row in rows_of(file, str(path))]
    except RecordError:
        raise
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise RecordError(f"{path} is no captured step: {told}") from error


def rows_of(file: dict[str, Any], where: str) -> Iterator[Row]:
    """The rows of one op; how its rows on the pages are bound and checked holds for them too."""
    spec = CATALOGUE.get(file["name"])
    if spec is None or spec.op != file["op"]:
        raise RecordError(f"{where}: this opkiln has no op {file['name']} ({file['op']})")
    known = [row for row in load_rows(mode="all") if row.name in (spec.name, spec.forward_op)]
    for entry in file["rows"]:
        (dtype,) = entry["dtypes"]
        yield Row(
            op=spec.op,
            name=spec.name,
            function="",
            family=known[0].family if known else FAMILIES.get(spec.family, spec.family),
            label=str(entry["label"]),
            dtype=dtype,
            tensors={name: tensor_of(name, entry) for name in entry["tensors"]},
            args={},
            pages={},
            peak=known[0].peak if known else "vector",
            condition=max((row.condition for row in known), default=1.0),
            where=where,
            params=dict(entry["params"]),
            train=bool(entry["train"]),
            count=int(entry["count"]),
        )


def tensor_of(name: str, entry: dict[str, Any]) -> TensorRow:
    *shape, dtype = entry["tensors"][name]
    fill = entry["fill"].get(name, "positive" if name in POSITIVE else "normal")
    check_fill(fill)
    if dtype not in ITEMSIZE or not all(type(size) is int and size >= 0 for size in shape):
        raise CatalogueError(f"cannot read the shape of {name}")
    stride = entry["strides"].get(name)
    return TensorRow(tuple(shape), dtype, fill, None if stride is None else tuple(stride))
