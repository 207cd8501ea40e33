"""What `opkiln tune` tries for a row norm: the tiling in use, then its neighbours.

Of the Triton kernel and, where cuda-core is installed, of the CUDA kernels: both start from what
the table or the rule says, and the search goes on from the faster.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from opkiln import tilings
from opkiln.device import cuda

from opkiln_norm import row_cluster, row_plan
from opkiln_norm.row_cluster import ClusterTiling
from opkiln_norm.row_plan import Tiling

MAX_VALUES = 64  # of a row that a thread of the Triton kernel holds, with room for the affine
LONG_BYTES = 16384  # shorter rows of many are no work for a CTA
SHAPES = ((128, 8), (256, 4), (256, 8), (512, 4), (512, 8), (1024, 4))  # threads, vectors


def candidates(call: Any) -> list[dict[str, Any]]:
    """Tilings as opkiln.tilings keeps them, the one in use first."""
    row = row_plan.plan_for(call)
    cluster = row_cluster.plan_for(call) if has_cuda(call) else None
    own = tilings.of(call) or {}
    found: list[dict[str, Any]] = []
    if cluster is not None:
        near = dict.fromkeys([cluster.tiling, *cluster_neighbours(cluster.tiling)])
        found += [tilings.stated(row_cluster.KERNEL, t) for t in near]
    if own.get("kernel") != row_cluster.KERNEL:
        near_rows = dict.fromkeys([row.tiling, *row_neighbours(row, call)])
        found += [tilings.stated(row_plan.KERNEL, t) for t in near_rows]
    if not own and cluster is None and has_cuda(call):
        found += [tilings.stated(row_cluster.KERNEL, t) for t in cluster_starts(call, row)]
    return [t for t in found if serves(call, t)]


def has_cuda(call: Any) -> bool:
    return (
        call.spec.name in row_cluster.OPS and cuda.why_not(call.device, row_cluster.EXTRA) is None
    )


def serves(call: Any, tiling: dict[str, Any]) -> bool:
    """Whether the kernel that a tiling is for takes the call with it."""
    with tilings.trial(tiling):
        plan = row_cluster.plan_for(call)
    return (plan is not None) == (tiling["kernel"] == row_cluster.KERNEL)


def row_neighbours(plan: row_plan.RowPlan, call: Any) -> Iterator[Tiling]:
    """One or two settings changed."""
    t, itemsize = plan.tiling, call.tensors.input.dtype.itemsize
    vector = 16 // itemsize

    def fits(t: Tiling) -> bool:
        return t.block_m * t.block_n * t.chunks <= MAX_VALUES * 32 * t.num_warps

    for warps in tilings.beside(t.num_warps, 1, 32):
        yield from filter(fits, (replace(t, num_warps=warps),))
    for block_n in tilings.beside(t.block_n, 32 * vector, row_plan.power_of_two(plan.n)):
        chunks = t.chunks if t.head else -(-plan.n // block_n)
        yield from filter(fits, (replace(t, block_n=block_n, chunks=chunks),))
    if t.head:
        yield replace(t, static=not t.static)
        yield replace(t, forward=not t.forward)
    else:
        for block_m in tilings.beside(t.block_m, 1, 64):
            yield from filter(fits, (replace(t, block_m=block_m),))
        yield replace(t, preload=not t.preload)
        if t.programs_per_sm:
            yield replace(t, programs_per_sm=0, stages=1)
        elif plan.rows > 8 * row_plan.FEW_ROWS:
            per_sm = max(32 // t.num_warps, 1)
            yield replace(t, programs_per_sm=per_sm, stages=2, preload=True)
    if itemsize == 2 and all(o.strides is None for o in plan.operands[1:2]):
        yield replace(t, packed=not t.packed)
    yield replace(t, store_cache="" if t.store_cache else ".cs")
    yield replace(t, evict="" if t.evict else "evict_first")


def cluster_starts(call: Any, plan: row_plan.RowPlan) -> Iterator[ClusterTiling]:
    """Designs of the CUDA kernels that cover a row exactly."""
    vectors = plan.n * call.tensors.input.dtype.itemsize // 16
    if plan.rows <= row_plan.FEW_ROWS:
        for cluster, depth in product((1, 2, 4, 8), (1, 2)):
            threads = vectors // (cluster * depth)
            if threads * cluster * depth == vectors and threads in (64, 128, 256, 512, 1024):
                yield ClusterTiling(cluster, threads, depth, weight_at=1)
        for threads, copies in product((128, 256, 512), (2, 4)):
            depth = vectors // threads
            if threads * depth == vectors and depth in (2, 4, 8):
                yield ClusterTiling(1, threads, depth, weight_at=1, copies=copies)
    elif 16 * vectors >= LONG_BYTES:
        for threads, depth in SHAPES:
            cluster = vectors // (threads * depth)
            if cluster in (1, 2, 4, 8, 16) and cluster * threads * depth == vectors:
                yield ClusterTiling(cluster, threads, depth)


def cluster_neighbours(t: ClusterTiling) -> Iterator[ClusterTiling]:
    """A row over more threads, or more CTAs, or with other hints."""
    for threads in tilings.beside(t.threads, 64, 1024):
        vectors = t.vectors * t.threads // threads
        if vectors and vectors * threads == t.vectors * t.threads:
            yield replace(t, threads=threads, vectors=vectors)
    if t.copies:
        for copies in tilings.beside(t.copies, 1, t.vectors):
            yield replace(t, copies=copies)
        return
    for cluster in tilings.beside(t.cluster, 1, row_cluster.MAX_CLUSTER):
        threads = t.threads * t.cluster // cluster
        if 64 <= threads <= 1024 and threads * cluster == t.threads * t.cluster:
            yield replace(t, cluster=cluster, threads=threads)
    yield replace(t, stream=not t.stream)
    yield replace(t, weight_at=0 if t.weight_at else 1)
    if not t.ring:
        yield replace(t, prefetch=not t.prefetch)
        for resident in tilings.beside(t.resident, 1, 8):
            yield replace(t, resident=resident)
