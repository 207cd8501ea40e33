"""What `opkiln tune` tries for a pool: the tiling in use, then its neighbours.

Beside these, where the usual tiling is in use, the plainest tilings of the other kernels that serve
the geometry. Sizes are compiled in (`static`): what is tuned is tuned for one shape.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from opkiln import tilings
from opkiln.device import cuda

from opkiln_pool import mean_plan, pool_plan, window_cuda
from opkiln_pool.geometry import Geometry, geometry_of
from opkiln_pool.mean_plan import MeanTiling
from opkiln_pool.pool_plan import Tiling

MAX_V = 16  # outputs of a row that a thread takes


def candidates(call: Any) -> list[dict[str, Any]]:
    """Tilings as opkiln.tilings keeps them, the one in use first."""
    if call.spec.name == "mean_pooling":
        mean = mean_plan.plan_for(call).tiling
        near = dict.fromkeys([mean, *mean_neighbours(mean, call)])
        return [tilings.stated(mean_plan.KERNEL, t) for t in near]
    g = geometry_of(call)
    own = tilings.of(call)
    by_cuda = None
    if cuda.why_not(call.device, window_cuda.EXTRA) is None:
        by_cuda = window_cuda.plan_for(call)
    first = [] if by_cuda is None else [by_cuda.tiling, *cuda_neighbours(by_cuda.tiling)]
    stated = [window_cuda.stated(t) for t in first]
    if own is not None and by_cuda is not None:
        return stated
    used = pool_plan.plan_for(call).tiling
    found = [used, *neighbours(used, g)]
    if own is None:
        found += [t for t in plain(g) if t.variant != used.variant]
    return [*stated, *(tilings.stated(pool_plan.KERNEL, t) for t in dict.fromkeys(found))]


def cuda_neighbours(t: window_cuda.Tiling) -> Iterator[window_cuda.Tiling]:
    """Other CTAs, the other hint."""
    for threads in tilings.beside(t.threads, 64, 512):
        if isinstance(t, window_cuda.Rows):
            yield replace(t, threads=threads, ctas=t.ctas * t.threads // threads)
        else:
            yield replace(t, threads=threads)
    yield replace(t, keep=not t.keep)


def plain(g: Geometry) -> Iterator[Tiling]:
    """A tiling of each kernel that serves the geometry."""
    yield Tiling("taps", 256, num_warps=4, static=True)
    if v := pool_plan.least_v(g):
        yield Tiling("patch", 128, num_warps=4, v=v, static=True)
    if g.is_whole() and g.dense_plane() and math.prod(g.sizes) <= pool_plan.PLANE_ELEMENTS:
        yield pool_plan.plane_rule(g)


def neighbours(t: Tiling, g: Geometry) -> Iterator[Tiling]:
    """One setting changed, or the block and its warps together."""
    for warps in tilings.beside(t.num_warps, 1, 8):
        yield replace(t, num_warps=warps)
        if t.variant != "strip":
            yield replace(t, num_warps=warps, block=t.block * warps // t.num_warps)
    if t.variant != "strip":
        least = 1 if t.variant == "plane" else 32
        for block in tilings.beside(t.block, least, 1024):
            yield replace(t, block=block)
    if t.variant in ("patch", "taps"):
        yield replace(t, static=not t.static)
        yield replace(t, cache="" if t.cache else ".cs")
    if t.variant in ("patch", "plane"):
        yield replace(t, evict="" if t.evict else "evict_first")
    if t.variant == "strip" and g.reduce != "avg":
        rows = pool_plan.strip_tile(g)[0]
        for step in tilings.beside(t.step or rows, 1, rows):
            yield replace(t, step=step)
    if t.variant == "plane" and t.step:
        for step in tilings.beside(t.step, 4, pool_plan.PLANE_ELEMENTS):
            yield replace(t, step=step)
    if t.variant == "patch":
        least_v = pool_plan.least_v(g)
        for v in tilings.beside(t.v, 1, MAX_V):
            if v % least_v == 0 and patch_fits(g, v):
                yield replace(t, v=v)
        if pool_plan.pairs_of(g, asm=False) is not None:
            yield replace(t, pairs=not t.pairs)


def patch_fits(g: Geometry, v: int) -> bool:
    """Whether a thread can hold the columns under v outputs, and none lies past a row's end."""
    vec = pool_plan.vector(g)
    head, _, vectors, tail = pool_plan.pieces(g, v)
    short = head + vectors * vec + tail <= pool_plan.PATCH_COLUMNS
    return short and (g.sizes[2] % vec == 0 or not pool_plan.past_the_end(g, v))


def mean_neighbours(t: MeanTiling, call: Any) -> Iterator[MeanTiling]:
    columns = pool_plan.power_of_two(call.tensors.input.shape[2] * call.tensors.input.shape[3])
    for warps in tilings.beside(t.num_warps, 1, 8):
        yield replace(t, num_warps=warps)
    for block_n in tilings.beside(t.block_n, 16, min(columns, 4096)):
        yield replace(t, block_n=block_n)
    for step in tilings.beside(t.step, 1, 32):
        yield replace(t, step=step)
    yield replace(t, stages=2 if t.stages == 1 else 1)
    yield replace(t, evict="" if t.evict else "evict_first")
