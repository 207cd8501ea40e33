"""The tilings of behind.py: what may win the rows that are behind."""

import sys
from dataclasses import replace
from typing import Any

import common

sys.path[:0] = [str(common.ROOT / p) for p in ("core/src", "packages/norm/src")]
sys.path[:0] = [str(common.ROOT / "packages/pool/src")]

from opkiln_norm.channel_cuda_tilings import Flat, Team  # noqa: E402
from opkiln_norm.row_cluster import ClusterTiling, most_vectors  # noqa: E402
from opkiln_norm.row_plan import Tiling  # noqa: E402
from opkiln_pool.pool_plan import Tiling as PoolTiling  # noqa: E402

# cluster, threads, vectors a thread, CTAs an SM, WEIGHT_AT, by the bytes of a row; no persistent
# grid. None spills (NVRTC 13.0).
Shapes = dict[int, tuple[tuple[int, int, int, int, int], ...]]
ONCE: Shapes = {
    16384: (
        (1, 128, 8, 8, 0), (1, 256, 4, 6, 0), (1, 512, 2, 3, 0), (1, 512, 2, 3, 1),
        (1, 512, 2, 4, 0), (1, 1024, 1, 2, 0), (1, 1024, 1, 2, 1), (2, 128, 4, 10, 0),
        (2, 256, 2, 8, 0), (2, 512, 1, 4, 0), (2, 512, 1, 4, 1),
    ),
    262144: (
        (8, 256, 8, 2, 0), (8, 256, 8, 4, 0), (8, 512, 4, 2, 0), (8, 512, 4, 2, 1),
        (8, 1024, 2, 1, 0), (8, 1024, 2, 1, 1), (4, 512, 8, 1, 0), (4, 512, 8, 2, 0),
        (4, 1024, 4, 1, 0), (4, 1024, 4, 1, 1), (2, 1024, 8, 1, 0), (16, 128, 8, 8, 0),
        (16, 256, 4, 4, 0), (16, 256, 4, 4, 1), (16, 512, 2, 2, 1),
    ),
}  # fmt: skip
ONCE_ADDED: Shapes = {
    16384: (
        (1, 256, 4, 3, 0), (1, 512, 2, 2, 0), (1, 512, 2, 2, 1), (1, 1024, 1, 1, 0),
        (1, 1024, 1, 1, 1), (2, 128, 4, 5, 0), (2, 256, 2, 4, 0), (2, 512, 1, 2, 0),
        (2, 512, 1, 2, 1),
    ),
    32768: (
        (1, 256, 8, 1, 0), (1, 512, 4, 1, 0), (1, 1024, 2, 1, 0), (1, 1024, 2, 1, 1),
        (2, 512, 2, 2, 0), (4, 256, 2, 4, 0),
    ),
}  # fmt: skip
# the same, with a persistent grid that asks for the next row early, w in registers
PERSISTENT: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16384: ((1, 256, 4, 3), (1, 512, 2, 2), (1, 1024, 1, 1), (2, 256, 2, 4)),
    262144: (),
}
PERSISTENT_ADDED: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16384: ((1, 512, 2, 2), (1, 1024, 1, 1), (2, 512, 1, 2)),
    32768: ((1, 512, 4, 1), (1, 1024, 2, 1), (2, 1024, 1, 1)),
}
# Rows across vectors: vectors a thread, threads an SM, WEIGHT_AT, PREFETCH. None spills at 12289.
SHIFT = ((4, 896, 1, True), (4, 896, 2, True), (3, 1152, 2, True), (3, 1152, 1, False),
         (2, 896, 1, True), (6, 576, 2, True))  # fmt: skip
SHIFT_CENTER = ((3, 1152, 2, True), (3, 1152, 2, False), (2, 896, 2, True), (2, 896, 1, True),
                (6, 576, 2, True))  # fmt: skip
SHIFT_ADDED = ((2, 896, 1, True), (2, 896, 2, True), (2, 896, 1, False), (3, 576, 2, True),
               (4, 448, 1, True))  # fmt: skip
LATER = Tiling(2048, 16, chunks=0, head=True, evict="evict_first")  # Inductor's way


def row_tilings(row: Any) -> list[Tiling | ClusterTiling]:
    """Of a row norm whose rows start at vectors."""
    size = row.n * row.itemsize
    found: list[Tiling | ClusterTiling] = []
    for *shape, place in (ONCE_ADDED if row.adds else ONCE)[size]:
        plain = ClusterTiling(*shape, weight_at=place)
        found += [plain, replace(plain, stream=True)]
    for shape in (PERSISTENT_ADDED if row.adds else PERSISTENT)[size]:
        ahead = ClusterTiling(*shape, persistent=True, weight_at=1, prefetch=True)
        found += [ahead, replace(ahead, stream=True)]
    if size == 16384 and not row.adds:
        for threads, vectors, resident, ring in ((256, 4, 4, 3), (512, 2, 2, 6), (1024, 1, 1, 12)):
            found.append(ClusterTiling(1, threads, vectors, resident, True, 1, ring=ring))
    if size <= 32768:
        found += [LATER, replace(LATER, evict=""), replace(LATER, block_n=4096)]
        found += [replace(LATER, num_warps=8), replace(LATER, store_cache=".cs")]
    return found


def shift_tilings(row: Any) -> list[ClusterTiling]:
    """Of a row norm whose rows lie across vectors."""
    vectors = most_vectors(row.n, 16 // row.itemsize)
    shapes = SHIFT_ADDED if row.adds else SHIFT_CENTER if "layer" in row.op else SHIFT
    found = []
    for each, most, place, prefetch in shapes:
        threads = 32 * -(-vectors // (32 * each))
        if threads <= 1024 and threads <= most:
            t = ClusterTiling(1, threads, each, most // threads, True, place, prefetch=prefetch)
            found += [t, replace(t, stream=True)]
    return [*found, *(replace(t, persistent=False) for t in found if not t.prefetch)]


def team_tilings(row: Any) -> list[Team | Flat]:
    """Of instance norm, and of batch norm with given statistics: warps a set, samples of a channel
    in a CTA, parameters through L1.
    """
    cuts = ((1, 4), (2, 2), (4, 1))
    samples = row.shape[0]
    found = []
    for through_l1 in (False, True):
        for warps, vectors in cuts:
            one = Team(16, warps, 1, vectors, through_l1=through_l1)
            found += [one, replace(one, stream=True)]
            for teams in sorted({2, 4, samples}):
                if teams * warps <= 32:
                    found.append(replace(one, teams=teams, grouped=True))
    if "running" in row.flags and "eval" not in row.flags:
        found = [t for t in found if t.teams == samples]
    flat = [Flat(threads, 16, l1) for threads in (256, 512, 1024) for l1 in (False, True)]
    return [*found, *flat]


def pool_tilings(row: Any) -> list[PoolTiling]:
    """Of a pool with indices: an output an element, up to 1024 of them in 4 warps; patches."""
    shapes = ((128, 2), (256, 2), (256, 4), (512, 4), (1024, 4), (512, 8), (1024, 8))
    found = [
        PoolTiling("taps", block, warps, static=True, cache=cache)
        for block, warps in shapes
        for cache in ("", ".cs")
    ]
    v = 8 if row.dtype == "f16" else 2
    for block, warps, more in ((128, 4, 1), (256, 4, 1), (256, 8, 1), (64, 2, 1), (128, 4, 2)):
        if v * more <= 8:
            plain = PoolTiling("patch", block, warps, v=v * more, static=True)
            found += [plain, replace(plain, evict="evict_first"), replace(plain, cache=".cs")]
    return found
