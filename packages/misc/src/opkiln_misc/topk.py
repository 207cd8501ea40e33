"""How topk_selector is launched: csrc/topk.cu, CTAs that take row after row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_misc.sources import source

TYPES = {torch.int32: "int", torch.int64: "long long"}
MAX_TOPK = 8192
LEAST_CAPACITY = 4096  # twice topk is enough: a guess from a sample of 4096 is rarely off by more
BINS = 2048
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """See csrc/topk.cu. blocks: CTAs a multiprocessor; ring: rounds of loads ahead."""

    threads: int
    blocks: int
    unroll: int
    ring: int


@dataclass(frozen=True, slots=True)
class Plan:
    """macros: what is compiled in. sizes: the kernel's arguments after its tensors."""

    tiling: Tiling
    macros: dict[str, Any]
    rows: int
    sizes: tuple[int, ...]
    shared_bytes: int


def rule(capacity: int) -> Tiling:
    """Two CTAs, so that one streams while the other selects; one where only one fits."""
    if capacity == LEAST_CAPACITY:
        return Tiling(threads=512, blocks=2, unroll=4, ring=2)
    return Tiling(threads=1024, blocks=1, unroll=1, ring=5)


def shared_bytes(capacity: int, t: Tiling, vector: int) -> int:
    """The collection (scores, positions, bins, sums, 36 bytes more) and the ring."""
    warps = t.threads // 32
    collection = -(-(8 * capacity + 4 * BINS + 4 * warps + 36) // 16) * 16
    if vector == 1:
        return collection
    return collection + t.ring * VECTOR_BYTES * t.unroll * t.threads


def capacity_of(topk: int) -> int:
    return max(LEAST_CAPACITY, 1 << (2 * topk - 1).bit_length())


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan:
    """ValueError says what the kernel cannot serve."""
    scores, starts, ends = call.tensors.scores, call.tensors.starts, call.tensors.ends
    topk = call.params.topk
    if topk > MAX_TOPK:
        raise ValueError(f"serves topk up to {MAX_TOPK}, got {topk}")
    batch, length, kv, groups = scores.shape
    capacity = capacity_of(topk)
    t = tiling or rule(capacity)
    rows = batch * length * groups
    if rows >= 2**31:
        raise ValueError(f"serves up to {2**31 - 1} rows, got {rows}")
    # A dim of one index steps nowhere: its stride does not matter.
    outer = [scores.stride[d] for d in (0, 1, 3) if scores.shape[d] > 1]
    dense = scores.stride[2] == 1 or kv == 1
    aligned = scores.aligned and all(s % 4 == 0 for s in outer)
    vector = 4 if dense and aligned else 1
    macros = {
        "CAPACITY": capacity,
        "THREADS": t.threads,
        "BLOCKS": t.blocks,
        "VECTOR": vector,
        "UNROLL": t.unroll,
        "RING": t.ring,
        # The set is always the same; its order is what comes, but for these policies.
        "SORTED": int(call.policy.deterministic or call.policy.batch_invariant),
        "START": TYPES[starts.dtype],
        "END": TYPES[ends.dtype],
    }
    sizes = (rows, length, groups, kv, *scores.stride, *starts.stride, *ends.stride, topk)
    return Plan(t, macros, rows, sizes, shared_bytes(capacity, t, vector))


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., torch.Tensor]:
    """Compile and plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    t, device = plan.tiling, call.device
    kernel = cuda.load(source("topk"), "topk_selector", device, plan.macros)
    ctas = min(plan.rows, t.blocks * cuda.multiprocessors(device))
    run = kernel.configure((ctas, 1, 1), (t.threads, 1, 1), plan.shared_bytes)
    (meta,) = call.outputs

    def launch(scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = meta.empty()
        run(scores, starts, ends, out, *plan.sizes)
        return out

    return launch
