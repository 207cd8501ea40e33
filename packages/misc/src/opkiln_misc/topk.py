"""How topk_selector is launched: csrc/topk.cu, CTAs that take row after row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_misc.sources import source

TYPES = {torch.int32: "int", torch.int64: "long long"}
MAX_TOPK = 8192
LEAST_CAPACITY = (
    4096  # twice topk is enough from a sample of 4096; a chunk more, for the exact path
)


@dataclass(frozen=True, slots=True)
class Tiling:
    """See csrc/topk.cu. blocks: CTAs a multiprocessor."""

    threads: int
    blocks: int
    unroll: int


@dataclass(frozen=True, slots=True)
class Plan:
    """macros: what is compiled in. sizes: the kernel's arguments after its tensors."""

    tiling: Tiling
    macros: dict[str, Any]
    rows: int
    sizes: tuple[int, ...]
    shared_bytes: int


def rule(capacity: int) -> Tiling:
    """As many CTAs as registers and 227 KiB of shared memory allow."""
    if capacity == LEAST_CAPACITY:
        return Tiling(threads=512, blocks=3, unroll=4)
    return Tiling(threads=1024, blocks=1, unroll=4)


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
    outer = (scores.stride[0], scores.stride[1], scores.stride[3])
    dense = scores.stride[2] == 1 or kv == 1
    aligned = scores.aligned and all(s % 4 == 0 for s in outer)
    macros = {
        "CAPACITY": capacity,
        "THREADS": t.threads,
        "BLOCKS": t.blocks,
        "VECTOR": 4 if dense and aligned else 1,
        "UNROLL": t.unroll,
        # The set is always the same; its order is what comes, but for these policies.
        "SORTED": int(call.policy.deterministic or call.policy.batch_invariant),
        "START": TYPES[starts.dtype],
        "END": TYPES[ends.dtype],
    }
    rows = batch * length * groups
    sizes = (rows, length, groups, kv, *scores.stride, *starts.stride, *ends.stride, topk)
    shared_bytes = 8 * capacity + 4 * (2 * t.threads // 32 + 2)
    return Plan(t, macros, rows, sizes, shared_bytes)


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
