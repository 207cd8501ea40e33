"""How a heavy convolution of stride 1 runs by wgmma: csrc/shift.cu, compiled for its geometry.
Only the measured table chooses it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import gcd
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_conv.geometry import Geometry
from opkiln_conv.sources import read

EXTRA = "opkiln-conv[cu13]"
TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}
SHARED_BYTES = 227 * 1024  # of a CTA
SUMS = 192  # registers of a thread that hold sums
PACK_ROWS, PACK_OUTS, PACK_THREADS = 128, 8, 256
THREADS = 384  # two warpgroups that multiply, one that fetches


@dataclass(frozen=True, slots=True)
class ShiftTiling:
    """See csrc/shift_pack.cu."""

    width: int
    block: int = 64
    mb: int = 1
    group: int = 0
    x_stages: int = 2
    w_stages: int = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """What csrc/shift_pack.cu derives from the macros, of one image; bytes and rows."""

    blocks: int
    tiles: int
    rows: int
    packed_weights: int
    pack_shared: int
    shared: int


def window_of(g: Geometry) -> dict[str, int]:
    """The macros of a geometry."""
    shapes = {"I": g.sizes, "O": g.outs, "K": g.kernel, "P": g.padding, "D": g.dilation}
    found = {f"{k}{dim}": v[i] for k, v in shapes.items() for i, dim in enumerate("DHW")}
    return found | {"CHANNELS": g.of_group, "OUTS": g.group_outs}


def pitch_of(outs: int, size: int, kernel: int, padding: int, dilation: int) -> int:
    """Of a padded dim whose neighbouring lines share their zeros."""
    return max(outs, padding + size, outs + (kernel - 1) * dilation - padding)


def sizes_of(g: Geometry, t: ShiftTiling) -> Sizes:
    (_, kh, kw), (dd, dh, dw) = g.kernel, g.dilation
    lines, pitch = (
        pitch_of(g.outs[i], g.sizes[i], g.kernel[i], g.padding[i], g.dilation[i]) for i in (1, 2)
    )
    positions = ((g.outs[0] - 1) * lines + g.outs[1] - 1) * pitch + g.outs[2]
    shifts = [
        (i // (kh * kw) * dd * lines + i // kw % kh * dh) * pitch + i % kw * dw
        for i in range(g.taps)
    ]
    m = 64 * t.mb
    tiles_m, tiles_n = -(-g.group_outs // m), -(-positions // t.width)
    each = g.taps // (1, g.kernel[0], g.kernel[0] * kh)[t.group]
    bases = [s // 8 * 8 for s in shifts[::each]]
    reach = max(s - b for s, b in zip(shifts[each - 1 :: each], bases, strict=True))
    patch = -(-(t.width + reach) // 8) * 8
    blocks, row_bytes = -(-g.of_group // t.block), 2 * t.block
    slots = t.w_stages or blocks * g.taps
    rings = t.x_stages * (-(-patch * row_bytes // 1024) * 1024) + slots * m * row_bytes
    staging = 8 * 16 * (gcd(t.width, 64) + 8) * 2
    barriers = 2 * t.x_stages + 2 * (t.w_stages or 1)
    return Sizes(
        blocks=blocks,
        tiles=tiles_m * tiles_n,
        rows=(tiles_n - 1) * t.width + bases[-1] + patch,
        packed_weights=blocks * g.taps * tiles_m * m * t.block,
        pack_shared=max(PACK_ROWS * row_bytes, PACK_OUTS * (t.block * g.taps + 2) * 2),
        shared=1024 + rings + staging + 8 * barriers,
    )


@dataclass(frozen=True, slots=True)
class ShiftPlan:
    """The launches of a tiling. source: the label of the table's row; work: tiles of all images."""

    tiling: ShiftTiling
    source: str
    sizes: Sizes
    work: int
    images: int
    macros: dict[str, Any]


def can_use(g: Geometry, t: ShiftTiling) -> bool:
    """Whether a tiling fits a geometry of plain tensors."""
    sizes = sizes_of(g, t)
    return (
        g.groups == 1
        and g.itemsize == 2
        and max(g.stride) == 1
        and g.out_strides[2] == 1
        and g.of_group % 8 == 0
        and t.mb * t.width // 2 <= SUMS
        and (t.w_stages > 0 or g.group_outs <= 64 * t.mb)
        and max(sizes.shared, sizes.pack_shared) <= SHARED_BYTES
    )


def plan_of(call: Any, g: Geometry, t: ShiftTiling, label: str) -> ShiftPlan:
    sizes = sizes_of(g, t)
    dtype, bias = call.tensors.input.dtype, call.tensors.bias
    macros = window_of(g) | {k.upper(): v for k, v in asdict(t).items()}
    macros |= {"T": TYPES[dtype], "HAS_BIAS": int(bias is not None)}
    macros |= {"SHARED": sizes.shared, "PACK_SHARED": sizes.pack_shared}
    return ShiftPlan(t, label, sizes, g.batch * sizes.tiles, g.batch, macros)


def product_of(width: int, dtype: str) -> str:
    """CUDA C++: c += a b, 64 x 16 by 16 x width, of operands that descriptors name."""
    count = width // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{dtype}.{dtype}"
    return (
        f"DEVICE void product(float (&c)[{count}], u64 a, u64 b) {{\n"
        f'    asm volatile("{{.reg .pred p; setp.ne.b32 p, 1, 0; {name} {{{sums}}}, "\n'
        f'                 "%{count}, %{count + 1}, p, 1, 1, 0, 0;}}"\n'
        f'                 : {operands} : "l"(a), "l"(b));\n}}\n'
    )


def text_of(plan: ShiftPlan) -> str:
    """The translation unit of a plan."""
    product = product_of(plan.tiling.width, plan.macros["T"])
    before = read("device.cuh") + read("wgmma.cuh")
    return before + product + read("shift_pack.cu") + read("shift.cu")


Launch = Callable[..., None]


def kernels_of(plan: ShiftPlan, device: torch.device) -> tuple[Launch, Launch, int]:
    """pack, shift, and the argument x_blocks of the former."""
    t, sizes, m = plan.tiling, plan.sizes, plan.macros
    load = lambda name: cuda.load(text_of(plan), name, device, m)  # noqa: E731
    x_blocks = plan.images * sizes.blocks * -(-sizes.rows // PACK_ROWS)
    taps = m["KD"] * m["KH"] * m["KW"]
    w_blocks = sizes.packed_weights // (t.block * taps * PACK_OUTS)
    pack = load("pack").configure(
        (x_blocks + w_blocks, 1, 1), (PACK_THREADS, 1, 1), sizes.pack_shared
    )
    programs = min(plan.work, cuda.multiprocessors(device))
    multiply = load("shift").configure((programs, 1, 1), (THREADS, 1, 1), sizes.shared)
    return pack, multiply, x_blocks


def prepare(call: Any, plan: ShiftPlan) -> Callable[..., torch.Tensor]:
    """A function that allocates and launches."""
    (meta,) = call.outputs
    sizes, dtype, device = plan.sizes, meta.dtype, call.device
    pack, multiply, x_blocks = kernels_of(plan, device)
    rows = plan.images * sizes.blocks * sizes.rows * plan.tiling.block

    def launch(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = meta.empty()
        xp = torch.empty(rows, dtype=dtype, device=device)
        wp = torch.empty(sizes.packed_weights, dtype=dtype, device=device)
        pack(x, w, xp, wp, x_blocks)
        multiply(xp, wp, 0 if bias is None else bias, out, plan.images)
        return out

    return launch
