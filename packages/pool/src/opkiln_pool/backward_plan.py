"""How the gradient of a pool is launched: which kernel serves it, with which tiling and arguments.

A tiling comes from the measured table (tuning/sm90.json) where it names the call's op, element
size, plane and window, else from `rule`.
"""

import math
from dataclasses import dataclass
from typing import Any

from opkiln_pool.geometry import Geometry, lowest_terms
from opkiln_pool.gradient import Gradient, gradient_of, in_units
from opkiln_pool.pool_plan import key_of, power_of_two, tuning_rows

UNROLLED_WINDOWS = 32  # more windows than this run as a loop
CELL_SUMS = 64  # elements that a thread may sum
CELL_STEPS = 512  # additions of a thread, compiled as straight code
CELL_WINDOWS = 128  # windows that a thread may load
HALO = 8  # windows that it may load beside its own, along a row
SPREAD_ELEMENTS = 2**16  # largest plane that one window's gradient is spread over
SPREAD_COLUMNS = 2048  # of these, written at a time
BAND_ELEMENTS = 8192  # of a band of rows, which a program sums
BAND_HOLDERS = 16  # windows that may hold an element of a band


@dataclass(frozen=True, slots=True)
class BackwardTiling:
    """What the tuning table sets.

    variant: "cells", "gather", "spread" or "bands", the kernel. block: items a program (spread:
    planes; bands: rows at a time). v: cells of a row a thread (cells). static: sizes and strides
    compiled in (cells, gather). cache: hint for the stores.
    """

    variant: str
    block: int
    num_warps: int
    v: int = 1
    static: bool = False
    cache: str = ""


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """A tiling, the grid, and the kernel's arguments after its tensors. `source`: "rule", or the
    label of the table's row.
    """

    tiling: BackwardTiling
    source: str
    grid: int
    arguments: tuple[Any, ...]
    constexprs: dict[str, Any]


