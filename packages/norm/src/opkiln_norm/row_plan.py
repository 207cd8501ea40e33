"""How a row norm is launched: the layout of its rows, and the tiling chosen for them.

A tiling comes from the user's own table where it has the call, else from the measured table
(tuning/sm90.json) where it names the call's op, element size, N and number of rows, else from
`rule`. Only tiles, flags and alignment are compiled in.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from opkiln import tilings

from opkiln_norm.row_layout import (
    Operand,
    broadcast_strides,
    column_stride,
    operand_metas,
    operands_of,
)

KERNEL = "row_norm"  # what a tiling of the user's is for
MAX_ALIGN = 16  # elements; more earns no wider load for the dtypes served
FEW_ROWS = 128  # fewer than the multiprocessors of an H200 (132): latency counts, not bandwidth
RESIDENT_BYTES = 65536  # longest row that 32 warps hold in registers with room for the affine
SHIFT_VECTORS = 64  # shortest row, in vectors of 16 bytes, for which two more masked edges pay
MAX_INDEX = 2**31 - 2**17  # row and column numbers are 32-bit, and tiles reach past the end


@dataclass(frozen=True, slots=True)
class Tiling:
    """What the tuning table sets: see `row_norm_kernel` for the meaning of each."""

    block_n: int
    num_warps: int
    block_m: int = 1
    chunks: int = 1
    head: bool = False
    programs_per_sm: int = 0  # persistent with so many; 0: one program a tile
    stages: int = 1
    preload: bool = False
    packed: bool = False
    evict: str = ""
    store_cache: str = ""
    static: bool = False  # N is compiled in
    forward: bool = False


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A tiling and the rows it is for. `source`: "rule", "your table", or the label of the table's
    row.

    operands: x, r, w, b, g of the kernel; strides of dense ones in units of `align`. shift: the
    kernel's SHIFT.
    """

    tiling: Tiling
    source: str
    rows: int
    n: int
    align: int
    shift: int
    even: bool
    inner_sizes: tuple[int, ...]
    operands: tuple[Operand, ...]

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tiling.block_m)

    @property
    def options(self) -> dict[str, int]:
        """Triton's. SHIFT's edges would take 128 registers a thread, and leave an SM 16 warps; but
        rows of more than x need them.
        """
        warps = self.tiling.num_warps
        alone = all(operand.strides is None for operand in self.operands[1:])
        registers = 128 if not alone else 80 if warps <= 8 else 64
        return {"num_warps": warps, **({"maxnreg": registers} if self.shift else {})}

    def grid(self, multiprocessors: int) -> int:
        """How many programs to launch."""
        if self.tiling.programs_per_sm == 0:
            return self.tiles
        return min(self.tiles, self.tiling.programs_per_sm * multiprocessors)

    def arguments(self, params: Any) -> tuple[Any, ...]:
        """The kernel's run-time arguments after the tensors, in its order.

        Triton compiles in whether an int is 1 or a multiple of 16, and chooses by it the order in
        which a row is summed. 2 s + 3 is never either: a row alone, whose stride is 0, meets the
        binary of many rows. What is known of the alignment is ALIGN.
        """
        strides = [
            None if o.strides is None else tuple(2 * s + 3 for s in o.strides)
            for o in self.operands
        ]
        columns = [operand.stride_n for operand in self.operands]
        offset = getattr(params, "scale_offset", None)
        units = self.n // self.align
        return (self.inner_sizes, *strides, *columns, self.rows, units, params.eps, offset)

    def constexprs(self, call: Any) -> dict[str, Any]:
        """The kernel's compile-time arguments, in its order."""
        t = self.tiling
        return {
            "CENTER": "layer_norm" in call.spec.name,
            "HEAD": t.head,
            "EVEN": self.even,
            "PERSISTENT": t.programs_per_sm > 0,
            "PRELOAD": t.preload,
            "PACKED": t.packed,
            "ALIGN": self.align,
            "SHIFT": self.shift,
            "BLOCK_M": t.block_m,
            "BLOCK_N": t.block_n,
            "CHUNKS": t.chunks,
            "STAGES": t.stages,
            "EVICT": t.evict,
            "STORE_CACHE": t.store_cache,
            "COLUMNS": self.n if t.static else 0,
            "FORWARD": t.forward,
        }


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def rule(itemsize: int, n: int, rows: int, added: bool = False) -> Tiling:
    """A tiling for any row, where the table is silent. n, rows: at least 1. added: f32 sums."""
    vector = 16 // itemsize
    warp = 32 * vector  # columns that a warp loads at once
    half = itemsize == 2
    if n * itemsize > RESIDENT_BYTES:
        if half and not added:
            return Tiling(
                64 * warp, 32, chunks=2, head=True, packed=True, evict="evict_first",
                store_cache=".cs",
            )  # fmt: skip
        chunks = 2 if half else 4  # 16 registers a thread
        return Tiling(32 * warp, 32, chunks=chunks, head=True, stages=3)
    block_n = power_of_two(n)
    if rows <= FEW_ROWS and block_n > warp:  # a vector a thread, as far as 32 warps reach
        return Tiling(block_n=block_n, num_warps=min(block_n // warp, 32), preload=True)
    if n <= 8 * warp:  # a warp a row, or several rows: no barrier
        block_n = min(block_n, warp)
        chunks = -(-n // block_n)
        few = rows <= FEW_ROWS
        block_m = 4 * (1 if few else max(4 // chunks, 1)) * (warp // block_n)
        return Tiling(block_n=block_n, num_warps=4, block_m=block_m, chunks=chunks, preload=few)
    block_n //= 4  # 3 or 4 vectors a thread
    return Tiling(block_n=block_n, chunks=-(-n // block_n), num_warps=block_n // warp)


@functools.cache
def tuning_table() -> dict[str, Any]:
    """tuning/sm90.json."""
    text = resources.files("opkiln_norm").joinpath("tuning/sm90.json").read_text("utf-8")
    return json.loads(text)


def tuning_rows() -> list[dict[str, Any]]:
    """The table's tilings of row_norm_kernel."""
    return tuning_table()["rows"]


def covers(row: dict[str, Any], key: tuple[str, int, int], rows: int) -> bool:
    """Whether a row of the table is for this op, element size and N, and for so many rows."""
    low, high = row["rows"]
    covered = low <= rows and (high is None or rows <= high)
    return covered and (row["op"], row["itemsize"], row["n"]) == key


def tuned(op: str, itemsize: int, n: int, rows: int) -> tuple[Tiling, str] | None:
    """The first row of the table that covers the call."""
    for row in tuning_rows():
        if covers(row, (op, itemsize, n), rows):
            return Tiling(**row["use"]), row["label"]
    return None


def in_units(operand: Operand, align: int) -> Operand:
    """The operand with its row strides in units of `align` if it is dense."""
    if operand.strides is None or operand.stride_n is not None:
        return operand
    return Operand(tuple(s // align for s in operand.strides), None)


def extent(shape: Sequence[int], split: int) -> tuple[int, int]:
    """Length and number of rows."""
    return math.prod(shape[split:]), math.prod(shape[:split])


def regime_of(call: Any, rows: int) -> int:
    """The number of rows to choose a tiling for. Batch invariance: that of many, for any number."""
    return MAX_INDEX if call.policy.batch_invariant else max(rows, 1)


def alignment(call: Any, split: int, n: int) -> int:
    """What divides N and every row stride of dense operands, at most MAX_ALIGN.

    Batch invariance: a row alone has what it has among many. So the strides of size-1 dims count
    too, and 1 is the answer where not every row of an aligned tensor is aligned to 16 bytes.
    """
    x = call.tensors.input
    invariant = call.policy.batch_invariant
    steps: list[int] = []
    for meta in operand_metas(call)[0]:
        if meta is None:
            continue
        stride = broadcast_strides(meta, x.shape)
        if column_stride(x.shape[split:], stride[split:]) is None:
            sized = [s for s, size in zip(stride, x.shape[:split], strict=False) if size > 1]
            own = meta.stride[: max(split - (x.ndim - meta.ndim), 0)]
            steps += own if invariant else sized
    align = math.gcd(MAX_ALIGN, n, *steps)
    return 1 if invariant and align * x.dtype.itemsize % 16 else align


def shift_of(call: Any, n: int, rows: int, sizes: list[int], operands: list[Operand]) -> int:
    """Elements of 16 bytes if many rows without gaps start at them only now and then, else 0.

    Not under batch invariance, as a row's tile depends on its place; nor for rows beyond the
    registers, nor for rows of few vectors.
    """
    values = 16 // call.tensors.input.dtype.itemsize
    own = [o for o in operands if o.strides is not None]
    gapless = all(o.strides == (n,) and o.stride_n is None for o in own)
    metas = [m for m in vars(call.tensors).values() if m is not None]
    more = len(own) > 1  # than x: does not fit 64 registers beside the edges
    long = (n + values - 1) * call.tensors.input.dtype.itemsize > RESIDENT_BYTES // (1 + more)
    odd = n % values != 0 and gapless and len(sizes) == 1 and all(m.aligned for m in metas)
    few = rows <= FEW_ROWS or n < SHIFT_VECTORS * values
    return 0 if call.policy.batch_invariant or long or few or not odd else values


def plan_for(call: Any) -> RowPlan:
    """The plan of a row norm call. ValueError says what the kernel cannot index."""
    x = call.tensors.input
    split = x.ndim - len(getattr(call.params, "normalized_shape", (0,)))
    n, rows = extent(x.shape, split)
    if n == 0:
        raise ValueError("rows of no elements")
    if max(n, rows) > MAX_INDEX:
        raise ValueError(f"{rows} rows of {n} elements: only {MAX_INDEX} of either fit the index")
    sizes, operands = operands_of(call, split)
    align = alignment(call, split, n)
    regime = regime_of(call, rows)
    own = tilings.taken(call, KERNEL, Tiling)
    found = own and (own, "your table")
    if found is None and operands[0].stride_n is None:
        op = call.spec.name.removesuffix("_inplace")
        found = tuned(op, x.dtype.itemsize, n, regime)
    added = operands[1].strides is not None
    shift = 0 if found else shift_of(call, n, rows, sizes, operands)
    tiling, source = found or (rule(x.dtype.itemsize, n + max(shift - 1, 0), regime, added), "rule")
    covered = n % tiling.block_n == 0 if tiling.head else tiling.chunks * tiling.block_n == n
    return RowPlan(
        tiling=tiling,
        source=source,
        rows=rows,
        n=n,
        align=align,
        shift=shift,
        even=covered and not shift,
        inner_sizes=tuple(sizes[1:]),
        operands=tuple(in_units(o, align) for o in operands),
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
