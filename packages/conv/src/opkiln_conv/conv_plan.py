"""How a convolution is launched: the kernel of its tiling, the grid and the arguments."""

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from opkiln_conv import patch, shift, stem
from opkiln_conv.geometry import Geometry, geometry_of
from opkiln_conv.patch import PatchPlan, PatchTiling
from opkiln_conv.shift import ShiftPlan, ShiftTiling
from opkiln_conv.stem import StemPlan, StemTiling
from opkiln_conv.tilings import (
    ALIGN,
    CompiledTiling,
    Tiling,
    opaque,
    power_of_two,
    rows_of_channels,
    rule,
    slower_than_cudnn,
    tuned,
)

CompiledPlan = PatchPlan | ShiftPlan | StemPlan
# What plans and launches a tiling of an engine in CUDA C++: its `plan_of` and `prepare`.
ENGINES: dict[type[CompiledTiling], ModuleType] = {
    PatchTiling: patch,
    ShiftTiling: shift,
    StemTiling: stem,
}
UNROLLED_TAPS = 32  # more taps than this run as a loop
PACK_CHANNELS, PACK_PLACES, PACK_ELEMENTS = 64, 64, 4096


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


def better_in_cudnn(call: Any) -> str:
    """Why a 16-bit convolution that the table does not name is left to cuDNN; "": it is not."""
    g = geometry_of(call)
    return "" if tuned(g, False) else slower_than_cudnn(g, rule(g))


def plan_for(call: Any) -> ConvPlan | CompiledPlan:
    """The plan of a call of conv1d, conv2d or conv3d."""
    g, x = geometry_of(call), call.tensors.input
    tf32 = bool(call.params.allow_tf32)
    matrix_units = x.dtype != torch.float32 or tf32
    has_bias = call.tensors.bias is not None
    found = None
    if x.dtype != torch.float32:
        found = tuned(g, patch.serves(call, g), has_bias)
    tiling, source = found or (rule(g, matrix_units), "rule")
    if not isinstance(tiling, Tiling):
        plan: CompiledPlan = ENGINES[type(tiling)].plan_of(call, g, tiling, source)
        return plan
    stride_b = call.tensors.bias.stride[0] if has_bias else 0
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


def out_unit(g: Geometry) -> int:
    """Elements that the pitch of the output's channels is a multiple of; 0: pixels are spread."""
    return math.gcd(ALIGN, g.pixels) if g.out_strides[2] == 1 else 0


def lies_in_one_image(g: Geometry, t: Tiling) -> bool:
    """Whether gather's tiles keep to one image: where that wastes an eighth at most."""
    return g.pixels % t.block_n == 0 or g.pixels >= 8 * t.block_n


def gather(g: Geometry, t: Tiling, stride_b: int, product: dict[str, Any]) -> Launch:
    strides = (g.x_strides, g.w_strides, g.out_strides)
    shape = ((g.of_group, g.group_outs), g.sizes, g.outs, *strides)
    each = lies_in_one_image(g, t)
    blocks = g.batch * -(-g.pixels // t.block_n) if each else -(-g.batch * g.pixels // t.block_n)
    grid = blocks * g.groups * -(-g.group_outs // t.block_m) * t.split
    inner = g.channels_inner
    constexprs = {
        "SHAPE": shape if t.static else None,
        **window(g),
        "INNER": inner,
        "W_DENSE": g.weight_channels_inner if inner else g.weight_plain,
        "WIDE": g.wide,
        **product,
        "AHEAD": t.ahead,
        "UNIT": out_unit(g),
        "EACH": each,
        "FLAT": g.outs[:2] == (1, 1),
        "OPAQUE": opaque(t),
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
        "UNIT": out_unit(g),
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
