"""Which tilings of the channel norms are worth measuring on a row."""

import math
from collections.abc import Iterator
from dataclasses import replace

from channel_rows import Row
from opkiln_norm import channel_cuda, channel_plan
from opkiln_norm.channel_cuda_tilings import Columns, Ring, Sizes, Team
from opkiln_norm.channel_cuda_tilings import Tiling as CudaTiling
from opkiln_norm.channel_plan import ChannelPlan, Tiling, backward_plan, forward_plan
from opkiln_norm.row_plan import power_of_two

AnyTiling = Tiling | CudaTiling
CLUSTER_BYTES = 32 << 10  # of a set; clusters were 18 to 34 % slower on all of less
# threads, vectors in registers and in shared memory, channels in flight; none but those with
# 18 and 9 in shared memory spills (NVRTC 13.0), those by 16 and 56 bytes
FORWARD_RINGS = (
    (256, 2, 14, 3), (256, 8, 8, 4), (128, 16, 16, 5), (128, 14, 18, 6),
)  # fmt: skip
COLUMNS = (  # warps, rows a lane, words
    (1, 4, 4), (1, 8, 8), (1, 16, 16), (2, 2, 4), (2, 4, 8), (2, 8, 16), (4, 2, 8), (4, 8, 32),
)  # fmt: skip
BACKWARD_RINGS = ((512, 2, 6, 2), (256, 5, 11, 2), (256, 8, 8, 2), (256, 7, 9, 3))


def triton_plan(row: Row) -> ChannelPlan:
    call = row.call(row.tensors("meta"), real=False)
    return backward_plan(call) if row.backward else forward_plan(call)


def warps_for(elements: int, vector: int, depths: tuple[int, ...]) -> Iterator[int]:
    """Numbers of warps that give each thread so many vectors."""
    for depth in depths:
        warps = elements // (32 * vector * depth)
        if 1 <= warps <= 32:
            yield warps


def resident_tilings(row: Row, plan: ChannelPlan) -> list[Tiling]:
    """Sets in registers: rows a program, columns whole or in chunks, vectors a thread."""
    view, vector = plan.view, 16 // row.itemsize
    full = power_of_two(view.cols)
    if view.pool or view.averaged:
        heights = [power_of_two(view.rows)]
    elif view.steps[0].dense == 0:
        heights = [m for m in (4, 8, 16, 32) if view.per_group <= m <= view.rows]
    else:
        heights = [m for m in (1, 2, 4) if m <= view.rows]
    found = []
    for m in heights:
        for parts in (1, 2, 8):
            block = full // parts
            chunks = -(-view.cols // max(block, 1))
            if block < 1 or chunks == parts > 2:
                continue
            for warps in warps_for(m * block, vector, (1, 2, 4)):
                if m * block * chunks // (32 * vector * warps) <= 16:
                    found.append(Tiling(m, block, warps, chunks=chunks))
    return found + [replace(t, store_cache=".cs") for t in found[:1]]


def given_tilings(row: Row, plan: ChannelPlan) -> list[Tiling]:
    """Nothing to reduce: how many rows a program."""
    vector, full = 16 // row.itemsize, power_of_two(plan.view.cols)
    return [
        Tiling(m, full, warps, slices=1)
        for m in (1, 2, 4)
        for warps in warps_for(m * full, vector, (1, 2, 4))
    ]


def sliced_tilings(row: Row) -> list[Tiling]:
    """Two passes, in two kernels or in one that streams."""
    vector = 16 // row.itemsize
    found = [
        Tiling(1, 32 * vector * warps, warps, chunks=chunks, slices=slices, store_cache=".cs")
        for warps, chunks in ((4, 4), (8, 2), (8, 4), (16, 2))
        for slices in (128, 512)
    ]
    found += [replace(t, evict="evict_last") for t in found if t.slices == 512]
    for per_sm, warps, chunks in ((1, 16, 4), (1, 32, 2), (2, 16, 2), (4, 8, 2)):
        t = Tiling(1, 32 * vector * warps, warps, chunks=chunks, slices=1, stream=per_sm)
        found.append(replace(t, store_cache=".cs"))
    return found


def narrow_tilings(row: Row, plan: ChannelPlan) -> list[Tiling]:
    """Channels side by side in memory, in slices."""
    view, vector = plan.view, 16 // row.itemsize
    if view.steps[0].dense != 0 or view.cols < 1024 or plan.given:
        return []
    return [
        Tiling(m, 32 * vector * warps // m, warps, chunks=chunks, slices=slices)
        for m in (32, 64)
        for warps, chunks, slices in ((4, 1, 32), (4, 4, 32), (8, 1, 64))
    ]


def team_tilings(row: Row, s: Sizes) -> list[Team]:
    """A set in registers: threads of a set and vectors of each. Several sets a CTA lost, except to
    save a trip to memory for statistics averaged over the samples."""
    nbytes = next((b for b in (16, 8) if s.cols * s.itemsize % b == 0), 0)
    if not nbytes:
        return []
    vectors = s.cols * s.itemsize // nbytes * (s.samples if s.pooled else 1)
    found = []
    for warps in (1, 2, 4, 8, 16):
        for cluster in (1, 2) if s.pooled and vectors * nbytes > CLUSTER_BYTES else (1,):
            depth = -(-vectors // (32 * warps * cluster))
            if depth > 10 or (depth == 1 and vectors < 16 * warps * cluster):
                continue
            teams = s.samples if s.mode == "averaged" else 1
            found.append(Team(nbytes, warps, teams, depth, cluster))
    streams = [replace(t, stream=True) for t in found[:2]]
    return [t for t in found + streams if t.fits(s)]


def cuda_tilings(row: Row) -> list[CudaTiling]:
    call = row.call(row.tensors("meta"), real=False)
    if row.op not in channel_cuda.OPS or not channel_cuda.readable(call):
        return []
    s = channel_cuda.sizes_of(call)
    if row.large:
        rings = BACKWARD_RINGS if row.backward else FORWARD_RINGS
        found = [Ring(*r, stream=c) for r in rings for c in (False, True)]
        return [t for t in found if t.fits(s)]
    if s.cols == 1:
        return [c for c in (Columns(*c) for c in COLUMNS) if c.fits(s)]
    return [*team_tilings(row, s)]


def candidates(row: Row) -> list[AnyTiling]:
    """What the rule says first, then what may be better."""
    channel_plan.tuning_rows = list
    plan = triton_plan(row)
    found = [plan.tiling]
    if plan.given:
        found += given_tilings(row, plan)[:6]
    elif row.large:
        found += sliced_tilings(row)
    else:
        most = 14 if row.op == "group_norm" or "cl" in row.flags else 5
        if math.prod(row.shape) // row.shape[1] <= 32768:
            found += resident_tilings(row, plan)[:most]
        found += narrow_tilings(row, plan)
    return list(dict.fromkeys([*found, *cuda_tilings(row)]))


def in_second(row: Row) -> bool:
    """Rows that take a few microseconds, that a CUDA kernel serves, and that are not ahead."""
    ahead = row.op == "group_norm" and (row.dtype != "f32" or "affine" in row.flags)
    return not row.large and "cl" not in row.flags and not ahead


def focused(row: Row) -> list[AnyTiling]:
    """The best Triton tiling so far and its like, and the CUDA ones."""
    channel_plan.tuning_rows = lambda: list(channel_plan.tuning_table()["rows"])
    known = triton_plan(row).tiling
    similar = [
        replace(known, num_warps=n) for n in (known.num_warps // 2, 2 * known.num_warps) if n
    ]
    return list(dict.fromkeys([known, *similar, *cuda_tilings(row)]))
