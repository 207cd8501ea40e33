"""Which tiling serves a geometry: the measured table's (tuning/sm90.json) where it names the
geometry, else the rule's. Neither looks at the batch.
"""

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from opkiln_conv.geometry import Geometry
from opkiln_conv.patch import PatchTiling
from opkiln_conv.shift import ShiftTiling
from opkiln_conv.stem import StemTiling

CompiledTiling = PatchTiling | ShiftTiling | StemTiling
# Engines in CUDA C++, as a row of the table names them; the first that it has serves.
COMPILED: dict[str, type[CompiledTiling]] = {
    "shift": ShiftTiling,
    "stem": StemTiling,
    "patch": PatchTiling,
}
ALIGN = 16  # elements: what packed rows of channels are multiples of
PACKED_TAPS = 128  # taps of a tile that is turned at once
BUSY, FEW = 96, 32  # tiles that keep 132 multiprocessors at work, and that leave most idle
LONG = 96  # steps
# Products an image from which the rule is slower than cuDNN where it loses at all; of 2-D windows
# that do not step or step over inputs.
MANY, MANY_WHOLE, MANY_STRIDED = 2**25, 2**31, 2**27


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


def opaque(t: Tiling) -> bool:
    """Whether gather hides from the compiler that its first product is number 0.

    Where warps lie along the products, a product's number depends on the warp. Known to be small,
    such numbers become packed 16-bit arithmetic, which ptxas (of Triton 3.6) got wrong: two tilings
    of 36 products failed on the H200 although their PTX computes the right addresses.
    """
    return t.split == 1 and t.block_n < 32 * t.num_warps


def parts(tiles: int, steps: int) -> int:
    """Programs a tile: enough to give every multiprocessor one, of at least four steps each."""
    return max(min(132 // max(tiles, 1), steps // 4, 8), 1)


def tiles_of(g: Geometry, m: int, n: int) -> int:
    """Tiles of one image."""
    return -(-g.group_outs // m) * -(-g.pixels // n)


def widest(g: Geometry, m: int, widths: tuple[int, ...]) -> int:
    """The first width of a tile that leaves work for most multiprocessors, else the last."""
    return next((n for n in widths if tiles_of(g, m, n) >= BUSY), widths[-1])


def rule(g: Geometry, matrix_units: bool = True) -> Tiling:
    """A tiling for any geometry, where the table is silent. matrix_units: for 16 bits and TF32."""
    if g.of_group == 1 and g.groups > 1 and g.group_outs < 8:
        if g.channels_inner:
            return Tiling("channelwise", 32, 16)
        return Tiling("channelwise", 1, clamp(g.pixels, 32, 256))
    if not matrix_units:
        return Tiling("gather", clamp(g.group_outs, 16, 32), clamp(g.pixels, 16, 64), 16)
    m, least = clamp(g.group_outs, 16, 64), clamp(g.pixels, 16, 32)
    wide = Tiling("pointwise", m, least, clamp(g.terms, 16, 64), stages=4)
    if can_use(g, wide):
        n = widest(g, m, (128, 64, least))
        # Odd planes are loaded without asynchronous copies: only more programs hide that.
        steps = -(-g.of_group // wide.block_k)
        split = parts(tiles_of(g, m, n), steps) if g.pixels % 2 else 1
        # Narrow tiles wait for their copies: of 8 steps 4 stages took 4.13 us, 8 took 3.49.
        return replace(wide, block_n=n, split=split, stages=8 if n <= 32 and steps >= 8 else 4)
    packed = replace(wide, variant="packed", block_k=64 if g.of_group > 32 else 32)
    if g.of_group >= 16 and g.terms >= 128 and can_use(g, packed):
        return packed_rule(g, packed, least)
    if g.terms > (32 if g.groups > 1 else 64):  # grouped 3x3: 8.5 us, 14.2 by 16x128x64
        n = clamp(g.pixels, 16, 64)
        return Tiling("gather", m, n, 32, ahead=True)
    m = min(m, 32)
    n = clamp(g.pixels, 16, 64 if m > 16 else 128)
    return Tiling("gather", m, n, clamp(g.terms, 16, 64), stages=2)


def packed_rule(g: Geometry, t: Tiling, least: int) -> Tiling:
    """Splitting costs 2 to 4 us on the H200, so only few tiles, or long sums, are worth it."""
    steps = g.taps * -(-g.of_group // t.block_k)
    if g.group_outs >= 128 and tiles_of(g, 128, 128) >= 2 * BUSY:
        return replace(t, block_m=128, block_n=128, num_warps=4, stages=3)
    if steps >= LONG:
        n = clamp(g.pixels, 16, 128)
        return replace(t, block_n=n, split=parts(tiles_of(g, t.block_m, n), steps), stages=3)
    n = widest(g, t.block_m, (256, 128, 64, least) if t.block_k == 32 else (128, 64, least))
    tiles = tiles_of(g, t.block_m, n)
    split = parts(tiles, steps) if tiles < FEW else 1
    return replace(t, block_n=n, split=split, stages=3 if n == 256 else 4)


def slower_than_cudnn(g: Geometry, t: Tiling) -> str:
    """What it is about a geometry that makes the rule's tiling, in 16 bits, lose to cuDNN; "" where
    it is not known to. In us on the H200, of the rule and of torch: 12.0 and 8.0 (odd planes), 107
    and 95, grouped 114 and 28 (3-D by gather), 23.4 and 19.2 (5x5, stride 2), 91 and 69 (3x3).
    """
    products = g.groups * g.group_outs * g.pixels * g.terms
    if t.variant == "pointwise" and g.pixels % 2 and products >= MANY:
        return "1x1 windows over an odd number of pixels"
    if t.variant == "gather" and g.kernel[0] > 1 and products >= MANY:
        return "3-D windows of few channels or of groups"
    most = MANY_WHOLE if max(g.stride) == 1 else MANY_STRIDED
    flat = g.kernel[0] == 1 and g.kernel[1] > 1 and max(g.dilation) == 1
    if t.variant == "packed" and flat and products >= most:
        return f"2-D windows of {most} products an image or more"
    return ""


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


def tuned(
    g: Geometry, compiled: bool, bias: bool = False
) -> tuple[Tiling | CompiledTiling, str] | None:
    """The table's row for this geometry in its plain layout. compiled: CUDA C++ may serve. bias:
    the call has one, for which a row may have a tiling of its own.
    """
    if not (g.aligned and dense_input(g) and dense_weight(g)):
        return None
    key = key_of(g)
    for row in tuning_rows():
        if all(row[k] == v for k, v in key.items()):
            for engine, make in COMPILED.items() if compiled else ():
                if engine in row:
                    return make(**row[engine]), row["label"]
            return Tiling(**row["biased" if bias and "biased" in row else "use"]), row["label"]
    return None
