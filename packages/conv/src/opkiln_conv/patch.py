"""How a convolution of contiguous tensors runs in one launch: csrc/patch.cu, compiled for its
geometry. Only the measured table chooses it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_conv.geometry import Geometry
from opkiln_conv.sources import source

EXTRA = "opkiln-conv[cu13]"
TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
SHARED_BYTES = 227 * 1024  # of a CTA
OFFSETS = 2**16  # of a patch, in 16 bits
MAX_THREADS, MAX_CLUSTER = 1024, 8


@dataclass(frozen=True, slots=True)
class PatchTiling:
    """See csrc/patch.cu. tile_h, tile_w: rows and columns of outputs; of 1x1, one row of pixels."""

    tile_h: int
    tile_w: int
    chunk: int
    split: int = 1
    wm: int = 1
    wn: int = 1
    wk: int = 4
    mt: int = 4
    nt: int = 4


@dataclass(frozen=True, slots=True)
class PatchPlan:
    """The launch of a tiling. source: the label of the table's row."""

    tiling: PatchTiling
    source: str
    grid: int
    threads: int
    shared_bytes: int
    macros: dict[str, Any]


def common_factor(*numbers: int) -> int:
    """Elements of an access, 16 bytes at most, that divides all."""
    return math.gcd(8, *numbers)


def window_of(g: Geometry) -> dict[str, int]:
    """The macros of a geometry. 1x1 is flattened."""
    shapes = {"I": g.sizes, "O": g.outs, "K": g.kernel, "S": g.stride, "P": g.padding}
    if g.pointwise:
        shapes |= {"I": (1, 1, g.places), "O": (1, 1, g.pixels), "S": (1, 1, 1)}
    shapes["D"] = g.dilation
    return {f"{k}{dim}": v[i] for k, v in shapes.items() for i, dim in enumerate("DHW")}


def macros_of(g: Geometry, t: PatchTiling) -> dict[str, int]:
    """What is compiled in, but for the dtype and the bias."""
    m = window_of(g) | {"CHANNELS": g.of_group, "OUTS": g.group_outs}
    m |= {k.upper(): getattr(t, k) for k in t.__dataclass_fields__}
    one_column = t.tile_w >= m["OW"]
    m["V"] = common_factor(m["IW"], 0 if one_column else t.tile_w * m["SW"])
    m["VW"] = common_factor(g.terms, t.chunk * g.taps)
    m["VO"] = common_factor(m["OW"], t.tile_w)
    m["APART"] = int(m["DH"] > t.tile_h * m["SH"])
    return m


def shared_bytes(m: dict[str, int]) -> tuple[int, int]:
    """Elements of a patch, and bytes of shared memory: the constants of csrc/patch.cu."""
    taps = m["KD"] * m["KH"] * m["KW"]
    left = -(-m["PW"] // m["V"]) * m["V"]
    reach = left - m["PW"] + (m["TILE_W"] - 1) * m["SW"] + (m["KW"] - 1) * m["DW"] + 1
    pitch = -(-reach // m["V"]) * m["V"]
    rows = (m["TILE_H"] - 1) * m["SH"] + (m["KH"] - 1) * m["DH"] + 1
    rows = m["KH"] * m["TILE_H"] if m["APART"] else rows
    patch = m["CHUNK"] * m["KD"] * rows * pitch
    steps, block_m = -(-m["CHUNK"] * taps // 16), 16 * m["WM"] * m["MT"]
    stage = -(-patch // 8) * 8 + block_m * (steps * 16 + 8)
    buffers = 2 if m["CHANNELS"] // m["SPLIT"] > m["CHUNK"] else 1
    columns = 8 * m["WN"] * m["NT"]
    sums = 4 * m["WK"] * block_m * (columns + (40 - columns % 32) % 32)
    return patch, max(buffers * stage * 2 + steps * 32, sums)


def can_use(g: Geometry, t: PatchTiling) -> bool:
    """Whether a tiling fits a geometry of plain tensors."""
    m = macros_of(g, t)
    elements, shared = shared_bytes(m)
    threads = 32 * t.wm * t.wn * t.wk
    whole_steps = t.chunk * g.taps % 16 == 0 or g.of_group == t.chunk * t.split
    return (
        g.groups == 1
        and g.itemsize == 2
        and g.out_strides[2] == 1
        and g.of_group % (t.chunk * t.split) == 0
        and whole_steps
        and t.tile_h * t.tile_w <= 8 * t.wn * t.nt
        and 16 * t.wm * t.mt % t.split == 0
        and t.split <= MAX_CLUSTER
        and threads <= MAX_THREADS
        and elements <= OFFSETS
        and shared <= SHARED_BYTES
    )


def serves(call: Any, g: Geometry) -> bool:
    """Whether the device compiles and launches it, and bias and output are laid out as it asks."""
    bias = call.tensors.bias
    plain = g.out_strides[2] == 1 and (bias is None or bias.stride[0] == 1)
    return plain and cuda.why_not(call.device, EXTRA) is None


def plan_of(call: Any, g: Geometry, t: PatchTiling, label: str) -> PatchPlan:
    m = macros_of(g, t)
    blocks = -(-g.group_outs // (16 * t.wm * t.mt)) * m["OD"]
    tiles = g.batch * blocks * -(-m["OH"] // t.tile_h) * -(-m["OW"] // t.tile_w)
    dtype, bias = call.tensors.input.dtype, call.tensors.bias
    _, shared = shared_bytes(m)
    macros = m | {"T": TYPES[dtype], "HAS_BIAS": int(bias is not None), "SHARED": shared}
    return PatchPlan(t, label, tiles * t.split, 32 * t.wm * t.wn * t.wk, shared, macros)


def prepare(call: Any, plan: PatchPlan) -> Callable[..., torch.Tensor]:
    """A function that allocates and launches."""
    (meta,) = call.outputs
    kernel = cuda.load(source("patch"), "patch", call.device, plan.macros)
    run = kernel.configure(
        (plan.grid, 1, 1), (plan.threads, 1, 1), plan.shared_bytes, plan.tiling.split
    )

    def launch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = meta.empty()
        run(x, w, 0 if bias is None else bias, out)
        return out

    return launch
