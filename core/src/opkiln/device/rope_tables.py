"""Tables of rotary embeddings, built once and shared by all calls: cosines and sines, frequencies.

One group of tables per (rule, length rounded up to a power of two, device). All together they take
at most MAX_BYTES; beyond that the ones that were unused for longest go.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

MAX_BYTES = 512 << 20  # 4 pairs for 131,072 positions of 128 rotated channels are 268 MB
Group = tuple[torch.Tensor, ...]


@dataclass
class Tables:
    """The tensors, and on a GPU where and when they were written.

    kept: a CUDA graph reads them, so they must outlive it and are never dropped.
    """

    tensors: Group
    stream: int = 0
    written: Any = None
    kept: bool = False

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


_tables: OrderedDict[Hashable, Tables] = OrderedDict()
_lock = threading.Lock()


def rope_tables(
    rule: Hashable, length: int, device: torch.device, build: Callable[[int], Group]
) -> Group:
    """Tables of at least `length` positions; `build(rows)` computes them, deterministically.

    A table that is missing while a CUDA graph is captured is computed inside the graph and
    forgotten: its memory belongs to the graph.
    """
    rows = 1 << max(length - 1, 0).bit_length()
    key = (rule, rows, device)
    cuda = device.type == "cuda"
    capturing = cuda and torch._C._cuda_isCurrentStreamCapturing()
    with _lock:
        found = _tables.get(key)
        if found is None:
            if capturing:
                return build(rows)
            found = _tables[key] = _build(rows, device, build)
            _drop_oldest()
        _tables.move_to_end(key)
        found.kept = found.kept or capturing
    if cuda and not capturing:  # before a capture torch synchronizes the device
        index = torch._C._cuda_getDevice() if device.index is None else device.index
        if torch._C._cuda_getCurrentRawStream(index) != found.stream:
            _wait(found, torch.cuda.current_stream(device))
    return found.tensors


def _build(rows: int, device: torch.device, build: Callable[[int], Group]) -> Tables:
    """Ordinary tensors, whatever mode the first caller happens to be in."""
    with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
        tensors = build(rows)
    if device.type != "cuda":
        return Tables(tensors)
    stream = torch.cuda.current_stream(device)
    return Tables(tensors, stream.cuda_stream, stream.record_event())


def _wait(tables: Tables, stream: Any) -> None:
    stream.wait_event(tables.written)
    for tensor in tables.tensors:
        tensor.record_stream(stream)


def _drop_oldest() -> None:
    total = sum(t.nbytes for t in _tables.values())
    for key in list(_tables)[:-1]:
        if total <= MAX_BYTES:
            return
        if not _tables[key].kept:
            total -= _tables.pop(key).nbytes
