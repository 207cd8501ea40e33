"""How a pool is launched: which kernel serves a geometry, with which tiling and arguments.

A tiling comes from the user's own table where it has the call, else from the measured table
(tuning/sm90.json) where it names the call's op, element size, plane and window, else from `rule`.
"""

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from opkiln import tilings

from opkiln_pool.geometry import Geometry, compute_in_f32, geometry_of, pairs_in_asm

KERNEL = "pool"  # what a tiling of the user's is for
UNROLLED_TAPS = 64  # more taps than this run as a loop
PATCH_COLUMNS = 40  # columns of a row that a thread may hold
PATCH_ROWS = 32  # input rows under an output
PLANE_ELEMENTS = 2048  # longest plane that is reduced as one row of a tile
STRIP_ELEMENTS = 16384  # elements of the tiles of a strip
KEYED_ELEMENTS = 2**16  # of a plane of 16-bit values, whose position fits beside the value


@dataclass(frozen=True, slots=True)
class Tiling:
    """What the tuning table sets.

    variant: "patch", "taps", "plane" or "strip", the kernel. block: items a program (of a strip
    always 1, a row of outputs). v: outputs of a row a thread (patch). static: sizes and strides
    compiled in (patch, taps). evict, cache: hints. pairs: of an argmax of 16-bit values in a
    patch, two at once along columns (planes and strips always). step: elements of a plane, or rows
    of a strip, taken at a time (0: all).
    """

    variant: str
    block: int
    num_warps: int
    v: int = 1
    static: bool = False
    evict: str = ""
    cache: str = ""
    pairs: bool = False
    step: int = 0


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A tiling, the grid, and the kernel's arguments after its tensors. `source`: "rule",
    "your table", or the label of the table's row.
    """

    tiling: Tiling
    source: str
    grid: int
    arguments: tuple[Any, ...]
    constexprs: dict[str, Any]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def vector(g: Geometry) -> int:
    """Elements of the widest load that every row allows: 16 or 8 bytes; 0 if not even these."""
    unit = g.unit(16 // g.itemsize)
    return unit if unit >= 4 and not g.channels_last else 0


def least_v(g: Geometry) -> int:
    """Outputs that a thread needs to start every patch at a vector; 0 if patches do not fit."""
    vec = vector(g)
    if vec == 0 or g.adaptive or g.kernel[0] * g.kernel[1] > PATCH_ROWS:
        return 0
    v = vec // math.gcd(vec, g.stride[2])
    head, _, vectors, tail = pieces(g, v)
    if head + vectors * vec + tail > PATCH_COLUMNS:
        return 0
    return v if g.sizes[2] % vec == 0 or not past_the_end(g, v) else 0


def pieces(g: Geometry, v: int) -> tuple[int, int, int, int]:
    """(head, first vector, vectors, tail) of `window_patch.load_row` for v outputs."""
    vec = vector(g)
    low = -g.padding[2]
    high = (v - 1) * g.stride[2] + low + (g.kernel[2] - 1) * g.dilation[2]
    first, last = low // vec, high // vec
    head = tail = 0
    if last > first and (first + 1) * vec - low <= 2:
        head = (first + 1) * vec - low
        first += 1
    if last > first and high - last * vec + 1 <= 2:
        tail = high - last * vec + 1
        last -= 1
    return head, first, last - first + 1, tail


def past_the_end(g: Geometry, v: int) -> bool:
    """Whether some patch loads past a row's end."""
    vec = vector(g)
    _, first, vectors, tail = pieces(g, v)
    chunks = -(-g.outs[2] // v)
    return (chunks - 1) * v * g.stride[2] + (first + vectors) * vec + tail > g.sizes[2]


def strip_tile(g: Geometry) -> tuple[int, int, int]:
    """(rows, columns, outputs) of the tiles of a strip of one row of outputs."""
    rows = power_of_two(g.kernel[1])
    return rows, power_of_two(g.sizes[2]), power_of_two(max(g.outs[2], 1))


def rule(g: Geometry) -> Tiling:
    """A tiling for any geometry, where the table is silent."""
    if g.is_whole() and g.dense_plane() and math.prod(g.sizes) <= PLANE_ELEMENTS:
        return plane_rule(g)
    if g.adaptive and g.strides[4] == 1 and not g.channels_last and min(g.kernel[1:]) > 1:
        rows, columns, outs = strip_tile(g)
        keyed = g.itemsize > 2 or g.sizes[1] * g.sizes[2] <= KEYED_ELEMENTS
        if keyed and max(rows, outs) * columns <= STRIP_ELEMENTS:
            small = g.itemsize == 2 and rows <= 16 and max(rows, outs) * columns <= 1024
            # One warp needs no barriers: 5.41 us became 2.56 for spp-6x6. Only 16 bits were tried.
            return Tiling("strip", 1, 1 if small else 4, step=int(small and g.reduce != "avg"))
    v = least_v(g)
    if v:
        # Of 1 or 2 rows, an output costs 3 to 10 instructions more in pairs; of 3 or 9, fewer.
        return Tiling("patch", 128, num_warps=4, v=v, pairs=g.kernel[0] * g.kernel[1] > 2)
    return Tiling("taps", 128 if g.channels_last else 256, num_warps=4)


def plane_rule(g: Geometry) -> Tiling:
    """Eight threads a plane that their vectors cover in at most 8 steps, as measured for maxima of
    16 bits (global-1x1 with indices: 3.23 us became 2.46); else the whole plane at once.
    """
    n = math.prod(g.sizes)
    step = 8 * math.gcd(8, n)
    if g.itemsize == 2 and g.reduce != "avg" and step <= power_of_two(n) and n <= 8 * step:
        return Tiling("plane", 16, num_warps=4, step=step)
    return Tiling("plane", max(2048 // power_of_two(n), 1), num_warps=4)


@functools.cache
def tuning_table() -> dict[str, Any]:
    """tuning/sm90.json."""
    text = resources.files("opkiln_pool").joinpath("tuning/sm90.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def tuning_rows() -> list[dict[str, Any]]:
    """The table's tilings of the Triton kernels."""
    rows: list[dict[str, Any]] = tuning_table()["rows"]
    return rows


def key_of(op: str, g: Geometry) -> dict[str, Any]:
    """What a row of the table is found by: never the number of planes."""
    window = {k: list(getattr(g, k)) for k in ("kernel", "stride", "padding", "dilation")}
    sizes = {"sizes": list(g.sizes), "outs": list(g.outs)}
    return {"op": op, "itemsize": g.itemsize, **sizes, **window}


def tuned(op: str, g: Geometry) -> tuple[Tiling, str] | None:
    """The table's row for this geometry in its plain layout."""
    dense = g.channels is None and g.strides[0] == math.prod(g.sizes) and g.dense_plane()
    if not dense or g.unit(16) < math.gcd(16, math.prod(g.sizes), g.sizes[2]):
        return None
    key = key_of(op, g)
    for row in tuning_rows():
        if all(row.get(k) == v for k, v in key.items()):
            return Tiling(**row["use"]), row["label"]
    return None


def plan_for(call: Any) -> PoolPlan:
    """The plan of a call of any pool but mean_pooling."""
    g = geometry_of(call)
    own = tilings.taken(call, KERNEL, Tiling)
    found = (own, "your table") if own else tuned(call.spec.name, g)
    tiling, source = found or (rule(g), "rule")
    f32 = compute_in_f32(g.reduce, call.tensors.input.dtype, call.device)
    make = {"patch": patch, "taps": taps, "plane": plane, "strip": strip}[tiling.variant]
    grid, arguments, constexprs = make(g, tiling, f32, pairs_in_asm(call.device))
    return PoolPlan(tiling, source, grid, arguments, constexprs)


Launch = tuple[int, tuple[Any, ...], dict[str, Any]]


def pairs_of(g: Geometry, asm: bool) -> bool | None:
    """None: one value at a time. Else values are taken in pairs, by assembly or without."""
    return asm if g.reduce == "argmax" and g.itemsize == 2 else None


def patch(g: Geometry, t: Tiling, f32: bool, asm: bool) -> Launch:
    vec = vector(g)
    strides = tuple(s // vec for s in g.strides[:4])
    head, first, vectors, tail = pieces(g, t.v)
    items = g.planes * g.outs[0] * g.outs[1] * -(-g.outs[2] // t.v)
    d, h, _ = g.check
    pairs = pairs_of(g, asm) if t.pairs else None
    constexprs = {
        "SHAPE": (g.sizes, g.outs, strides) if t.static else None,
        "REDUCE": g.reduce,
        "F32": f32 and pairs is None,  # pairs are compared as f32 where there is no assembly
        "KERNEL": g.kernel,
        "STRIDE": g.stride,
        "PADDING": g.padding,
        "DILATION": g.dilation,
        "CHECK": (d, h, past_the_end(g, t.v)),
        "CAN_MISS": g.can_miss,
        "DIVISOR": g.divisor,
        "HEAD": head,
        "FIRST": first,
        "VECTORS": vectors,
        "TAIL": tail,
        "EVEN": g.outs[2] % t.v == 0,
        "VEC": vec,
        "V": t.v,
        "BLOCK": t.block,
        "WIDE": g.wide,
        "EVICT": t.evict,
        "CACHE": t.cache,
        "PAIRS": pairs,
    }
    arguments = (g.sizes, g.outs, g.channels, strides, items, g.scale)
    return -(-items // t.block), arguments, constexprs


def taps(g: Geometry, t: Tiling, f32: bool, asm: bool) -> Launch:
    vec = 16 // g.itemsize
    channels = g.channels
    if not (g.channels_last and channels is not None and channels % vec == 0
            and g.unit(vec, unit_dim=1) == vec):  # fmt: skip
        vec = 1
    elif channels is not None:
        channels //= vec
    strides = tuple(1 if vec > 1 and i == 1 else s // vec for i, s in enumerate(g.strides))
    items = g.outputs // vec
    constexprs = {
        "SHAPE": (g.sizes, g.outs, strides) if t.static else None,
        "REDUCE": g.reduce,
        "F32": f32,
        "ADAPTIVE": g.adaptive,
        "KERNEL": g.kernel,
        "STRIDE": g.stride,
        "PADDING": g.padding,
        "DILATION": g.dilation,
        "CHECK": g.check,
        "CAN_MISS": g.can_miss,
        "DIVISOR": g.divisor,
        "CHANNELS_LAST": g.channels_last,
        "WIDE": g.wide,
        "UNROLL": math.prod(g.kernel) <= UNROLLED_TAPS,
        "VEC": vec,
        "BLOCK": t.block,
        "CACHE": t.cache,
    }
    arguments = (g.sizes, g.outs, channels, strides, items, g.scale)
    return -(-items // t.block), arguments, constexprs


def plane(g: Geometry, t: Tiling, f32: bool, asm: bool) -> Launch:
    n = math.prod(g.sizes)
    g = replace(g, strides=(*g.strides[:4], 1))  # of a plane one element wide too
    align = math.gcd(g.unit(16 // g.itemsize), n)
    constexprs = {
        "N": n,
        "ALIGN": align,
        "REDUCE": g.reduce,
        "F32": f32,
        "WIDE": g.wide,
        "BLOCK_M": t.block,
        "COLUMNS": min(t.step or PLANE_ELEMENTS, power_of_two(n)),
        "EVICT": t.evict,
        "PAIRS": pairs_of(g, asm),
    }
    scale = 1.0 / n if g.adaptive else g.scale
    steps = (g.strides[0] // align, g.strides[1] // align)
    return -(-g.planes // t.block), (g.channels, *steps, g.planes, scale), constexprs


def strip(g: Geometry, t: Tiling, f32: bool, asm: bool) -> Launch:
    align = math.gcd(g.unit(16 // g.itemsize), g.sizes[2])
    rows, columns, outs = strip_tile(g)
    constexprs = {
        "H": g.sizes[1],
        "W": g.sizes[2],
        "OH": g.outs[1],
        "OW": g.outs[2],
        "EXTENT_H": g.kernel[1],
        "EXTENT_W": g.kernel[2],
        "ALIGN": align,
        "REDUCE": g.reduce,
        "F32": f32,
        "WIDE": g.wide,
        "BLOCK_R": min(t.step or rows, rows),
        "BLOCK_W": columns,
        "BLOCK_OW": outs,
        "PAIRS": pairs_of(g, asm),
    }
    steps = (g.strides[0] // align, g.strides[1] // align, g.strides[3] // align)
    return g.planes * g.outs[1], (g.channels, *steps), constexprs
