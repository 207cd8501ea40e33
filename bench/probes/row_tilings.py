"""The tilings that row_norm.py tries, by kind of row: of the Triton kernel and the CUDA one."""

import sys
from dataclasses import replace
from itertools import product
from typing import Any

import common

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]

from opkiln_norm import row_cluster, row_plan  # noqa: E402
from opkiln_norm.row_cluster import ClusterTiling  # noqa: E402
from opkiln_norm.row_plan import Tiling, rule  # noqa: E402

AnyTiling = Tiling | ClusterTiling


def candidates(row: Any) -> list[AnyTiling]:
    """What the rule says first, then what may be better."""
    if row.rows <= row_plan.FEW_ROWS:
        found = decode_tilings(row)
    elif row.n % row.warp and row.n > row.warp:
        found = ragged_tilings(row) + resident_tilings(row)
    elif row.n * row.itemsize <= 4096:
        found = short_tilings(row)
    elif row.n * row.itemsize <= row_plan.RESIDENT_BYTES:
        found = resident_tilings(row) + looped_tilings(row)
    else:
        found = long_tilings(row)
    if row.adds:
        found = [replace(t, packed=False) for t in found]
    ruled = rule(row.itemsize, row.n, row.rows, row.adds)
    clustered = cluster_tilings(row) if row.op in row_cluster.OPS else []
    return list(dict.fromkeys([ruled, *found, *clustered]))


def decode_tilings(row: Any) -> list[Tiling]:
    """A row or a few short ones a program: latency."""
    if row.n <= row.warp:
        shapes = ((2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 8), (32, 16))
        return [Tiling(row.n, w, m, preload=p) for m, w in shapes for p in (True, False)]
    found = [
        Tiling(row.n, w, preload=preload)
        for w in (4, 8, 16, 32)
        if row.n >= w * row.warp
        for preload in (True, False)
    ]
    return found + [replace(t, packed=True) for t in found[-4:]]


