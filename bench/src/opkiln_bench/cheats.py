"""What no sound implementation does: keep a result for later calls, or beat the roofline.

The third cheat, work on a stream that is not timed, is caught where device time is attributed
(timing/intervals.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from opkiln.conformance.tensors import storage_of

from opkiln_bench.catalogue import Row
from opkiln_bench.contestants import Contestant, Subject
from opkiln_bench.limits import Limits

SAMPLE = 4096  # elements of an output that are kept to compare with
ALLOWANCE = 0.02  # of the calibrated limits
# Winograd's F(4x4, 3x3) needs a quarter of the multiplications that `flops` counts.
FEWER_OPERATIONS = {"convolution": 4.0}
READS_BY_DATA = ("topk_selector",)  # reads from starts to ends, which the cost does not know


def too_fast(row: Row, cost: Mapping[str, int], time_us: float, limits: Limits) -> str | None:
    """Why a device time cannot be true; None where it can."""
    if row.name in READS_BY_DATA and not reads_all(row):
        return None
    nbytes = cost["bytes_read"] + cost["bytes_written"]
    arithmetic_us = limits.arithmetic_us(cost["flops"], row.peak, row.dtype)
    least_us = max(limits.memory_us(nbytes), arithmetic_us / FEWER_OPERATIONS.get(row.family, 1.0))
    if time_us >= least_us * (1 - ALLOWANCE):
        return None
    return (
        f"faster than the roofline: {time_us:.4g} us for {nbytes} bytes and {cost['flops']} "
        f"operations, which take this device {least_us:.4g} us"
    )


def reads_all(row: Row) -> bool:
    """Whether every position lies between the starts and the ends."""
    kv = row.tensors["scores"].shape[2]
    return row.tensors["starts"].fill == 0 and row.tensors["ends"].fill == kv


def sample(outputs: Any) -> torch.Tensor | None:
    """Some elements of the first output that has any, in memory of their own."""
    outs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    out = next((t for t in outs if t.numel()), None)
    if out is None:
        return None
    count = max(int(SAMPLE ** (1 / max(out.ndim, 1))), 1)
    return out[tuple(slice(None, None, math.ceil(size / count)) for size in out.shape)].clone()


def change_input(subject: Subject) -> None:
    """Other values at the addresses of the first tensor. No op of the catalogue is even in it."""
    first = next(t for t in subject.tensors if t is not None and not_an_index(t))
    storage_of(first).neg_()  # all of it: an expanded tensor has elements in one place


def not_an_index(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def kept_result(
    subject: Subject, contestant: Contestant, before: torch.Tensor | None
) -> str | None:
    """Whether a call returns what it returned `before` the input changed."""
    if before is None or not before.any():
        return None
    after = sample(contestant.launch(*subject.tensors))
    if after is None or not torch.equal(after, before):
        return None
    return "returned the result of an earlier call after its input had changed in place"