def holders(g: Geometry) -> tuple[int, ...]:
    """For each dim, the most windows that hold an element."""
    if g.adaptive:
        return tuple(-(-(p - 1 + q) // p) for p, q in lowest_terms(g.sizes, g.outs))
    spans = ((k - 1) * d + 1 for k, d in zip(g.kernel, g.dilation, strict=True))
    return tuple(min(-(-span // s), n) for span, s, n in zip(spans, g.stride, g.outs, strict=True))


def axis_taps(
    kernel: int, stride: int, padding: int, dilation: int
) -> tuple[int, int, tuple[int, ...]]:
    """(FIRST, NEAR, TAPS) along one dim of `window_cells`: element q * stride + r is tap
    TAPS[i * stride + r] of window q + FIRST + i, i < NEAR, or outside it where that is -1.
    """
    found = {}
    for tap in range(kernel):
        delta, r = divmod(tap * dilation - padding, stride)
        found[-delta, r] = tap
    first, last = (f(delta for delta, _ in found) for f in (min, max))
    near = last - first + 1
    taps = [found.get((first + i, r), -1) for i in range(near) for r in range(stride)]
    return first, near, tuple(taps)


def all_taps(g: Geometry) -> tuple[Any, Any, Any]:
    """(FIRST, NEAR, TAPS) of `window_cells`."""
    dims = zip(g.kernel, g.stride, g.padding, g.dilation, strict=True)
    first, near, taps = zip(*(axis_taps(*dim) for dim in dims), strict=True)
    return first, near, taps


def piece(g: Geometry, v: int) -> int:
    """Elements of a row that are stored together: the largest power of two up to 16 bytes that
    divides v cells.
    """
    row = v * g.stride[2]
    return min(row & -row, 16 // g.itemsize)


def channel_lanes(b: Gradient) -> int:
    """Channels of a load where they are innermost: 16 bytes, or what divides them; else 1."""
    if not b.pool.channels_last or b.channels is None:
        return 1
    lanes = math.gcd(16 // b.pool.itemsize, b.channels)
    return lanes if all(r.unit(lanes, b.counts, 1) == lanes for r in b.read) else 1


def cells_fit(g: Geometry, v: int, lanes: int = 1) -> bool:
    """Whether cells_kernel serves a pool with v cells a thread, in code of bounded size."""
    v *= lanes
    if g.adaptive or v * math.prod(g.stride) > CELL_SUMS:
        return False
    if v * math.prod(g.kernel) > CELL_STEPS:
        return False
    depths, rows, columns = all_taps(g)[1]
    near = depths * rows * (v + (columns - 1) * lanes)
    return columns <= HALO + 1 and near <= CELL_WINDOWS


def spread_fits(g: Geometry) -> bool:
    """Whether spread_kernel serves a pool: each plane is one window, and one stretch of memory."""
    return g.is_whole() and not g.channels_last and math.prod(g.sizes) <= SPREAD_ELEMENTS


def band_rows(g: Geometry) -> int:
    """The most rows of a band."""
    return -(-g.sizes[1] // g.outs[1])


def bands_fit(g: Geometry) -> bool:
    """Whether bands_kernel serves a pool."""
    if not g.adaptive or g.channels_last:
        return False
    few = math.prod(holders(g)) <= BAND_HOLDERS
    return few and band_rows(g) * power_of_two(g.sizes[2]) <= BAND_ELEMENTS


def reads_vectors(b: Gradient, v: int) -> bool:
    """Whether v windows of a row are one vector, whole or outside the row."""
    whole = v > 1 and b.pool.outs[2] % v == 0 and not b.pool.channels_last
    return whole and all(t.unit(v, b.counts, 4) == v for t in b.read)


def rule(b: Gradient) -> BackwardTiling:
    """A tiling for any gradient, where the table is silent."""
    g = b.pool
    if spread_fits(g):
        columns = min(power_of_two(math.prod(g.sizes)), SPREAD_COLUMNS)
        return BackwardTiling("spread", SPREAD_COLUMNS // columns, 4)
    if bands_fit(g):
        columns = power_of_two(g.sizes[2])
        warps = min(max(band_rows(g) * columns // 1024, 1), 8)
        lanes = warps * 32 * math.gcd(16 // g.itemsize, g.sizes[2])
        return BackwardTiling("bands", max(lanes // columns, 1), power_of_two(warps))
    # 16 bytes of a row, or what divides it; less was slower, and so were several pieces a thread
    # (H200, sincnet: 10.78 us with v=2, 14.91 with 8). Odd rows too (alexnet: 10.72, v=2 12.13).
    unit = math.gcd(16 // g.itemsize, g.sizes[2])
    v = (unit if unit > 1 else 16 // g.itemsize) // g.stride[2]
    v = max(1 << v.bit_length() >> 1, 1)
    lanes = channel_lanes(b)
    v = 1 if g.channels_last else v
    while v > 1 and not cells_fit(g, v):
        v //= 2
    if cells_fit(g, v, lanes):
        return BackwardTiling("cells", 128, 4, v=v)
    single = not g.channels_last and g.sizes[2] % 2 == 1  # else a vector a thread
    return BackwardTiling("gather", 256 if single else 128, 4, static=g.adaptive)


def tuned(op: str, b: Gradient) -> tuple[BackwardTiling, str] | None:
    """The table's row for this gradient in its plain layout."""
    step = math.prod(b.pool.outs)
    _, h, w = b.pool.outs
    dense = (step, 0, h * w, w, 1)
    for t in b.read:
        seen = zip(b.counts, t.strides, dense, strict=True)
        if b.channels is not None or any(n > 1 and s != want for n, s, want in seen):
            return None
        if not t.aligned:
            return None
    key = key_of(op, b.pool)
    for row in tuning_rows():
        if all(row.get(k) == v for k, v in key.items()):
            return BackwardTiling(**row["use"]), row["label"]
    return None


def plan_for(call: Any, tiling: BackwardTiling | None = None) -> BackwardPlan:
    """The plan of a backward call; of a tiling that a probe or a test asks for."""
    b = gradient_of(call)
    found = (tiling, "given") if tiling else tuned(call.spec.name, b)
    use, source = found or (rule(b), "rule")
    make = {"cells": cells, "gather": gather, "spread": spread, "bands": bands}[use.variant]
    return BackwardPlan(use, source, *make(b, use))


Launch = tuple[int, tuple[Any, ...], dict[str, Any]]


def cells(b: Gradient, t: BackwardTiling) -> Launch:
    g = b.pool
    vectors, lanes = reads_vectors(b, t.v), channel_lanes(b)
    channels = None if b.channels is None else b.channels // lanes
    unit = t.v if vectors else lanes
    strides = in_units(b.grad.strides, unit), b.offset_strides(unit)
    first, near, taps = all_taps(g)
    n = [-(-size // s) for size, s in zip(g.sizes, g.stride, strict=True)]
    items = g.planes // lanes * n[0] * n[1] * -(-n[2] // t.v)
    constexprs = {
        "SHAPE": (g.sizes, g.outs, *strides) if t.static else None,
        **dict(zip(("TD", "TH", "TW"), taps, strict=True)),
        "FIRST": first,
        "NEAR": near,
        "KERNEL": g.kernel,
        "STRIDE": g.stride,
        "PADDING": g.padding,
        "DIVISOR": g.divisor,
        "VECTOR": vectors,
        "V": t.v,
        "PIECE": piece(g, t.v),
        "EVEN": g.sizes[2] % piece(g, t.v) == 0,
        "CHANNELS_LAST": g.channels_last,
        "LANES": lanes,
        "BLOCK": t.block,
        "WIDE": b.wide,
        "CACHE": t.cache,
    }
    arguments = (g.sizes, g.outs, channels, *strides, items, g.scale, *constexprs.values())
    return -(-items // t.block), arguments, constexprs


def gather(b: Gradient, t: BackwardTiling) -> Launch:
    g = b.pool
    vec, channels, vectors = math.gcd(16 // g.itemsize, g.sizes[2]), b.channels, False
    if g.channels_last and channels is not None:
        vec = channel_lanes(b)
        vectors = vec > 1
        channels //= vec
    unit = vec if vectors else 1
    strides = in_units(b.grad.strides, unit), b.offset_strides(unit)
    items = g.planes * math.prod(g.sizes) // vec
    windows = holders(g)
    constexprs = {
        "SHAPE": (g.sizes, g.outs, *strides) if t.static else None,
        "KERNEL": g.kernel,
        "STRIDE": g.stride,
        "PADDING": g.padding,
        "DILATION": g.dilation,
        "HOLDERS": windows,
        "DIVISOR": g.divisor,
        "ADAPTIVE": g.adaptive,
        "CHANNELS_LAST": g.channels_last,
        "VECTOR": vectors,
        "UNROLL": math.prod(windows) <= UNROLLED_WINDOWS,
        "VEC": vec,
        "BLOCK": t.block,
        "WIDE": b.wide,
        "CACHE": t.cache,
    }
    arguments = (g.sizes, g.outs, channels, *strides, items, g.scale, *constexprs.values())
    return -(-items // t.block), arguments, constexprs


def spread(b: Gradient, t: BackwardTiling) -> Launch:
    g = b.pool
    n = math.prod(g.sizes)
    constexprs = {
        "N": n,
        "BLOCK_M": t.block,
        "COLUMNS": min(power_of_two(n), SPREAD_COLUMNS),
        "WIDE": b.wide,
        "CACHE": t.cache,
    }
    scale = 1.0 / n if g.adaptive else g.scale
    steps = b.grad.strides[:2], b.offset_strides()[:2]
    arguments = (b.channels, *steps, g.planes, scale, *constexprs.values())
    return -(-g.planes // t.block), arguments, constexprs


def bands(b: Gradient, t: BackwardTiling) -> Launch:
    g = b.pool
    _, holders_h, holders_w = holders(g)
    constexprs = {
        "H": g.sizes[1],
        "W": g.sizes[2],
        "OH": g.outs[1],
        "OW": g.outs[2],
        "EXTENT_W": g.kernel[2],
        "HOLDERS_H": holders_h,
        "HOLDERS_W": holders_w,
        "STEPS": -(-band_rows(g) // t.block),
        "BLOCK_R": t.block,
        "BLOCK_W": power_of_two(g.sizes[2]),
        "WIDE": b.wide,
        "CACHE": t.cache,
    }
    strides = [(s[0], s[1], s[3], s[4]) for s in (b.grad.strides, b.offset_strides())]
    return g.planes * g.outs[1], (b.channels, *strides, *constexprs.values()), constexprs
