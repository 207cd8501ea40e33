"""`opkiln.capture`: the op calls of a real step, in a file that `opkiln tune` reads."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opkiln.meta import dtype_name
from opkiln.spec import Call
from opkiln.watch import observed

SCHEMA = 1
MAX_VALUES = 65_536  # of an integer tensor (lengths, positions): the time depends on them
LENGTH_BYTES = 4  # int32 and int64 hold lengths and positions; what is smaller a max pool saved
SHORT = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
    "complex128": "c128",
    "uint8": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}

Row = dict[str, Any]


@contextlib.contextmanager
def capture(path: str | os.PathLike[str]) -> Iterator[Step]:
    """Write the op calls made inside the block to `path`, as JSON, when it ends without an error.

    with opkiln.capture("step.json"):
        loss = model(x).sum()
        loss.backward()

    Shapes, strides, dtypes, parameters and how often; backwards too, and calls from compiled code.
    Values of integer tensors are read at their first call, which synchronizes. Not seen: replays of
    a CUDA graph, calls under torch.func and forward-mode AD. Raises OSError if it cannot write.
    """
    step = Step()
    with observed(step.add):
        yield step
    text = json.dumps(step.to_json(), indent=1) + "\n"
    part = Path(f"{os.fspath(path)}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@dataclass
class Step:
    """Distinct calls in the order in which they first came, as rows of the bench."""

    rows: dict[str, tuple[Call, Row]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, call: Call, tensors: Sequence[torch.Tensor | None]) -> None:
        key = key_of(call)
        with self.lock:
            known = self.rows.get(key)
            if known is None:
                known = self.rows[key] = call, row_of(call, tensors)
            known[1]["count"] += 1

    def to_json(self) -> dict[str, Any]:
        """Files of rows, one an op, as in the bench's conf/rows; labels made distinct."""
        files: dict[str, dict[str, Any]] = {}
        labels: set[tuple[str, str]] = set()
        for call, row in self.rows.values():
            spec = call.spec
            document = files.setdefault(
                spec.name, {"op": spec.op, "name": spec.name, "family": spec.family, "rows": []}
            )
            label, number = row["label"], 1
            while (spec.name, row["label"]) in labels:
                number += 1
                row["label"] = f"{label}-{number}"
            labels.add((spec.name, row["label"]))
            document["rows"].append(row)
        return {"schema": SCHEMA, "files": list(files.values())}


def key_of(call: Call) -> str:
    """What tells calls apart: all that a plan depends on but the alignment of memory."""
    metas = [(n, m and (m.shape, m.stride, m.dtype)) for n, m in vars(call.tensors).items()]
    return repr((call.spec.name, metas, vars(call.params), call.needs_grad, call.policy))


def row_of(call: Call, tensors: Sequence[torch.Tensor | None]) -> Row:
    """One row: `params` are the spec's own, where the bench's files have a function's `args`."""
    metas = {name: m for name, m in vars(call.tensors).items() if m is not None}
    given = dict(zip(call.spec.tensor_names, tensors, strict=True))
    first = next(iter(metas.values()))
    fill = {
        name: values(given[name])
        for name, m in metas.items()
        if not (m.dtype.is_floating_point or m.dtype.is_complex)
    }
    return {
        "label": "x".join(map(str, first.shape)) or "scalar",
        "dtypes": [SHORT[dtype_name(first.dtype)]],
        "tensors": {n: [*m.shape, SHORT[dtype_name(m.dtype)]] for n, m in metas.items()},
        "strides": {n: list(m.stride) for n, m in metas.items() if not m.is_contiguous},
        "fill": fill,
        "params": dict(vars(call.params)),
        "train": call.needs_grad,
        "count": 0,
    }


def values(t: torch.Tensor | None) -> Any:
    """An integer tensor's values; what bounds them if it is long, or holds places in a window."""
    assert t is not None
    if t.numel() == 0 or (t.is_cuda and torch.cuda.is_current_stream_capturing()):
        return 0
    if t.numel() > MAX_VALUES or t.dtype.itemsize < LENGTH_BYTES:
        return {"low": int(t.min()), "high": int(t.max())}
    return t.flatten().tolist()
