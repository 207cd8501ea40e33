"""How a channel norm is launched: the view of its tensors, and the tiling chosen for it.

A tiling comes from the measured table (tuning/channel_sm90.json) where it names the call's op,
element size and view, else from `rule`. Only tiles, flags and alignment are compiled in.
"""

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from opkiln.spec import Call

from opkiln_norm.channel_view import (
    View,
    batch_view,
    channels_first_in_memory,
    group_view,
    instance_view,
)
from opkiln_norm.row_plan import MAX_INDEX, power_of_two

RESIDENT_BYTES = 65536  # longest set that 32 warps hold in registers, of all tensors read
RESIDENT_ELEMENTS = 32768  # 32 a thread
MULTIPROCESSORS = 132  # of the H200; a rule needs a number that the tests share
MAX_SLICES = 512


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
        # Groups of rows need registers of their own: the sum over a group is a matrix.
        most = RESIDENT_ELEMENTS // (2 if view.segment else 1)
        while sets > 1 and block_m * sets * block_n > most:
            sets //= 2
        block_m *= sets
    warp = 32 * vector  # elements that a warp loads at once
    eighth = block_n // 8
    if view.cols <= 7 * eighth and block_m * eighth >= 8 * warp:  # fewer idle lanes
        return Tiling(block_m, eighth, 8, chunks=-(-view.cols // eighth), packed=itemsize == 2)
    warps = min(max(block_m * block_n // (2 * warp), 1), 32)
    packed = itemsize == 2 and block_m * block_n > 2 * warp * warps
    return Tiling(block_m, block_n, warps, packed=packed)


@functools.cache
def tuning_table() -> dict[str, Any]:
    """tuning/channel_sm90.json."""
    text = resources.files("opkiln_norm").joinpath("tuning/channel_sm90.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def tuning_rows() -> list[dict[str, Any]]:
    """The table's tilings of the Triton kernels."""
    return list(tuning_table()["rows"])


def check_view(view: View) -> None:
    """ValueError: the kernels cannot index it."""
    largest = max(view.outer, view.rows, view.cols)
    if largest > MAX_INDEX:
        raise ValueError(f"an axis of {largest}: only {MAX_INDEX} fit the index")
    if min(view.outer, view.rows, view.cols) == 0:
        raise ValueError("an input of no elements")


def plan_of(op: str, view: View, itemsize: int, tensors: int, given: bool = False) -> ChannelPlan:
    """The first row of the table that covers the view, else what the rule says."""
    check_view(view)
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


def planes_plan(call: Call) -> ChannelPlan:
    """The plan of a group_norm_backward or instance_norm_backward call: groups in registers, or
    slices of planes.
    """
    x, g, groups = call.tensors.input, call.tensors.grad_out, call.tensors.mean.shape[1]
    if 0 in x.shape:
        raise ValueError("an input of no elements")
    if x.shape[0] * x.shape[1] > MAX_INDEX:
        raise ValueError(f"{x.shape[0] * x.shape[1]} planes: only {MAX_INDEX} fit the index")
    metas = (x, g, call.outputs[0] if call.params.output_mask[0] else x)
    itemsize = x.dtype.itemsize
    plan = plan_of(call.spec.name, group_view(metas, groups, affine=True), itemsize, 2)
    if not plan.tiling.slices:
        return plan
    view = replace(instance_view(metas), channel="plane", per_group=x.shape[1] // groups)
    check_view(view)
    # Both passes read all: what the first one leaves in L2 must stay.
    tiling = replace(rule(view, itemsize, 2, given=True), evict="")
    return ChannelPlan(view, tiling, "rule")


def plan_for(call: Call) -> ChannelPlan:
    """The plan of a call of any channel norm. ValueError: it cannot be."""
    plans = {
        "batch_norm_backward": backward_plan,
        "group_norm_backward": planes_plan,
        "instance_norm_backward": planes_plan,
    }
    return plans.get(call.spec.name, forward_plan)(call)
