"""How a row norm's backward is launched: which rows share a gradient, the layout, the tiling.

The leading dims are taken in an order in which the rows that share a row of scale, shift or gate
follow each other: a group. A program has rows of one group only.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from opkiln_norm.row_layout import broadcast_strides, collapse, column_stride
from opkiln_norm.row_plan import MAX_ALIGN, MAX_INDEX, power_of_two

MODULATION = (("weight", "scale"), ("bias", "shift"), ("gate",))
WEIGHT, STATISTICS, GRAD_INPUT, FIRST_SUM = 3, (6, 7), 8, 9  # places among the kernel's tensors
# Longest row of a program by element size; longer ones are WIDE, and half as long ones where three
# gradients are summed: at 16 warps a thread has 128 registers.
RESIDENT = {2: 16384, 4: 8192}
SHARED_BYTES, MAX_STAGES = 196608, 3  # of shared memory for rows that are read ahead; of the loop
SUMS_BLOCK = 4096  # columns that row_sums_kernel reads at once


@dataclass(frozen=True, slots=True)
class Tiling:
    """block_m x (chunks x block_n) elements at once; the rest: see `row_backward_kernel`.

    programs_per_sm: where rows are summed; else there are as many programs as tiles. kept: rows
    that serve a whole program stay in registers.
    """

    block_n: int
    num_warps: int
    block_m: int = 1
    chunks: int = 1
    programs_per_sm: int = 2
    stages: int = 1
    kept: bool = True
    packed: bool = False
    again: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Strides over the rows, None where one serves all, and between columns, None if dense."""

    strides: tuple[int, ...] | None = None
    column: int | None = None


