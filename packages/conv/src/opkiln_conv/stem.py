"""How a convolution of few input channels runs in one launch: csrc/stem.cu, compiled for its
geometry. Only the measured table chooses it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_conv.geometry import Geometry
from opkiln_conv.patch import SHARED_BYTES, TYPES
from opkiln_conv.sources import source

MAX_WARPS = 32
HELD = 32  # fragments of four registers, of weights, in a thread


@dataclass(frozen=True, slots=True)
class StemTiling:
    """See csrc/stem.cu. tile_h, tile_w: rows and columns of outputs."""

    tile_h: int
    tile_w: int
    warps: int = 8
    wm: int = 1
    mt: int = 4
    resident: int = 1


@dataclass(frozen=True, slots=True)
class StemPlan:
    """The launch of a tiling. source: the label of the table's row."""

    tiling: StemTiling
    source: str
    grid: int
    threads: int
    shared_bytes: int
    macros: dict[str, Any]


def macros_of(g: Geometry, t: StemTiling) -> dict[str, int]:
    """What is compiled in, but for the dtype and the bias."""
    shapes = {"I": g.sizes, "O": g.outs, "K": g.kernel, "S": g.stride, "P": g.padding}
    shapes["D"] = g.dilation
    m = {f"{k}{dim}": v[i] for k, v in shapes.items() for i, dim in enumerate("DHW")}
    m |= {"GROUPS": g.groups, "CHANNELS": g.of_group, "OUTS": g.group_outs}
    m |= {k.upper(): getattr(t, k) for k in t.__dataclass_fields__}
    m["V"], m["VO"] = math.gcd(4, g.sizes[2]), math.gcd(8, g.outs[2])
    return m


def steps_of(m: dict[str, int]) -> int:
    """Steps of 16 products: of four units, each of four channels under a tap."""
    quartets = -(-m["CHANNELS"] // 4)
    return -(-quartets * m["KD"] * m["KH"] * m["KW"] // 4)


def shared_bytes(m: dict[str, int]) -> int:
    """Bytes of shared memory: the constants of csrc/stem.cu."""
    steps, left = steps_of(m), -(-m["PW"] // 4) * 4
    reach = left - m["PW"] + (m["TILE_W"] - 1) * m["SW"] + (m["KW"] - 1) * m["DW"] + 1
    far = 8 if m["TILE_W"] % 32 == 0 and m["VO"] < 8 else 4
    pitch = -(-(-(-reach // 4) * 4) // far) // 2 * 2 * far + far
    rows = (m["TILE_H"] - 1) * m["SH"] + (m["KH"] - 1) * m["DH"] + 1
    plane = rows * pitch + (rows + m["KH"]) % 2 * far
    w_pitch = steps * 4 + (0 if steps % 2 else 4)
    return 8 * (-(-m["CHANNELS"] // 4) * m["KD"] * plane + 16 * m["WM"] * m["MT"] * w_pitch)


def can_use(g: Geometry, t: StemTiling) -> bool:
    """Whether a tiling fits a geometry of plain tensors."""
    m = macros_of(g, t)
    return (
        g.itemsize == 2
        and g.out_strides[2] == 1
        and t.tile_w % 8 == 0
        and t.warps % t.wm == 0
        and t.warps <= MAX_WARPS
        and steps_of(m) * t.mt <= HELD
        and shared_bytes(m) * t.resident <= SHARED_BYTES
    )


def plan_of(call: Any, g: Geometry, t: StemTiling, label: str) -> StemPlan:
    m = macros_of(g, t)
    blocks = -(-g.group_outs // (16 * t.wm * t.mt)) * g.outs[0]
    tiles = g.batch * g.groups * blocks * -(-g.outs[1] // t.tile_h) * -(-g.outs[2] // t.tile_w)
    dtype, bias = call.tensors.input.dtype, call.tensors.bias
    shared = shared_bytes(m)
    macros = m | {"T": TYPES[dtype], "HAS_BIAS": int(bias is not None), "SHARED": shared}
    return StemPlan(t, label, tiles, 32 * t.warps, shared, macros)


def prepare(call: Any, plan: StemPlan) -> Callable[..., torch.Tensor]:
    """A function that allocates and launches."""
    (meta,) = call.outputs
    kernel = cuda.load(source("stem"), "stem", call.device, plan.macros)
    run = kernel.configure((plan.grid, 1, 1), (plan.threads, 1, 1), plan.shared_bytes, 1)

    def launch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = meta.empty()
        run(x, w, 0 if bias is None else bias, out)
        return out

    return launch
