"""The tilings of the second round of row_norm.py: what may yet win, beside what won before."""

import sys
from dataclasses import replace
from typing import Any

import common

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]

from opkiln_norm import row_cluster, row_plan  # noqa: E402
from opkiln_norm.row_cluster import ClusterTiling  # noqa: E402
from opkiln_norm.row_plan import Tiling  # noqa: E402
from row_tilings import AnyTiling, cluster_tilings, decode_tilings  # noqa: E402

PREFILL_ROWS = 8191  # the table's regimes below and above


def second(row: Any) -> list[AnyTiling]:
    """Few tilings of each design, those first that the row has now."""
    size = row.n * row.itemsize
    if row.rows <= row_plan.FEW_ROWS:
        found: list[AnyTiling] = [t for t in decode_tilings(row) if not row.adds or not t.packed]
        found += cluster_tilings(row) if row.op in row_cluster.OPS else []
    elif size <= 4096:
        found = short(row)
    elif size <= row_plan.RESIDENT_BYTES:
        found = [*twice(row)] if row.rows > PREFILL_ROWS else [*twice(row), *once(row)]
        found += [ClusterTiling(1, 1024, size // 16384, 2)] if size >= 32768 else []
    else:
        found = [*long(row), *rings(row)]
    return list(dict.fromkeys(found))


def short(row: Any) -> list[AnyTiling]:
    """Triton's best, persistent."""
    chunks = row.n // row.warp
    best = Tiling(row.warp, 1, 2, chunks, programs_per_sm=32, stages=3, preload=True)
    more = [replace(best, block_m=m, programs_per_sm=p) for m, p in ((4, 24), (4, 32), (2, 28))]
    return [best, *more]


def once(row: Any) -> list[AnyTiling]:
    """The row in registers."""
    found = [
        Tiling(row.n // chunks, warps, chunks=chunks, evict=evict, packed=packed)
        for warps in (4, 8, 16, 32)
        for chunks in (1, 2, 4)
        for evict in ("", "evict_first")
        for packed in ((False,) if row.adds else (False, True))
        if 2 <= row.n // (warps * row.warp) <= 8 and row.n // chunks >= warps * row.warp
    ]
    return list(found)


def twice(row: Any) -> list[AnyTiling]:
    """x read again after the sum: whole (chunks=0, Inductor's), or all but a last block."""
    found: list[AnyTiling] = []
    huge = row.n * row.itemsize > 32768
    shapes = [(8192, 32), (16384, 32), (32768, 32), (32768, 16)] if huge else [
        (8192, 16), (8192, 32), (8192, 8), (4096, 16), (4096, 8), (2048, 16), (2048, 8)
    ]  # fmt: skip
    for block, warps in shapes:
        for chunks in (0, 1):
            if block * (chunks + 1) > row.n and chunks:
                continue
            plain = Tiling(block, warps, chunks=chunks, head=True, evict="evict_first")
            found += [plain, replace(plain, store_cache=".cs")]
            found += [] if chunks else [replace(plain, evict="")]
    return found


def long(row: Any) -> list[AnyTiling]:
    """Triton's best: a tail in registers, or with half a row's bytes all of it."""
    tail = Tiling(
        16384, 32, chunks=2, head=True, packed=True, evict="evict_first", store_cache=".cs"
    )
    whole = Tiling(row.n // 4, 32, chunks=4, packed=True)
    if row.n * row.itemsize > 2 * row_plan.RESIDENT_BYTES:
        return [tail]
    return [tail, whole, replace(whole, evict="evict_first"), replace(whole, store_cache=".cs")]


def rings(row: Any) -> list[AnyTiling]:
    """Fewer bytes under way than 192 KB an SM."""
    slices = row.n * row.itemsize // 65536
    best = ClusterTiling(slices, 512, 8, persistent=True, weight_at=1, ring=3)
    found: list[AnyTiling] = [best, replace(best, ring=2), replace(best, ring=1)]
    if 2 * slices <= 16:
        two = replace(best, cluster=2 * slices, threads=256, resident=2)
        found += [two, replace(two, ring=2), replace(two, ring=1)]
    return found
