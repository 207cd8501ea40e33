"""How a convolution is launched: which kernel serves a geometry, with which tiling and arguments.

A tiling comes from the measured table (tuning/sm90.json) where it names the call's geometry, else
from `rule`. Neither looks at the batch.
"""

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

from opkiln_conv.geometry import Geometry, geometry_of

ALIGN = 16  # elements: what packed rows of channels are multiples of
UNROLLED_TAPS = 32  # more taps than this run as a loop
PACKED_TAPS = 128  # taps of a tile that is turned at once
PACK_CHANNELS, PACK_PLACES, PACK_ELEMENTS = 64, 64, 4096
WARPS = 132 * 4  # of one tile a multiprocessor


@dataclass(frozen=True, slots=True)
class Tiling:
    """What the tuning table sets.

    variant: "gather", "pointwise", "packed" or "channelwise", the kernel. block_m, block_n,
    block_k: channels, pixels and products of a tile and step. stages: of the pipeline. split:
    programs that share a tile's products. static: sizes and strides compiled in. ahead: operands
    loaded one step ahead (gather).
    """

    variant: str
    block_m: int
    block_n: int
    block_k: int = 0
    num_warps: int = 4
    stages: int = 3
    split: int = 1
    static: bool = False
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Pack:
    """The launch of pack_kernel. x, w: elements of what it writes; 0: that one is not packed."""

    grid: int
    arguments: tuple[Any, ...]
    constexprs: dict[str, Any]
    x: int
    w: int


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """A tiling, the grid, and the kernel's arguments after its tensors. tiles: of the output, where
    they have partial sums. source: "rule", or the label of the table's row.
    """

    tiling: Tiling
    source: str
    grid: int
    arguments: tuple[Any, ...]
    constexprs: dict[str, Any]
    pack: Pack | None = None

    @property
    def tiles(self) -> int:
        return self.grid // self.tiling.split if self.tiling.split > 1 else 0

    @property
    def partials(self) -> int:
        """Elements of the partial sums."""
        t = self.tiling
        return self.grid * t.block_m * t.block_n if t.split > 1 else 0


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def clamp(n: int, low: int, high: int) -> int:
    """A power of two from low to high, at least n where the range has one."""
    return min(max(power_of_two(n), low), high)


def dense_input(g: Geometry) -> bool:
    """Whether x is contiguous."""
    return g.plain and (g.batch == 1 or g.x_strides[0] == g.groups * g.of_group * g.places)


def dense_weight(g: Geometry) -> bool:
    """Whether w is contiguous."""
    return g.weight_plain and (g.groups * g.group_outs == 1 or g.w_strides[0] == g.terms)


def rows_of_channels(g: Geometry, t: Tiling) -> tuple[bool, bool]:
    """Whether x, and w, come as aligned rows of channels that packed_kernel can read."""
    if not g.aligned or g.of_group % max(t.block_k, ALIGN):
        return False, False
    steps = (g.x_strides[0] if g.batch > 1 else 0, *g.x_strides[2:])
    x = g.x_strides[1] == 1 and all(s % ALIGN == 0 for s in steps)
    return x, g.weight_channels_inner and g.w_strides[0] % ALIGN == 0


def can_use(g: Geometry, t: Tiling) -> bool:
    """Whether a variant serves a geometry."""
    if t.variant == "channelwise":
        return g.of_group == 1
    if t.variant == "pointwise":
        return g.groups == 1 and g.pointwise and dense_input(g) and dense_weight(g)
    if t.variant == "packed":
        x, w = rows_of_channels(g, t)
        turned = (x or dense_input(g)) and (w or (dense_weight(g) and g.taps <= PACKED_TAPS))
        return g.groups == 1 and turned
    return True