def ragged_tilings(row: Any) -> list[Tiling]:
    """N = 9 x 128: blocks that cover it exactly, 1 or 2 rows a warp, few warps a program."""
    block = row.n & -row.n  # its largest power of two
    lanes = max(row.warp // block, 1)
    return [
        Tiling(block, warps, block_m=warps * lanes, chunks=row.n // block, preload=p, store_cache=c)
        for warps in (1, 2, 4)
        for p, c in ((False, ""), (True, ""), (True, ".cs"))
        if row.n // block <= 16
    ]


def short_tilings(row: Any) -> list[Tiling]:
    """A warp for one or several rows, or a few warps a row."""
    block_n = min(row.warp, row_plan.power_of_two(row.n))
    chunks = -(-row.n // block_n)
    found = []
    for warps in (1, 2, 4, 8):
        for depth in (1, 2, 4):  # rows of a lane in flight
            if depth * chunks <= 8 or depth == 1:
                block_m = warps * depth * (row.warp // block_n)
                found.append(Tiling(block_n, warps, block_m, chunks))
    persistent = [
        replace(t, programs_per_sm=warps_per_sm // t.num_warps, stages=stages, preload=True)
        for t in found
        if t.num_warps in (1, 2, 4)
        for warps_per_sm, stages in ((24, 3), (32, 1), (32, 2), (32, 3), (32, 4), (48, 2))
    ]
    block = row_plan.power_of_two(row.n)
    whole = [Tiling(block, w) for w in (1, 2, 4, 8) if w * row.warp <= block <= 8 * w * row.warp]
    preload = [replace(t, preload=True) for t in found]
    return found + preload + persistent + whole


def resident_tilings(row: Any) -> list[Tiling]:
    """One row a program, in registers, 2 to 8 vectors a thread; some persistent."""
    full = row_plan.power_of_two(row.n)
    # Chunks where the power of two above N would leave lanes idle, or to hold fewer registers.
    blocks = [full, full // 4] if full == row.n else [full // 4, full // 8]
    plain = []
    for block, warps in product(blocks, (2, 4, 8, 16, 32)):
        chunks = -(-row.n // block)
        if block >= warps * row.warp and 2 <= chunks * block // (warps * row.warp) <= 8:
            plain.append(Tiling(block, warps, chunks=chunks))
    ways: list[dict[str, Any]] = [
        {}, {"preload": True}, {"store_cache": ".cs"}, {"evict": "evict_last"},
        {"evict": "evict_first"}, {"evict": "evict_last", "store_cache": ".cs"},
    ]  # fmt: skip
    if row.itemsize == 2 and not row.adds:
        ways += [{"packed": True}, {"packed": True, "evict": "evict_last"}]
    found = [replace(t, **way) for t in plain for way in ways]
    persistent = [
        replace(t, preload=True, programs_per_sm=max(w // t.num_warps, 1), stages=stages)
        for t in plain
        if t.num_warps in (4, 8)
        for w, stages in ((32, 3), (48, 2))
    ]
    return found + persistent


def looped_tilings(row: Any) -> list[Tiling]:
    """All but the row's last block read twice, the second time from L1: few registers."""
    vectors = ((4, 1), (8, 1), (16, 1), (8, 2), (16, 2), (32, 1), (32, 2))  # warps, a thread's
    shapes = [(w * v * row.warp, w) for w, v in vectors if 2 * w * v * row.warp <= row.n]
    plain = [Tiling(block, w, head=True) for block, w in shapes]
    first = [replace(t, evict="evict_first") for t in plain]
    return first + [replace(t, store_cache=".cs") for t in first[-4:]] + plain


def long_tilings(row: Any) -> list[Tiling]:
    """Rows beyond the registers: a resident tail, and a head that is read again from L2."""
    shapes = (
        (8192, 32, 4, 1), (8192, 32, 4, 5), (8192, 32, 6, 1), (16384, 32, 2, 1), (16384, 32, 2, 3),
        (16384, 32, 1, 1), (32768, 32, 1, 1),
    )  # fmt: skip
    found = [
        Tiling(block, warps, chunks=chunks, head=True, stages=stages, packed=True)
        for block, warps, chunks, stages in shapes
    ]
    if row.n * row.itemsize == 2 * row_plan.RESIDENT_BYTES:
        whole = Tiling(row.n // 4, 32, chunks=4, packed=True)
        found += [whole, replace(whole, evict="evict_last")]
        found += [replace(t, store_cache=".cs") for t in found[-2:]]
    first = [replace(t, evict="evict_first") for t in found if t.head]
    return found + first + [replace(t, store_cache=".cs") for t in first]


def cluster_tilings(row: Any) -> list[ClusterTiling]:
    """The CUDA kernels: decode, and rows of 16 KB and more."""
    vectors = row.n * row.itemsize // 16
    if row.rows <= row_plan.FEW_ROWS:
        spread = product((1, 2, 4, 8, 16), (1, 2))
        return [
            ClusterTiling(k, vectors // (k * v), v, weight_at=1)
            for k, v in spread
            if vectors % (k * v) == 0 and vectors // (k * v) in (64, 128, 256, 512, 1024)
        ]
    if row.n * row.itemsize < 16384:
        return []
    found = []
    for threads, depth, resident in (
        (128, 8, 8), (256, 4, 4), (256, 8, 2), (512, 2, 4), (512, 4, 2), (512, 8, 1), (1024, 4, 1)
    ):  # fmt: skip
        cluster = vectors // (threads * depth)
        if cluster not in (1, 2, 4, 8, 16):
            continue
        slices = threads * depth * 16 * resident  # bytes of the rows that an SM holds in registers
        plain = ClusterTiling(cluster, threads, depth, resident)
        if cluster <= 2:  # a cluster a row: with 8 of them 2,048 rows took half as long again
            wide = threads * depth * 4 > 8192  # 32 registers a thread of data leave room for two
            found.append(replace(plain, resident=2 * resident if wide else resident))
        elif threads * depth >= 2048:
            found.append(replace(plain, persistent=True, prefetch=True, weight_at=2, stream=True))
        if not row.adds and slices <= 65536:
            ring = replace(plain, persistent=True, weight_at=1, ring=196608 // slices)
            found += [ring, replace(ring, stream=True)]
    return found


def focused(row: Any) -> list[AnyTiling]:
    """For a row that is behind: few tilings of each of at least three designs."""
    ruled = [rule(row.itemsize, row.n, row.rows, row.adds)]
    size = row.n * row.itemsize
    if row.rows <= row_plan.FEW_ROWS:
        found = decode_tilings(row)
    elif size <= 4096:
        found = focused_short(row)
    elif size <= row_plan.RESIDENT_BYTES:
        found = focused_resident(row) + focused_looped(row)
    else:
        best = Tiling(16384, 32, chunks=2, head=True, packed=True, evict="evict_first")
        whole = Tiling(row.n // 4, 32, chunks=4, packed=True)
        found = [best, replace(best, store_cache=".cs"), *focused_looped(row)]
        found += [whole] if size == 2 * row_plan.RESIDENT_BYTES else []
    if row.adds:
        found = [replace(t, packed=False) for t in found]
    return list(dict.fromkeys([*ruled, *found, *cluster_tilings(row)]))


def focused_short(row: Any) -> list[Tiling]:
    """A warp a few rows, persistent or not; whole rows of several warps."""
    chunks = row.n // row.warp
    best = Tiling(row.warp, 1, 4, chunks, programs_per_sm=32, stages=3, preload=True)
    found = [replace(best, block_m=m, programs_per_sm=p) for m in (2, 4, 8) for p in (16, 24, 32)]
    found += [replace(best, stages=s) for s in (1, 2, 4)]
    found += [replace(best, store_cache=".cs"), replace(best, evict="evict_first")]
    found += [replace(best, num_warps=w, block_m=4 * w, programs_per_sm=32 // w) for w in (2, 4)]
    once = [Tiling(row.warp, w, d * w, chunks, preload=True) for w in (2, 4, 8) for d in (1, 2, 4)]
    return found + once + [replace(once[4], store_cache=".cs"), Tiling(row.n, 4, 8)]


def focused_resident(row: Any) -> list[Tiling]:
    """The row in registers, whole or in strips of one vector a thread and more."""
    found = []
    for warps in (8, 16, 32):
        if 2 <= row.n // (warps * row.warp) <= 8:
            found += [Tiling(row.n, warps), Tiling(row.n, warps, preload=True)]
            if row.n // 4 >= warps * row.warp:
                strips = Tiling(row.n // 4, warps, chunks=4)
                found += [strips, replace(strips, packed=True)]
    return found


def focused_looped(row: Any) -> list[Tiling]:
    """Read twice, as Inductor does: 512 threads of 8 bytes (2048, 16), and others."""
    narrow = [(1024, 8), (2048, 8), (2048, 16), (4096, 16)]
    wide = [(4096, 32), (8192, 32)]
    huge = row.n * row.itemsize > row_plan.RESIDENT_BYTES
    shapes = wide if huge else narrow + (wide if row.n > 16384 else [])
    first = [Tiling(block, warps, head=True, evict="evict_first") for block, warps in shapes]
    return first + [replace(t, evict="") for t in first] + [replace(first[-1], store_cache=".cs")]
