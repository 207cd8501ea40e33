"""Maxima of fixed windows in CUDA C++, for what `cuda_rows` of tuning/sm90.json names.

rows    3 wide windows at stride 2 over short rows of 16 bits     csrc/window_rows.cu
pairs   windows that tile the input, two columns wide             csrc/window_pairs.cu
flat    windows of 3 that tile rows of 16 bits                    csrc/window_flat.cu

For any number of planes of a contiguous input, in the dtypes that were measured. The Triton kernels
serve the rest, calls that save the taps' offsets for a gradient, and all of it without cuda-core.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from opkiln import tilings
from opkiln.device import cuda
from opkiln.device.outputs import allocator
from opkiln.spec import Call

from opkiln_pool import pool_plan
from opkiln_pool.geometry import ONES, Geometry, geometry_of

EXTRA = "opkiln-pool[cu13]"
KERNEL = "pool_cuda"  # what a tiling of the user's is for
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
LANES = 16  # that hold a row of the input in csrc/window_rows.cu
PLACES = 2**16  # that 16 bits tell apart


@dataclass(frozen=True, slots=True)
class Rows:
    """What the table sets. ctas: of a multiprocessor. keep: L2 keeps the lines of the outputs."""

    threads: int
    ctas: int
    keep: bool = False

    def fits(self, g: Geometry) -> bool:
        d, h, w = g.sizes
        deep = (3, 2, 1) if g.kernel[0] == 3 else (1, 1, 0)
        return (
            g.itemsize == 2
            and (g.kernel[0], g.stride[0], g.padding[0]) == deep
            and (g.kernel[1:], g.stride[1:], g.padding[1:]) == ((3, 3), (2, 2), (1, 1))
            and (g.kernel[0] == 3 or d == 1)
            and w % 8 == 0
            and max(w // 8, -(-g.outs[2] // 4)) <= LANES
            and (g.kernel[0] - 1) * h * w + 2 * w + 8 * LANES <= PLACES
        )

    def macros(self, g: Geometry) -> dict[str, int]:
        (sd, sh, sw), (od, oh, ow) = g.sizes, g.outs
        return {"SD": sd, "SH": sh, "SW": sw, "OD": od, "OH": oh, "OW": ow, "KD": g.kernel[0],
                "INDEX": int(g.reduce == "argmax"), "CTAS": self.ctas}  # fmt: skip

    def work(self, g: Geometry) -> tuple[int, int]:
        """Items of the launch, and of a CTA."""
        return g.planes * g.outs[0] * g.outs[1], self.threads // LANES


@dataclass(frozen=True, slots=True)
class Pairs:
    threads: int
    keep: bool = False

    def fits(self, g: Geometry) -> bool:
        whole = all(s == o * k for s, o, k in zip(g.sizes, g.outs, g.kernel, strict=True))
        return (
            g.reduce == "argmax"
            and whole
            and g.kernel[2] == 2
            and g.stride == g.kernel
            and g.padding == (0, 0, 0)
            and g.outs[2] % 2 == 0
        )

    def macros(self, g: Geometry) -> dict[str, int]:
        d, h, w = g.sizes
        return {"SD": d, "SH": h, "SW": w, "KD": g.kernel[0], "KH": g.kernel[1]}

    def work(self, g: Geometry) -> tuple[int, int]:
        return g.outputs // 2, self.threads


@dataclass(frozen=True, slots=True)
class Flat:
    threads: int
    keep: bool = False

    def fits(self, g: Geometry) -> bool:
        w, ow = g.sizes[2], g.outs[2]
        return (
            g.reduce == "argmax"
            and g.itemsize == 2
            and g.kernel == g.stride == (1, 1, 3)
            and g.padding == (0, 0, 0)
            and g.sizes[:2] == (1, 1)
            and w % 8 == 0
            and 3 * ow < w < 3 * ow + 3
            and g.outputs % 2 == 0
        )

    def macros(self, g: Geometry) -> dict[str, int]:
        return {"SW": g.sizes[2], "OW": g.outs[2]}

    def work(self, g: Geometry) -> tuple[int, int]:
        return g.outputs // 2, self.threads


Tiling = Rows | Pairs | Flat
KINDS: dict[str, Callable[..., Tiling]] = {"rows": Rows, "pairs": Pairs, "flat": Flat}


def made(kind: str, **use: Any) -> Tiling:
    """A tiling as the tables state it."""
    return KINDS[kind](**use)


def kind_of(tiling: Tiling) -> str:
    return type(tiling).__name__.lower()


def stated(tiling: Tiling) -> dict[str, Any]:
    """A tiling as opkiln.tilings keeps it."""
    return {"kind": kind_of(tiling)} | tilings.stated(KERNEL, tiling)


@dataclass(frozen=True, slots=True)
class Plan:
    """`source`: "your table", or the label of the table's row."""

    tiling: Tiling
    source: str
    geometry: Geometry


