"""How a channel norm is launched: its tensors seen as tiles, and the tiling chosen for them.

Every input [N, C, *S] is seen as `outer` x `rows` x `cols`. A statistic runs over all cols, and over
all rows too where `pool` is set; without it each row has its own. What that means:

op, layout                          outer          rows           cols        pool
batch norm, contiguous              C              N              S           yes
batch norm, channels_last or 2-D    -              C              N, S        no
group norm, contiguous              N, G           C / G          S           yes
group norm without affine           -              N, G           C / G, S    no
group norm, channels_last           N, G or N      C / G or C     S           yes, or grouped
instance norm                       - or N         N, C or C      S           no
instance norm, running statistics   C              N              S           no

A tiling comes from the measured table (tuning/channel_sm90.json) where it names the call's op,
element size and view, else from `rule`. Only tiles, flags and alignment are compiled in.
"""

import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from opkiln.spec import Call, TensorMeta

from opkiln_norm.row_plan import MAX_ALIGN, MAX_INDEX, power_of_two

SECTOR = 32  # bytes that DRAM and L2 hand out at least
RESIDENT_BYTES = 65536  # longest set that 32 warps hold in registers, of all tensors read
RESIDENT_ELEMENTS = 32768  # 32 a thread
MULTIPROCESSORS = 132  # of the H200; a rule needs a number that the tests share
MAX_SLICES = 512
Dim = tuple[int, tuple[int, ...]]  # size, stride in each tensor


@dataclass(frozen=True, slots=True)
class Tiling:
    """What the tuning table sets: see `channel_forward` for the meaning of each.

    slices: 0 keeps a set in registers, in one kernel; else a set is cut into so many slices.
    stream: one persistent kernel, with so many programs (and slices) a multiprocessor, instead of
        one for each pass.
    """

    block_m: int
    block_n: int
    num_warps: int
    chunks: int = 1
    slices: int = 0
    stream: int = 0
    packed: bool = False
    evict: str = ""
    store_cache: str = ""


@dataclass(frozen=True, slots=True)
class Steps:
    """One tensor's strides, in units of View.align but for the dense axis (0 rows, 1 cols)."""

    outer: tuple[int, ...]
    row: int
    cols: tuple[int, ...]
    dense: int

    @property
    def nested(self) -> tuple[Any, ...]:
        return (self.outer, self.row, self.cols)