def parts(tiles: int, steps: int) -> int:
    """Programs a tile: enough to give every multiprocessor one, of at least four steps each."""
    return max(min(132 // max(tiles, 1), steps // 4, 8), 1)


def rule(g: Geometry, matrix_units: bool = True) -> Tiling:
    """A tiling for any geometry, where the table is silent. matrix_units: for 16 bits and TF32."""
    if g.of_group == 1 and g.groups > 1 and g.group_outs < 8:
        if g.channels_inner:
            return Tiling("channelwise", 32, 16)
        return Tiling("channelwise", 1, clamp(g.pixels, 32, 256), num_warps=2)
    if not matrix_units:
        return Tiling("gather", clamp(g.group_outs, 16, 32), clamp(g.pixels, 16, 64), 16)
    m = clamp(g.group_outs, 16, 128)
    n = clamp(g.pixels, 16, 128)
    if m * n > 64 * 128 and -(-g.group_outs // m) * -(-g.pixels // n) < 132:
        n = max(n // 2, 16)  # small images: more programs
    wide = Tiling("pointwise", m, n, clamp(g.terms, 16, 64), num_warps=8 if m * n > 8192 else 4)
    tiles = -(-g.group_outs // m) * -(-g.pixels // n)
    if can_use(g, wide):
        return replace(wide, split=parts(tiles, -(-g.of_group // wide.block_k)))
    packed = replace(wide, variant="packed", block_k=64 if g.of_group > 32 else 32)
    if g.of_group >= 16 and g.terms >= 128 and can_use(g, packed):
        steps = g.taps * -(-g.of_group // packed.block_k)
        return replace(packed, split=parts(tiles, steps), stages=4)
    k = clamp(g.terms, 16, 32)
    m, n = min(m, 64), min(n, 64)
    return Tiling("gather", m, n, k, ahead=g.terms > k)


@functools.cache
def tuning_rows() -> tuple[dict[str, Any], ...]:
    """The rows of tuning/sm90.json."""
    text = resources.files("opkiln_conv").joinpath("tuning/sm90.json").read_text("utf-8")
    return tuple(json.loads(text)["rows"])


def key_of(g: Geometry) -> dict[str, Any]:
    """What a row of the table is found by: never the batch."""
    names = ("sizes", "outs", "kernel", "stride", "padding", "dilation")
    numbers = ("itemsize", "groups", "of_group", "group_outs")
    return {k: getattr(g, k) for k in numbers} | {k: list(getattr(g, k)) for k in names}


def tuned(g: Geometry) -> tuple[Tiling, str] | None:
    """The table's row for this geometry in its plain layout."""
    if not (g.aligned and dense_input(g) and dense_weight(g)):
        return None
    key = key_of(g)
    for row in tuning_rows():
        if all(row[k] == v for k, v in key.items()):
            return Tiling(**row["use"]), row["label"]
    return None


def plan_for(call: Any) -> ConvPlan:
    """The plan of a call of conv1d, conv2d or conv3d."""
    g, x = geometry_of(call), call.tensors.input
    tf32 = bool(call.params.allow_tf32)
    matrix_units = x.dtype != torch.float32 or tf32
    found = tuned(g) if x.dtype != torch.float32 else None
    tiling, source = found or (rule(g, matrix_units), "rule")
    stride_b = 0 if call.tensors.bias is None else call.tensors.bias.stride[0]
    product = {
        "F32": x.dtype == torch.bfloat16 and x.device.type == "cpu",
        "PRECISION": "tf32" if tf32 else "ieee",
        "SPLIT": tiling.split,
    }
    make = {"gather": gather, "pointwise": pointwise, "packed": packed, "channelwise": channelwise}
    grid, arguments, constexprs, pack = make[tiling.variant](g, tiling, stride_b, product)
    return ConvPlan(tiling, source, grid, arguments, constexprs, pack)


Launch = tuple[int, tuple[Any, ...], dict[str, Any], Pack | None]


def window(g: Geometry) -> dict[str, Any]:
    """The constants that describe the window."""
    return {
        "KERNEL": g.kernel,
        "STRIDE": g.stride,
        "PADDING": g.padding,
        "DILATION": g.dilation,
        "CHECK": g.check,
    }


def gather(g: Geometry, t: Tiling, stride_b: int, product: dict[str, Any]) -> Launch:
    strides = (g.x_strides, g.w_strides, g.out_strides)
    shape = ((g.of_group, g.group_outs), g.sizes, g.outs, *strides)
    pixels = g.batch * g.pixels
    grid = -(-pixels // t.block_n) * g.groups * -(-g.group_outs // t.block_m) * t.split
    inner = g.channels_inner
    constexprs = {
        "SHAPE": shape if t.static else None,
        **window(g),
        "INNER": inner,
        "W_DENSE": g.weight_channels_inner if inner else g.weight_plain,
        "WIDE": g.wide,
        **product,
        "AHEAD": t.ahead,
        "BLOCK_M": t.block_m,
        "BLOCK_N": t.block_n,
        "BLOCK_K": t.block_k,
    }
    return grid, (*shape, stride_b, g.batch), constexprs, None


def pointwise(g: Geometry, t: Tiling, stride_b: int, product: dict[str, Any]) -> Launch:
    align_c = math.gcd(ALIGN, g.of_group) if g.aligned else 1
    align_p = math.gcd(ALIGN, g.pixels) if g.aligned else 1
    shape = (g.group_outs, g.of_group // align_c, g.pixels // align_p)
    grid = g.batch * -(-g.pixels // t.block_n) * -(-g.group_outs // t.block_m) * t.split
    constexprs = {
        "SHAPE": shape if t.static else None,
        "ALIGN_C": align_c,
        "ALIGN_P": align_p,
        "WIDE": g.wide,
        **product,
        "EVEN_K": g.of_group % t.block_k == 0,
        "BLOCK_M": t.block_m,
        "BLOCK_N": t.block_n,
        "BLOCK_K": t.block_k,
    }
    return grid, (*shape, stride_b), constexprs, None


def packed(g: Geometry, t: Tiling, stride_b: int, product: dict[str, Any]) -> Launch:
    x_rows, w_rows = rows_of_channels(g, t)
    pitch = -(-g.of_group // t.block_k) * t.block_k
    steps = (g.places, g.sizes[1] * g.sizes[2], g.sizes[2], 1)
    x_units = tuple(s * pitch // ALIGN for s in steps)
    if x_rows:
        x_units = tuple(s // ALIGN for s in (g.x_strides[0], *g.x_strides[2:]))
    w_units = (g.taps * pitch // ALIGN, pitch // ALIGN)
    if w_rows:
        w_units = (g.w_strides[0] // ALIGN, g.of_group // ALIGN)
    shape = (
        g.group_outs, pitch // t.block_k, g.sizes, g.outs, x_units, w_units, g.out_strides
    )  # fmt: skip
    grid = g.batch * -(-g.pixels // t.block_n) * -(-g.group_outs // t.block_m) * t.split
    constexprs = {
        "SHAPE": shape if t.static else None,
        "ALIGN": ALIGN,
        **window(g),
        "WIDE": g.wide or g.batch * g.places * pitch >= 2**31 - 2**24,
        **product,
        "BLOCK_M": t.block_m,
        "BLOCK_N": t.block_n,
        "BLOCK_K": t.block_k,
    }
    pack = None if x_rows and w_rows else pack_of(g, pitch, not x_rows, not w_rows)
    return grid, (*shape, stride_b), constexprs, pack


def pack_of(g: Geometry, pitch: int, x: bool, w: bool) -> Pack:
    """The launch that packs x, w or both."""
    align_p = math.gcd(ALIGN, g.places) if g.aligned else 1
    block_c, block_t = min(PACK_CHANNELS, power_of_two(pitch)), power_of_two(g.taps)
    block_r = max(PACK_ELEMENTS // (block_c * block_t), 1)
    rows = g.group_outs
    blocks = x * g.batch * -(-g.places // PACK_PLACES) + w * -(-rows // block_r)
    arguments = (g.batch, g.of_group, g.places // align_p, rows, pitch // ALIGN)
    constexprs = {
        "ALIGN": ALIGN,
        "ALIGN_P": align_p,
        "TAPS": g.taps,
        "BLOCK_C": block_c,
        "BLOCK_P": PACK_PLACES,
        "BLOCK_T": block_t,
        "BLOCK_R": block_r,
    }
    sizes = (x * g.batch * g.places * pitch, w * rows * g.taps * pitch)
    return Pack(-(-pitch // block_c) * blocks, arguments, constexprs, *sizes)


def channelwise(g: Geometry, t: Tiling, stride_b: int, product: dict[str, Any]) -> Launch:
    strides = (g.x_strides, g.w_strides, g.out_strides)
    outs = g.groups * g.group_outs
    shape = ((g.group_outs, outs), g.sizes, g.outs, *strides)
    pixels = g.batch * g.pixels
    constexprs = {
        "SHAPE": shape if t.static else None,
        **window(g),
        "UNROLL": g.taps <= UNROLLED_TAPS,
        "WIDE": g.wide,
        "BLOCK_M": t.block_m,
        "BLOCK_N": t.block_n,
    }
    grid = -(-pixels // t.block_n) * -(-outs // t.block_m)
    return grid, (*shape, stride_b, g.batch), constexprs, None