@functools.cache
def source(kind: str) -> str:
    folder = resources.files("opkiln_pool") / "csrc"
    parts = ("window.cuh", f"window_{kind}.cu")
    return "".join((folder / part).read_text("utf-8") for part in parts)


def cuda_rows() -> list[dict[str, Any]]:
    """The table's tilings of these kernels."""
    return pool_plan.tuning_table()["cuda_rows"]


def chosen(call: Call, g: Geometry) -> tuple[Tiling, str] | None:
    """The user's tiling, else the table's; None where a Triton kernel serves."""
    if tilings.of(call) is not None:
        own = tilings.taken(call, KERNEL, made)
        return own and (own, "your table")
    key, dtype = pool_plan.key_of(call.spec.name, g), NAMES.get(call.tensors.input.dtype)
    for row in cuda_rows():
        if dtype in row["measured"]["us"] and all(row.get(k) == v for k, v in key.items()):
            return made(row["kind"], **row["use"]), row["label"]
    return None


def plan_for(call: Call) -> Plan | None:
    """The plan of a call that a table covers and whose input these kernels can read."""
    if not call.spec.name.startswith("max_pool") or 0 in call.tensors.input.shape:
        return None
    g = geometry_of(call)
    found = chosen(call, g)
    if found is None or not readable(g) or not found[0].fits(g):
        return None
    saves_offsets = len(call.outputs) > 1 + call.spec.name.endswith("_indices")
    return None if saves_offsets else Plan(*found, g)


def readable(g: Geometry) -> bool:
    """Whether planes lie one after another, each one stretch of memory, from 16 bytes on."""
    even = g.planes == 1 or (g.channels is None and g.strides[0] == math.prod(g.sizes))
    plain = even and g.dense_plane() and not g.channels_last
    return plain and g.aligned and g.dilation == ONES and not g.wide


def macros(g: Geometry, dtype: torch.dtype, tiling: Tiling) -> dict[str, int]:
    shared = {"TYPE": TYPES[dtype], "THREADS": tiling.threads, "KEEP": int(tiling.keep)}
    return shared | tiling.macros(g)


def prepare(call: Call) -> Callable[..., Any] | None:
    """The launch of a call that one of these kernels serves here, else None."""
    plan = plan_for(call)
    if plan is None or cuda.why_not(call.device, EXTRA) is not None:
        return None
    g, t, kind = plan.geometry, plan.tiling, kind_of(plan.tiling)
    constants = macros(g, call.tensors.input.dtype, t)
    kernel = cuda.load(source(kind), f"{kind}_kernel", call.device, constants)
    items, each = t.work(g)
    send = kernel.configure((-(-items // each), 1, 1), (t.threads, 1, 1))
    allocate = allocator(call.device, call.outputs)

    def launch(x: torch.Tensor) -> Any:
        outputs = allocate()
        send(x, outputs[0], outputs[1] if len(outputs) > 1 else 0, items)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch
