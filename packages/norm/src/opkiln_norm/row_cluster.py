"""Row norms in CUDA C++ (csrc/row_*.cu): a row over a cluster of CTAs, or in one CTA.

Serves rms_norm, layer_norm and both with a residual where `cluster_rows` of tuning/sm90.json names
the op, element size, N and number of rows, or else `rule` does, and where every vector of 16 bytes
is aligned, or else rows follow each other without a gap; the Triton kernel of row_norm serves the
rest, and all of them without cuda-core.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module, resources
from typing import Any

import torch
from opkiln import tilings
from opkiln.device import cuda

from opkiln_norm import row_layout, row_plan

KERNEL = "row_cluster"  # what a tiling of the user's is for
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
MAX_CLUSTER = 16  # of an H200
EXTRA = "opkiln-norm[cu13]"
OPS = ("rms_norm", "layer_norm", "fused_add_rms_norm", "fused_add_layer_norm")


@dataclass(frozen=True, slots=True)
class ClusterTiling:
    """What the tuning table sets: see the macros of csrc/row.cuh for the meaning of each.

    ring: the number of stages of row_ring.cu. copies: COPIES of row_decode.cu. With neither it is
    row_cluster.cu.
    """

    cluster: int
    threads: int
    vectors: int
    resident: int = 1
    persistent: bool = False
    weight_at: int = 0
    prefetch: bool = False
    stream: bool = False
    ring: int = 0
    copies: int = 0

    @property
    def kernel(self) -> str:
        return "row_ring" if self.ring else "row_decode" if self.copies else "row_cluster"

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return self.cluster * self.threads

    @property
    def slice_bytes(self) -> int:
        """A CTA's part of a row."""
        return 16 * self.threads * self.vectors

    @property
    def own_macros(self) -> dict[str, int]:
        """Those of its kernel alone."""
        if self.ring:
            return {"STAGES": self.ring}
        return {"COPIES": self.copies} if self.copies else {"PREFETCH": int(self.prefetch)}

    def ring_bytes(self, inputs: int) -> int:
        """Dynamic shared memory for x, or for x and the residual."""
        # cuda.py raises a kernel's limit only for more than 48 KB, beside which are the barriers
        return self.ring * inputs * self.slice_bytes + 16 if self.ring else 0


LONG_RULE = ClusterTiling(1, 512, 8, persistent=True, weight_at=1, ring=1)
FEW_RULE = ClusterTiling(8, 64, 2, weight_at=1)
FEW_BYTES = 32768  # of x and the residual in a row: with less, a CTA's warps were as fast
# Many rows that lie across vectors: one CTA each, of as many threads as the row needs, at most
# those here, which is what the registers allow without a spill. The ring only where an SM holds two
# of its CTAs.
SHIFT_BYTES = 8192  # shortest such row; 4097 columns take 78 us, by row_norm.py 138
SHIFT_RING = ClusterTiling(1, 416, 4, 2, True, weight_at=1, ring=2)
SHIFT_SPILLS = "fused_add_layer_norm"  # in the ring
SHIFT_RULES = {
    "rms_norm": ClusterTiling(1, 576, 3, 2, True, weight_at=2, prefetch=True),
    "layer_norm": ClusterTiling(1, 576, 3, 2, True, weight_at=2, prefetch=True),
    "fused_add_rms_norm": ClusterTiling(1, 896, 2, 1, True, weight_at=1, prefetch=True),
    "fused_add_layer_norm": ClusterTiling(1, 896, 2, 1, True, weight_at=2, prefetch=True),
}


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A tiling and the rows it is for; strides in elements. shift: the kernel's SHIFT."""

    tiling: ClusterTiling
    source: str
    rows: int
    n: int
    x_stride: int
    r_stride: int
    even: bool
    shared_bytes: int
    shift: bool = False

    def macros(self, call: Any) -> dict[str, int]:
        x, w, b = affine_metas(call)
        t = self.tiling
        given = w or b or x
        flags = {
            "EVEN": self.even,
            "CENTER": "layer_norm" in call.spec.name,
            "HAS_RESIDUAL": hasattr(call.tensors, "residual"),
            "HAS_WEIGHT": w is not None,
            "HAS_BIAS": b is not None,
            "STREAM": t.stream,
        }
        return {
            "TYPE": TYPES[x.dtype],
            "WEIGHT_TYPE": TYPES[given.dtype],
            "CLUSTER": t.cluster,
            "THREADS": t.threads,
            "VECTORS": t.vectors,
            "RESIDENT": t.resident,
            "WEIGHT_AT": t.weight_at,
            **{name: int(flag) for name, flag in flags.items()},
            "SHIFT": int(self.shift),
            **t.own_macros,
        }