@dataclass(frozen=True, slots=True)
class View:
    """The tensors of a call as outer x rows x cols.

    channel: where the channel is found: "outer", "row" (modulo `channels`), or "group", outer modulo
    the groups of `per_group` rows. segment: neighbouring `per_group` rows share a statistic.
    statistics: strides of the saved statistics along outer and rows.
    """

    pool: bool
    outer: int
    rows: int
    cols: int
    channels: int
    channel: str
    steps: tuple[Steps, ...]
    outer_sizes: tuple[int, ...] = ()
    col_sizes: tuple[int, ...] = ()
    align: int = 1
    per_group: int = 1
    segment: bool = False
    statistics: tuple[int, int] = (0, 1)
    averaged: bool = False  # the rows are one channel's instances

    @property
    def count(self) -> int:
        """Values of one statistic."""
        return self.cols * (self.rows if self.pool else self.per_group if self.segment else 1)

    @property
    def key(self) -> list[int]:
        """What the tuning table knows a view by."""
        return [self.outer, self.rows, self.cols, self.steps[0].dense]


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """A tiling and the view it is for. `source`: "rule", or the label of the table's row."""

    view: View
    tiling: Tiling
    source: str
    given: bool = False  # the statistics are inputs

    @property
    def rows_a_program(self) -> int:
        """Rows of a program: whole groups where rows form groups."""
        v, m = self.view, self.tiling.block_m
        return m // v.per_group * v.per_group if v.segment else m

    @property
    def row_blocks(self) -> int:
        return 1 if self.view.pool else -(-self.view.rows // self.rows_a_program)

    @property
    def units(self) -> int:
        return self.view.outer * self.row_blocks

    @property
    def items(self) -> int:
        """Tiles of a set."""
        t, v = self.tiling, self.view
        bands = -(-v.rows // t.block_m) if v.pool else 1
        return bands * -(-v.cols // (t.block_n * t.chunks))

    @property
    def even(self) -> bool:
        """The tiles cover rows and cols exactly."""
        t, v = self.tiling, self.view
        return v.rows % self.rows_a_program == 0 == v.cols % (t.block_n * t.chunks) and (
            self.rows_a_program == t.block_m
        )

    def constexprs(self) -> dict[str, Any]:
        """The compile-time arguments that all kernels share, in their order."""
        t, v = self.tiling, self.view
        dense = {s.dense for s in v.steps}
        return {
            "POOL": v.pool,
            "SEGMENT": v.segment,
            "CHANNEL": v.channel,
            "ONE_OUTER": v.outer == 1,
            "EVEN": self.even,
            "PACKED": t.packed,
            "ALIGN": v.align,
            "ALIGN_I": v.align if 0 in dense else 1,
            "ALIGN_J": v.align if 1 in dense else 1,
            "ROWS": self.rows_a_program,
            "BLOCK_M": t.block_m,
            "BLOCK_N": t.block_n,
            "CHUNKS": t.chunks,
            "EVICT": t.evict,
            "STORE_CACHE": t.store_cache,
        }


def merge(dims: Iterable[Dim]) -> list[Dim]:
    """Join neighbouring dims that step through every tensor as one; size-1 dims vanish."""
    found: list[Dim] = []
    for size, strides in dims:
        if size == 1:
            continue
        if found and all(a == size * b for a, b in zip(found[-1][1], strides, strict=True)):
            found[-1] = (found[-1][0] * size, strides)
        else:
            found.append((size, strides))
    return found


def dims_of(metas: Sequence[TensorMeta]) -> list[Dim]:
    return [(size, tuple(m.stride[d] for m in metas)) for d, size in enumerate(metas[0].shape)]


def make_view(
    outer: Sequence[Dim], row: Dim | None, cols: Sequence[Dim], tensors: int, **fields: Any
) -> View:
    """The view over these dims: strides in units of their common divisor."""
    zeros = (0,) * tensors
    rows, row_strides = row or (1, zeros)
    n_cols = math.prod(size for size, _ in cols)
    n_outer = math.prod(size for size, _ in outer)
    outer, cols = (list(dims) or [(1, zeros)] for dims in (outer, cols))
    steps = []
    divisors = [MAX_ALIGN]
    for t in range(tensors):
        o, c = ([strides[t] for _, strides in dims] for dims in (outer, cols))
        r = row_strides[t]
        dense = 0 if r == 1 and rows > 1 else 1 if c == [1] or n_cols == 1 else -1
        divisors += [*o, *([rows] if dense == 0 else [r]), *([n_cols] if dense == 1 else c)]
        steps.append((o, r, c, dense))
    align = math.gcd(*divisors)
    return View(
        outer=n_outer,
        rows=rows,
        cols=n_cols,
        outer_sizes=tuple(size for size, _ in outer[1:]),
        col_sizes=tuple(size for size, _ in cols[1:]),
        align=align,
        steps=tuple(
            Steps(
                tuple(s // align for s in o),
                r if dense == 0 else r // align,
                tuple(c) if dense == 1 else tuple(s // align for s in c),
                dense,
            )
            for o, r, c, dense in steps
        ),
        **fields,
    )


def channels_first_in_memory(meta: TensorMeta) -> bool:
    """Whether neighbouring channels are neighbours in memory."""
    return meta.stride[1] == 1 and meta.shape[1] > 1


def batch_view(metas: Sequence[TensorMeta]) -> View:
    """One statistic a channel."""
    n, c, *spatial = dims_of(metas)
    cols = merge([n, *spatial])
    fields: dict[str, Any] = {"tensors": len(metas), "channels": c[0]}
    if channels_first_in_memory(metas[0]) or len(cols) <= 1:
        return make_view([], c, cols, pool=False, channel="row", **fields)
    return make_view([c], cols[0], cols[1:], pool=True, channel="outer", **fields)


def group_view(metas: Sequence[TensorMeta], groups: int, affine: bool) -> View:
    """One statistic a sample and group."""
    n, c, *spatial = dims_of(metas)
    size = c[0] // groups
    if size == 1:
        return instance_view(metas)
    g: Dim = (groups, tuple(s * size for s in c[1]))
    member: Dim = (size, c[1])
    fields: dict[str, Any] = {"tensors": len(metas), "channels": c[0], "per_group": size}
    whole, sets = merge([member, *spatial]), merge([n, g])
    if not affine and len(whole) == 1 and len(sets) <= 1:
        fields["per_group"] = 1
        row = sets[0] if sets else None
        return make_view([], row, whole, pool=False, channel="row", **fields)
    narrow = size * metas[0].dtype.itemsize < SECTOR
    if channels_first_in_memory(metas[0]) and narrow:
        fields |= {"segment": True, "statistics": (groups, 1)}
        return make_view([n], c, merge(spatial), pool=False, channel="row", **fields)
    return make_view(sets, member, merge(spatial), pool=True, channel="group", **fields)


def instance_view(metas: Sequence[TensorMeta], averaged: bool = False) -> View:
    """One statistic a sample and channel. averaged: rows are the samples of one channel."""
    n, c, *spatial = dims_of(metas)
    fields: dict[str, Any] = {"tensors": len(metas), "channels": c[0], "pool": False}
    cols = merge(spatial)
    if averaged:
        fields |= {"statistics": (1, c[0]), "averaged": True}
        return make_view([c], n, cols, channel="outer", **fields)
    sets = merge([n, c])
    if len(sets) <= 1:
        return make_view([], sets[0] if sets else None, cols, channel="row", **fields)
    return make_view([n], c, cols, channel="row", statistics=(c[0], 1), **fields)


def tile_elements(view: View) -> int:
    """Elements of the tile that holds one set, or the sets that cannot be parted."""
    rows = view.rows if view.pool or view.averaged else view.per_group if view.segment else 1
    if not view.pool and view.steps[0].dense == 0:  # whole sectors
        rows = max(rows, min(8, view.rows))
    return power_of_two(rows) * power_of_two(view.cols)


def resident(view: View, itemsize: int, tensors: int) -> bool:
    """Whether a program can hold a set of every tensor that is read in its registers."""
    elements = tile_elements(view) * tensors
    return elements <= RESIDENT_ELEMENTS and elements * itemsize <= RESIDENT_BYTES


def rule(view: View, itemsize: int, tensors: int, given: bool) -> Tiling:
    """A tiling for any view, where the table is silent."""
    vector = 16 // itemsize
    if not given and resident(view, itemsize, tensors):
        return resident_rule(view, itemsize, vector)
    tile = 256 * vector  # a vector for each thread of 8 warps
    if view.steps[0].dense == 0:
        block_n = min(power_of_two(view.cols), 32)
        block_m = min(power_of_two(view.rows), max(8 * vector, tile // block_n))
        if view.segment:
            block_m = max(block_m, power_of_two(view.per_group))
        block_n, warps = min(power_of_two(view.cols), max(tile // block_m, 1)), 8
    else:
        block_n = min(power_of_two(view.cols), tile)
        block_m = tile // block_n if view.pool or given else 1
        block_m, warps = min(block_m, power_of_two(view.rows)), 8
    chunks = 4 if view.cols >= 4 * block_n else 1
    t = Tiling(block_m, block_n, warps, chunks=chunks, evict="evict_first" if given else "")
    plan = ChannelPlan(view, t, "rule")
    wanted = -(-8 * MULTIPROCESSORS // max(plan.units, 1))
    return replace(t, slices=max(min(plan.items, wanted, MAX_SLICES), 1))


def resident_rule(view: View, itemsize: int, vector: int) -> Tiling:
    """A set in registers: 2 vectors a thread; several sets a program where they are small."""
    fixed = view.pool or view.averaged
    block_m = power_of_two(view.rows if fixed else view.per_group if view.segment else 1)
    block_n = power_of_two(view.cols)
    if not fixed:
        least = 4 if view.steps[0].dense == 0 else 1
        sets = min(max(8 * 32 * vector // (block_m * block_n), least), power_of_two(view.rows))
        sets = 1 << (sets.bit_length() - 1)
        block_m *= sets if block_m * sets * block_n <= RESIDENT_ELEMENTS else 1
    warp = 32 * vector  # elements that a warp loads at once
    eighth = block_n // 8
    if view.cols <= 7 * eighth and block_m * eighth >= 8 * warp:  # fewer idle lanes
        return Tiling(block_m, eighth, 8, chunks=-(-view.cols // eighth), packed=itemsize == 2)
    warps = min(max(block_m * block_n // (2 * warp), 1), 32)
    packed = itemsize == 2 and block_m * block_n > 2 * warp * warps
    return Tiling(block_m, block_n, warps, packed=packed)


@functools.cache
def tuning_rows() -> tuple[dict[str, Any], ...]:
    """The rows of tuning/channel_sm90.json."""
    text = resources.files("opkiln_norm").joinpath("tuning/channel_sm90.json").read_text("utf-8")
    return tuple(json.loads(text)["rows"])


def plan_of(op: str, view: View, itemsize: int, tensors: int, given: bool = False) -> ChannelPlan:
    """The first row of the table that covers the view, else what the rule says."""
    largest = max(view.outer, view.rows, view.cols)
    if largest > MAX_INDEX:
        raise ValueError(f"an axis of {largest}: only {MAX_INDEX} fit the index")
    if min(view.outer, view.rows, view.cols) == 0:
        raise ValueError("an input of no elements")
    for row in tuning_rows():
        key = (row["op"], row["itemsize"], row["given"], row["view"])
        if key == (op, itemsize, given, view.key):
            return ChannelPlan(view, Tiling(**row["use"]), row["label"], given)
    return ChannelPlan(view, rule(view, itemsize, tensors, given), "rule", given)


def forward_plan(call: Call) -> ChannelPlan:
    """The plan of a batch_norm, group_norm or instance_norm call. ValueError: it cannot be."""
    x, params, op = call.tensors.input, call.params, call.spec.name
    metas, itemsize = (x, call.outputs[0]), x.dtype.itemsize
    if 0 in x.shape:
        raise ValueError("an input of no elements")
    if op == "group_norm":
        affine = call.tensors.weight is not None or call.tensors.bias is not None
        return plan_of(op, group_view(metas, params.num_groups, affine), itemsize, 1)
    given = not (params.training if op == "batch_norm" else params.use_input_stats)
    if given:
        view = instance_view(metas)
        if op == "batch_norm":  # what it saves are its channels' statistics, not the planes'
            view = replace(view, statistics=(x.shape[1], 1))
        return plan_of(op, view, itemsize, 1, given)
    if op == "batch_norm":
        return plan_of(op, batch_view(metas), itemsize, 1)
    if call.tensors.running_mean is not None and not channels_first_in_memory(x):
        view = instance_view(metas, averaged=True)
        if resident(view, itemsize, 1):
            return plan_of(op, view, itemsize, 1)
    return plan_of(op, instance_view(metas), itemsize, 1)


def backward_plan(call: Call) -> ChannelPlan:
    """The plan of a batch_norm_backward call."""
    x, g = call.tensors.input, call.tensors.grad_out
    if 0 in x.shape:
        raise ValueError("an input of no elements")
    grad_input = call.outputs[0] if call.params.output_mask[0] else x
    return plan_of(call.spec.name, batch_view((x, g, grad_input)), x.dtype.itemsize, 2)