@dataclass(frozen=True, slots=True)
class BackwardPlan:
    """tensors: of the kernel, in its order; None where absent. Groups of group_rows rows.

    shared: which of weight, shift and gate are one row a group; own: whose gradients are one row a
    row. summed: rows of the other gradients, 0 where they are not wanted.
    """

    tiling: Tiling
    rows: int
    n: int
    groups: int
    align: int
    inner_sizes: tuple[int, ...]
    tensors: tuple[Rows | None, ...]
    shared: tuple[bool, ...]
    own: tuple[bool, ...]
    summed: tuple[int, ...]

    @property
    def group_rows(self) -> int:
        return self.rows // self.groups

    @property
    def col_blocks(self) -> int:
        t = self.tiling
        return -(-self.n // (t.block_n * t.chunks)) if t.wide else 1

    def slices(self, multiprocessors: int) -> int:
        """Programs that share a group's rows."""
        tiles = -(-self.group_rows // self.tiling.block_m)
        if not any(self.summed):
            return tiles
        programs = multiprocessors * self.tiling.programs_per_sm
        return min(max(programs // (self.groups * self.col_blocks), 1), tiles)

    def layout(self) -> tuple[Any, ...]:
        """inner_sizes, strides and columns. 2 s + 3: see RowPlan.arguments."""
        strides = tuple(
            None if t is None or t.strides is None else tuple(2 * s + 3 for s in t.strides)
            for t in self.tensors
        )
        return self.inner_sizes, strides, tuple(t and t.column for t in self.tensors)

    def constexprs(self, center: bool) -> dict[str, Any]:
        """The kernel's compile-time arguments, in its order."""
        t = self.tiling
        width = t.block_n * t.chunks
        return {
            "CENTER": center,
            "KEPT": tuple(t.kept and shared for shared in self.shared),
            "OWN": self.own,
            "WIDE": t.wide,
            "EVEN": self.n % width == 0 if t.wide else self.n == width,
            "PACKED": t.packed,
            "AGAIN": t.again,
            "ALIGN": self.align,
            "BLOCK_M": t.block_m,
            "BLOCK_N": t.block_n,
            "CHUNKS": t.chunks,
            "STAGES": t.stages,
        }


def stages_for(row_bytes: int, programs_per_sm: int, most: int = MAX_STAGES) -> int:
    """How far loads run ahead: copies of the rows of all programs fit shared memory."""
    copies = SHARED_BYTES // (row_bytes * programs_per_sm)
    return 1 + min(copies, most - 1)


def rule(itemsize: int, n: int, sums: int, streams: int) -> Tiling:
    """A tiling for rows of n elements. sums: how many gradients are summed over rows; where none
    is, a program has one tile. streams: how many tensors it reads row by row.
    """
    vector = 16 // itemsize
    if n > RESIDENT[itemsize] or sums * n > 2 * RESIDENT[itemsize]:
        block_n = 256 * vector
        stages = stages_for(streams * block_n * itemsize, 4) if sums else 1
        return Tiling(block_n, 8, programs_per_sm=4, stages=stages, wide=True)
    if n <= 64 * vector:  # a warp a row, or several rows: no barrier
        block_n = min(power_of_two(n), 32 * vector)
        chunks, programs = -(-n // block_n), 4
        block_m = 4 * max(32 * vector // block_n, 1)
        stages = stages_for(streams * block_m * block_n * chunks * itemsize, programs)
        return Tiling(
            block_n, 4, block_m=block_m, chunks=chunks, programs_per_sm=programs,
            stages=stages if sums else 1,
        )  # fmt: skip
    warps = max(power_of_two(n) // (64 * vector), 4) * (2 if sums > 2 else 1)
    warps = min(warps, 16)
    block_n = warps * 32 * vector
    chunks, programs = -(-n // block_n), 16 // warps
    half_row = RESIDENT[itemsize] // 2
    again = n > half_row or (sums > 2 and n > half_row // 2)
    # A row that is one block leaves room for a fourth: 32768 x 1024 takes 60.3 us, of three 67.1.
    most = MAX_STAGES + 1 if chunks == 1 else MAX_STAGES
    stages = stages_for(streams * block_n * chunks * itemsize, programs, most)
    return Tiling(
        block_n, warps, chunks=chunks, programs_per_sm=programs,
        stages=stages if sums and not again else 1, kept=not again,
        packed=itemsize == 2 and chunks > 1, again=again,
    )  # fmt: skip


def outputs_of(call: Any) -> dict[str, Any]:
    """Metas of the gradients that are wanted, by name."""
    names = [o.name for o, here in zip(call.spec.outputs, call.present, strict=True) if here]
    return dict(zip(names, call.outputs, strict=True))


def modulation_metas(call: Any) -> list[Any]:
    """Metas of the gradients of weight or scale, bias or shift, and gate; None where not wanted."""
    made = outputs_of(call)
    groups = [[made.get(f"grad_{n}") for n in group] for group in MODULATION]
    return [next((m for m in group if m is not None), None) for group in groups]


def kept_dims(meta: Any, shape: Sequence[int], split: int) -> frozenset[int]:
    """The leading dims, of more than one row, over which `meta` has rows of its own."""
    padded = (1,) * (len(shape) - meta.ndim) + tuple(meta.shape)
    return frozenset(d for d in range(split) if shape[d] > 1 and padded[d] > 1)


def row_order(kept: list[frozenset[int]], split: int) -> list[int]:
    """The leading dims, those first by which groups are told apart. ValueError: no order does."""
    chain = sorted(set(kept), key=len)
    nested = all(a <= b for a, b in itertools.pairwise(chain))
    order = sorted(range(split), key=lambda d: (-sum(d in k for k in chain), d))
    inner = [[d for d in order if d in k] for k in chain]
    if not nested or any(dims != sorted(dims) for dims in inner):
        raise ValueError("scale, shift and gate share rows in ways that do not nest")
    return order


def row_strides(meta: Any, shape: Sequence[int], split: int, order: list[int]) -> Any:
    """Leading strides of `meta` expanded to `shape`, in `order`; and the column stride."""
    strides = broadcast_strides(meta, shape)
    return [strides[d] for d in order], column_stride(shape[split:], strides[split:])


def layout_of(
    call: Any, x: Any, split: int, order: list[int], wanted: list[Any], own: tuple[bool, ...]
) -> tuple[list[int], list[Rows | None]]:
    """Sizes of the collapsed leading dims, and the kernel's tensors with strides in elements."""
    t = vars(call.tensors)
    outputs = outputs_of(call)
    modulation = [t.get("scale"), t.get("shift"), t.get("gate")]
    given = [
        t["grad_out"],
        x,
        t.get("grad_residual_out"),
        *modulation,
        t.get("mean"),
        t.get("rstd"),
    ]
    given += [outputs.get("grad_input")]
    given += [m if o else None for m, o in zip(wanted, own, strict=True)]
    steps: dict[int, list[int]] = {}
    columns: dict[int, int | None] = {}
    for i, meta in enumerate(given):
        if meta is None:
            continue
        if i in STATISTICS:
            steps[i], columns[i] = [meta.stride[d] for d in order], 1  # never in units of ALIGN
        else:
            steps[i], columns[i] = row_strides(meta, x.shape, split, order)
    sizes, collapsed = collapse([x.shape[d] for d in order], list(steps.values()))
    strides = dict(zip(steps, collapsed, strict=True))
    tensors = [
        Rows(tuple(strides[i]) or (0,), columns[i]) if i in strides else None
        for i in range(len(given))
    ]
    weight = t.get("weight")
    if weight is not None:
        tensors[WEIGHT] = Rows(None, column_stride(weight.shape, weight.stride))
    for i, (meta, is_own) in enumerate(zip(wanted, own, strict=True), start=FIRST_SUM):
        if meta is not None and not is_own:
            tensors[i] = Rows()
    return sizes, tensors


def alignment(n: int, tensors: Sequence[Rows | None]) -> int:
    """What divides N and every row stride of dense tensors, at most MAX_ALIGN."""
    steps = [t.strides for t in tensors if t and t.strides is not None and t.column is None]
    return math.gcd(MAX_ALIGN, n, *[s for strides in steps for s in strides])


def in_units(rows: Rows | None, align: int) -> Rows | None:
    """With strides in units of `align` where columns are dense."""
    if rows is None or rows.strides is None or rows.column is not None:
        return rows
    return Rows(tuple(s // align for s in rows.strides), None)


def plan_for(call: Any) -> BackwardPlan:
    """The plan of a row norm's backward. ValueError says what the kernels do not serve."""
    t = vars(call.tensors)
    x = t.get("input") or t["residual_out"]
    split = x.ndim - len(getattr(call.params, "normalized_shape", (0,)))
    shape = x.shape
    n, rows = math.prod(shape[split:]), math.prod(shape[:split])
    if n == 0:
        raise ValueError("rows of no elements")
    if max(n, rows) > MAX_INDEX:
        raise ValueError(f"{rows} rows of {n} elements: only {MAX_INDEX} of either fit the index")
    wanted = modulation_metas(call)
    inputs = [t.get("weight", t.get("scale")), t.get("shift"), t.get("gate")]
    leading = frozenset(d for d in range(split) if shape[d] > 1)
    affine = "weight" in t
    kinds = [None if m is None or affine else kept_dims(m, shape, split) for m in wanted]
    own = tuple(k is not None and k == leading for k in kinds)
    for meta, is_own in zip(wanted, own, strict=True):
        if meta is not None and not affine and meta.shape[-1:] != (n,):
            raise ValueError(f"sums over columns, for a gradient of shape {list(meta.shape)}")
        if meta is not None and not is_own and not meta.is_contiguous:
            raise ValueError("a gradient that is summed over rows, and not contiguous")
    sets = [k or frozenset() for m, k, o in zip(wanted, kinds, own, strict=True) if m and not o]
    order = row_order(sets, split)
    finest = max(sets, key=len, default=frozenset())
    summed = tuple(
        0 if m is None or o else math.prod(shape[d] for d in k or ())
        for m, k, o in zip(wanted, kinds, own, strict=True)
    )
    shared = tuple(
        m is not None and (affine or kept_dims(m, shape, split) <= finest) for m in inputs
    )
    sizes, tensors = layout_of(call, x, split, order, wanted, own)
    streams = 2 + ("grad_residual_out" in t)
    streams += sum(m is not None and not s for m, s in zip(inputs, shared, strict=True))
    itemsize = max(x.dtype.itemsize, t["grad_out"].dtype.itemsize)
    align = alignment(n, tensors)
    return BackwardPlan(
        tiling=rule(itemsize, n, sum(map(bool, summed)), streams),
        rows=rows,
        n=n,
        groups=math.prod(shape[d] for d in finest),
        align=align,
        inner_sizes=tuple(sizes[1:]),
        tensors=tuple(in_units(r, align) for r in tensors),
        shared=shared,
        own=own,
        summed=summed,
    )
