"""How a row norm is launched: the layout of its rows, and the tiling chosen for them.

A tiling comes from the measured table (tuning/sm90.json) where it names the call's op, element
size, N and number of rows, else from `rule`. Only tiles, flags and alignment are compiled in.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

MAX_ALIGN = 16  # elements; more earns no wider load for the dtypes served
FEW_ROWS = 128  # fewer than the multiprocessors of an H200 (132): latency counts, not bandwidth
RESIDENT_BYTES = 65536  # longest row that 32 warps hold in registers with room for the affine
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


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A tiling and the rows it is for. `source`: "rule", or the label of the table's row."""

    tiling: Tiling
    source: str
    rows: int
    n: int
    align: int
    even: bool
    inner_sizes: tuple[int, ...]
    x_strides: tuple[int, ...]
    stride_xn: int | None
    stride_wn: int | None
    stride_bn: int | None

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.tiling.block_m)

    def grid(self, multiprocessors: int) -> int:
        """How many programs to launch."""
        if self.tiling.programs_per_sm == 0:
            return self.tiles
        return min(self.tiles, self.tiling.programs_per_sm * multiprocessors)

    def constexprs(self, center: bool) -> dict[str, Any]:
        """The kernel's compile-time arguments, in its order."""
        t = self.tiling
        return {
            "CENTER": center,
            "HEAD": t.head,
            "EVEN": self.even,
            "PERSISTENT": t.programs_per_sm > 0,
            "PRELOAD": t.preload,
            "PACKED": t.packed,
            "ALIGN": self.align,
            "BLOCK_M": t.block_m,
            "BLOCK_N": t.block_n,
            "CHUNKS": t.chunks,
            "STAGES": t.stages,
            "EVICT": t.evict,
            "STORE_CACHE": t.store_cache,
        }


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def collapse(shape: Sequence[int], stride: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge neighbouring dims that step through memory as one; size-1 dims vanish."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if sizes and steps[-1] == size * step:
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    return sizes, steps


def column_stride(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Stride of the normalized dims seen as one, None if dense. ValueError if one does not do."""
    sizes, steps = collapse(shape, stride)
    if len(sizes) > 1:
        raise ValueError("the normalized dims do not collapse to one stride")
    return None if not steps or steps[0] == 1 else steps[0]


def rule(itemsize: int, n: int, rows: int) -> Tiling:
    """A tiling for any row, where the table is silent. n, rows: at least 1."""
    vector = 16 // itemsize
    warp = 32 * vector  # columns that a warp loads at once
    half = itemsize == 2
    if n * itemsize > RESIDENT_BYTES:
        return Tiling(block_n=32 * warp, chunks=4, num_warps=32, head=True, stages=3, packed=half)
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
def tuning_rows() -> tuple[dict[str, Any], ...]:
    """The rows of tuning/sm90.json."""
    text = resources.files("opkiln_norm").joinpath("tuning/sm90.json").read_text("utf-8")
    return tuple(json.loads(text)["rows"])


def tuned(op: str, itemsize: int, n: int, rows: int) -> tuple[Tiling, str] | None:
    """The first row of the table that covers the call."""
    for row in tuning_rows():
        low, high = row["rows"]
        covered = low <= rows and (high is None or rows <= high)
        if covered and (row["op"], row["itemsize"], row["n"]) == (op, itemsize, n):
            return Tiling(**row["use"]), row["label"]
    return None


def plan_for(call: Any) -> RowPlan:
    """The plan of an rms_norm or layer_norm call. ValueError says what the kernel cannot index."""
    x = call.tensors.input
    split = x.ndim - len(call.params.normalized_shape)
    n = math.prod(x.shape[split:])
    rows = math.prod(x.shape[:split])
    if n == 0:
        raise ValueError("rows of no elements")
    if max(n, rows) > MAX_INDEX:
        raise ValueError(f"{rows} rows of {n} elements: only {MAX_INDEX} of either fit the index")
    stride_xn = column_stride(x.shape[split:], x.stride[split:])
    affine = [call.tensors.weight, getattr(call.tensors, "bias", None)]
    stride_wn, stride_bn = (None if t is None else column_stride(t.shape, t.stride) for t in affine)

    sizes, strides = collapse(x.shape[:split], x.stride[:split])
    align = math.gcd(MAX_ALIGN, n, *strides) if stride_xn is None else 1
    # Batch invariance: the tiling of many rows for any number of them.
    regime = MAX_INDEX if call.policy.batch_invariant else max(rows, 1)
    found = tuned(call.spec.name, x.dtype.itemsize, n, regime) if stride_xn is None else None
    tiling, source = found or (rule(x.dtype.itemsize, n, regime), "rule")
    covered = n % tiling.block_n == 0 if tiling.head else tiling.chunks * tiling.block_n == n
    return RowPlan(
        tiling=tiling,
        source=source,
        rows=rows,
        n=n,
        align=align,
        even=covered,
        inner_sizes=tuple(sizes[1:]),
        x_strides=tuple(s // align for s in strides) or (0,),
        stride_xn=stride_xn,
        stride_wn=stride_wn,
        stride_bn=stride_bn,
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