def affine_metas(call: Any) -> tuple[Any, Any, Any]:
    """Metas of x, weight and bias."""
    return call.tensors.input, call.tensors.weight, getattr(call.tensors, "bias", None)


@functools.cache
def source(kernel: str) -> str:
    """The translation unit of a kernel."""
    folder = resources.files("opkiln_norm").joinpath("csrc")
    names = ("row.cuh", "row_shift.cuh", f"{kernel}.cu")
    return "".join(folder.joinpath(n).read_text("utf-8") for n in names)


def cluster_rows() -> list[dict[str, Any]]:
    """The table's tilings of this kernel."""
    return row_plan.tuning_table()["cluster_rows"]


def tuned(call: Any, n: int, rows: int) -> tuple[ClusterTiling, str] | None:
    """The first row of the table that covers the call."""
    key = (call.spec.name, call.tensors.input.dtype.itemsize, n)
    for row in cluster_rows():
        if row_plan.covers(row, key, rows):
            return ClusterTiling(**row["use"]), row["label"]
    return None


def rule(call: Any, n: int, rows: int) -> tuple[ClusterTiling, str] | None:
    """Where the table is silent: a cluster a row for few, a ring for those that are long.

    Few rows: 8 CTAs of up to 512 threads with two vectors each. Many rows, of which Triton's kernel
    would read a part twice: 64 KB of a row a CTA, up to 16 CTAs. What the row_norm table names is
    left to it.
    """
    itemsize, op = call.tensors.input.dtype.itemsize, call.spec.name
    weight, added = call.tensors.weight, hasattr(call.tensors, "residual")
    wide = weight is not None and weight.dtype.itemsize > itemsize  # does not fit the registers
    if wide or row_plan.tuned(op, itemsize, n, rows) is not None:
        return None
    if n * itemsize % 16:
        return shift_rule(call, n, rows)
    if rows <= row_plan.FEW_ROWS:
        threads = row_plan.power_of_two(
            -(-n * itemsize // (16 * FEW_RULE.cluster * FEW_RULE.vectors))
        )
        if n * itemsize * (1 + added) < FEW_BYTES or threads > 512:
            return None
        return replace(FEW_RULE, threads=threads), "rule"
    cluster = row_plan.power_of_two(-(-n * itemsize // LONG_RULE.slice_bytes))
    if n * itemsize <= row_plan.RESIDENT_BYTES or cluster > MAX_CLUSTER or added:
        return None
    return replace(LONG_RULE, cluster=cluster), "rule"


def shift_rule(call: Any, n: int, rows: int) -> tuple[ClusterTiling, str] | None:
    """Of many rows that lie across vectors."""
    itemsize, op = call.tensors.input.dtype.itemsize, call.spec.name
    if rows <= row_plan.FEW_ROWS or n * itemsize < SHIFT_BYTES:
        return None
    vectors = most_vectors(n, 16 // itemsize)
    ring = fitted(SHIFT_RING, vectors)
    if ring and ring.resident == SHIFT_RING.resident and itemsize == 2 and op != SHIFT_SPILLS:
        return ring, "rule"
    found = fitted(SHIFT_RULES[op], vectors)
    return found and (found, "rule")


def fitted(most: ClusterTiling, vectors: int) -> ClusterTiling | None:
    """The tiling with the threads that the vectors need, and more CTAs an SM if they are few."""
    threads = 32 * -(-vectors // (32 * most.vectors))
    if threads > most.threads:
        return None
    return replace(most, threads=threads, resident=most.threads * most.resident // threads)


def most_vectors(n: int, values: int) -> int:
    """Vectors of memory that a row lies in, wherever it starts."""
    return n // values if n % values == 0 else -(-(n + values - 1) // values)


def shiftable(call: Any, tiling: ClusterTiling, n: int, strides: list[int]) -> bool:
    """Whether SHIFT serves the call. Not under batch invariance: a row's vectors depend on its
    place.
    """
    x, w, b = affine_metas(call)
    ends_in_last_strip = -(-n * x.dtype.itemsize // 16) > tiling.lanes * (tiling.vectors - 1)
    return (
        not call.policy.batch_invariant
        and all(stride == n for stride in strides)
        and all(m is None or m.dtype == x.dtype for m in (w, b))
        and ends_in_last_strip
    )


def copyable(t: ClusterTiling) -> bool:
    """Whether row_decode.cu takes the tiling: equal shares of a row, a power of two of warps."""
    warps = t.threads // 32
    return t.cluster == 1 and t.vectors % t.copies == 0 and warps == row_plan.power_of_two(warps)


def chosen(call: Any, n: int, rows: int) -> tuple[ClusterTiling, str] | None:
    """The user's tiling, else the table's, else the rule's; None where the Triton kernel serves."""
    if tilings.of(call) is not None:
        own = tilings.taken(call, KERNEL, ClusterTiling)
        return own and (own, "your table")
    return tuned(call, n, rows) or rule(call, n, rows)


def plan_for(call: Any) -> ClusterPlan | None:
    """The plan of a call that the table or the rule covers, if vectors can read its tensors."""
    if call.spec.name not in OPS:
        return None
    x, w, b = affine_metas(call)
    split = x.ndim - len(call.params.normalized_shape)
    n, rows = row_plan.extent(x.shape, split)
    regime = row_plan.regime_of(call, rows)
    found = chosen(call, n, regime)
    if found is None:
        return None
    tiling, label = found
    sizes, operands = row_layout.operands_of(call, split)
    strides = [o.strides[0] for o in operands if o.strides is not None]
    values = 16 // x.dtype.itemsize
    columns_dense = all(o.stride_n is None for o in operands)
    metas = [m for m in vars(call.tensors).values() if m is not None]
    shift = any(size % values for size in (n, *strides))
    even = not shift and n == tiling.lanes * tiling.vectors * values
    fits = (
        columns_dense
        and len(sizes) <= 1
        and (not shift or shiftable(call, tiling, n, strides))
        and all(m.aligned for m in metas)
        and (w is None or b is None or w.dtype == b.dtype)
        and most_vectors(n, values) <= tiling.lanes * tiling.vectors
        and (not tiling.copies or (even and copyable(tiling)))
    )
    if not fits:
        return None
    kept = [m for m in (w, b) if m is not None and tiling.weight_at == 2]
    weight_bytes = sum(values * m.dtype.itemsize for m in kept) * tiling.threads * tiling.vectors
    return ClusterPlan(
        tiling=tiling,
        source=label,
        rows=rows,
        n=n,
        x_stride=strides[0],
        r_stride=strides[-1],
        even=even,
        shared_bytes=tiling.ring_bytes(1 + hasattr(call.tensors, "residual")) + weight_bytes,
        shift=shift,
    )


def prepare(call: Any) -> Callable[..., Any] | None:
    """The launch of a call that this kernel serves here, else None."""
    plan = plan_for(call)
    if plan is None or cuda.why_not(call.device, EXTRA) is not None:
        return None
    t, device = plan.tiling, call.device
    kernel = cuda.load(source(t.kernel), t.kernel, device, plan.macros(call))
    clusters = plan.rows * max(t.copies, 1)
    if t.persistent:
        kernel.configure((t.cluster, 1, 1), (t.threads, 1, 1), plan.shared_bytes, t.cluster)
        values = 16 // call.tensors.input.dtype.itemsize
        period = values // math.gcd(plan.n, values)  # rows until one starts as the first does
        clusters = min(clusters, max_clusters(kernel, plan) // period * period)
    send = kernel.configure(
        (clusters * t.cluster, 1, 1), (t.threads, 1, 1), plan.shared_bytes, t.cluster
    )
    center, added = "layer_norm" in call.spec.name, hasattr(call.tensors, "residual")
    metas = [(m.shape, m.stride, m.dtype) for m in call.outputs]
    scalars = (plan.rows, plan.n, plan.x_stride, plan.r_stride, float(call.params.eps))

    def launch(x: torch.Tensor, *others: torch.Tensor | None) -> Any:
        outputs = [torch.empty_strided(s, t, dtype=d, device=device) for s, t, d in metas]
        residual, affine = (others[0], others[1:]) if added else (0, others)
        weight, bias = (0 if t is None else t for t in (*affine, None)[:2])
        summed = outputs[1] if added else 0
        saved: list[Any] = outputs[1 + added :] or [0] * (1 + center)
        mean = saved[0] if center else 0
        send(x, residual, weight, bias, outputs[0], summed, mean, saved[-1], *scalars)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch


def max_clusters(kernel: cuda.Kernel, plan: ClusterPlan) -> int:
    """How many clusters run at once: fewer than the SMs would hold where a GPC has odd ones."""
    t = plan.tiling
    if t.cluster == 1:
        return t.resident * cuda.multiprocessors(kernel.device)
    core: Any = import_module("cuda.core")
    config = core.LaunchConfig(
        grid=(1, 1, 1),
        cluster=(t.cluster, 1, 1),
        block=(t.threads, 1, 1),
        shmem_size=plan.shared_bytes,
    )
    stream = core.Device(kernel.device.index).default_stream
    return int(kernel.handle.occupancy.max_active_clusters(config, stream=stream))
