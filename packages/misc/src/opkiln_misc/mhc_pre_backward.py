"""Backward of mhc_pre: gradients of x, phi and b, in two to four launches, without atomics.

    1. sums of each row over splits of the columns      mhc_pre_sums_kernel
    2. from them the coefficients of a row's gradients   mhc_pre_coefficients_kernel
    3. the gradients, those of phi and b by groups of rows    mhc_pre_gradients_kernel
    4. the groups added up                               mhc_pre_groups_kernel
Of few rows every program of 3 does 2 for itself, and one group needs no 4. H is recomputed, the
Sinkhorn matrices are walked back from the last by what they were divided by. Arithmetic is f32;
products with phi run in three parts of TF32, which leaves an error near f32's own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from opkiln.device.outputs import allocator
from opkiln.device.triton import launcher
from opkiln.ops.misc.mhc import expansions

from opkiln_misc.mhc_pre_gates import mhc_pre_coefficients_kernel
from opkiln_misc.mhc_pre_gradients import (
    mhc_pre_gradients_kernel,
    mhc_pre_groups_kernel,
    mhc_pre_sums_kernel,
)

MAX_STREAMS = 8
MOST_FOLDED = 8  # rows whose coefficients every program computes for itself
PROGRAMS = 264  # that fill an H200 twice over
ADDED = 512  # elements that a program of mhc_pre_groups_kernel adds up
MOST_M = 32  # columns of dH and phi that kernel 3 holds at once
ADDED_A_THREAD = 32  # elements of the splits that it adds up at once


@dataclass(frozen=True, slots=True)
class Tiling:
    """sum_rows, sum_columns, sum_warps, splits: of kernel 1; gate_rows, gate_warps: of 2, or of 3
    where it is folded into that; rows, columns, warps, own (streams a program), groups: of 3.
    """

    sum_rows: int = 16
    sum_columns: int = 32
    sum_warps: int = 4
    splits: int = 1
    gate_rows: int = 4
    gate_warps: int = 1
    fold: bool = False
    rows: int = 16
    columns: int = 64
    warps: int = 8
    own: int = 1
    groups: int = 1
    stages: int = 1
    precision: str = "tf32x3"


def rule(batch: int, columns: int, streams: int, itemsize: int) -> Tiling:
    """Few rows: as many programs as there are tiles of columns. Many: until the GPU is full. Tiles
    as large as registers allow.
    """
    few, wide = batch <= MOST_FOLDED and streams <= 4, streams > 4
    own = (3 if streams == 6 else 1) if wide else streams
    width = max(triton.next_power_of_2(columns), 16)
    tile = min(16 if wide else 64, width)
    if few:
        block = min(64 if itemsize < 4 else 32, width)
        splits, gate_rows = triton.cdiv(columns, block), triton.next_power_of_2(batch)
        return Tiling(16, block, 4, splits, gate_rows, 1, True, 16, tile, 4, own)
    sum_rows, block = 16 if wide else 32, min(16 if wide else 32, width)
    row_tiles = triton.cdiv(batch, sum_rows)
    splits = min(max(PROGRAMS // row_tiles, 1), triton.cdiv(columns, block))
    gates = (4, 1) if splits == 1 else (1, 4)
    programs = triton.cdiv(columns, tile) * (streams // own)
    groups = min(max(PROGRAMS // programs, 1), triton.cdiv(batch, 16))
    # 8192 rows of 4 x 2560 bf16 take 2261 us, with eight warps 2992; in f32 four would spill.
    sum_warps = 8 if wide or itemsize == 4 else 4
    return Tiling(sum_rows, block, sum_warps, splits, *gates, False, 16, tile, 8, own, groups)


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the workspace's parts, in floats, and what the kernels are told."""

    batch: int
    columns: int
    streams: int
    tiling: Tiling
    column_tiles: int
    sum_share: int  # columns a split, a multiple of the tile's
    splits: int
    group_rows: int
    groups: int
    repeat: int

    @property
    def m(self) -> int:
        return self.streams * (self.streams + 2)

    @property
    def sums(self) -> int:
        """Floats of a row's sums, S."""
        return self.m + 1 + self.streams * (self.streams + 1)

    @property
    def coefficients(self) -> int:
        """Floats of a row's coefficients, K."""
        return self.streams * (self.streams + 1) + 2 * self.m + 1

    @property
    def padded_streams(self) -> int:
        return int(triton.next_power_of_2(self.streams))

    @property
    def gate_programs(self) -> int:
        t = self.tiling
        return self.column_tiles if t.fold else -(-self.batch // t.gate_rows)

    @property
    def workspace(self) -> tuple[int, int, int, int]:
        """parts, sums, coefficients, rounds."""
        rows = self.gate_programs * self.tiling.gate_rows
        rounds = rows * 2 * self.repeat * self.padded_streams
        return (
            self.splits * self.batch * self.sums,
            rows * self.sums,
            rows * self.coefficients,
            max(rounds, 1),
        )


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan:
    """ValueError says what the kernels cannot serve."""
    phi, x = call.tensors.phi, call.tensors.x
    (batch, width), streams = x.shape, expansions(phi.shape[1])
    if streams > MAX_STREAMS:
        raise ValueError(f"serves up to {MAX_STREAMS} streams, phi is for {streams}")
    if width == 0:
        raise ValueError("serves rows of at least one column")
    if width * phi.shape[1] > 2**31 - 2**16:
        raise ValueError(f"serves a phi of up to 2**31 - 2**16 elements, not {width} rows")
    if batch > 2**31 - 2**10:
        raise ValueError(f"serves up to 2**31 - 2**10 rows, not {batch}")
    columns = width // streams
    t = tiling or rule(max(batch, 1), columns, streams, x.dtype.itemsize)
    share = t.sum_columns * -(-columns // (t.sum_columns * t.splits))
    group_rows = t.rows * -(-batch // (t.rows * t.groups)) or t.rows
    if t.fold and (batch > t.gate_rows or t.groups > 1 or t.own != streams):
        raise ValueError(f"{batch} rows of {streams} streams are not folded by {t}")
    return Plan(
        batch, columns, streams, t, -(-columns // t.columns), share, -(-columns // share),
        group_rows, max(-(-batch // group_rows), 1), call.params.sinkhorn_repeat,
    )  # fmt: skip


class Sizes:
    """The kernels' arguments that do not change from call to call."""

    def __init__(self, call: Any, plan: Plan) -> None:
        tensors, p = call.tensors, call.params
        t, n = plan.tiling, plan.streams
        post = tensors.grad_h_post.stride if p.return_h_post else (0, 0)
        mp = max(triton.next_power_of_2(plan.m), 16)
        sp = triton.next_power_of_2(plan.sums)
        stride_k, stride_m = tensors.phi.stride
        align = math.gcd(16, stride_k) or 1
        data = (
            *tensors.grad_x_res.stride, *tensors.grad_x_layer.stride, stride_k // align, stride_m,
            *tensors.x.stride,
        )  # fmt: skip
        warps = t.warps if t.fold else t.gate_warps
        chunk = max(ADDED_A_THREAD * 32 * warps // (t.gate_rows * sp), 1)
        chunk = min(1 << chunk.bit_length() - 1, triton.next_power_of_2(plan.splits))
        gates = (
            tensors.b.stride[0], *post, float(p.alpha_pre), float(p.alpha_post),
            float(p.alpha_res), plan.repeat, float(p.sinkhorn_eps), float(n * plan.columns),
        )  # fmt: skip
        padded = plan.padded_streams
        self.sums = (
            plan.batch, plan.columns, plan.sum_share, *data, align, n, mp, t.sum_rows,
            t.sum_columns, t.precision,
        )  # fmt: skip
        self.gates = (plan.batch, *gates, plan.splits, n, padded, sp, t.gate_rows, chunk)
        self.gradients = (
            plan.batch, plan.columns, plan.group_rows, *data, *gates, align, t.fold, plan.splits, n,
            t.own, padded, sp, min(mp, MOST_M), t.gate_rows, chunk, t.rows, t.columns, t.precision,
        )  # fmt: skip
        self.phi = n * plan.columns * plan.m


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    allocate = allocator(call.device, call.outputs)
    compute = planned(call, plan) if plan.batch else None

    def launch(*tensors: torch.Tensor) -> Any:
        outputs = allocate()
        if compute is None:
            for out in outputs:
                out.zero_()
        else:
            made = iter(outputs)
            compute(tensors, [next(made) if wanted else None for wanted in call.present])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch


def planned(call: Any, plan: Plan) -> Callable[[Any, list[Any]], None]:
    """What launches the kernels on the tensors read and written."""
    t, sizes = plan.tiling, Sizes(call, plan)
    tiles = -(-plan.batch // t.sum_rows)
    has_post = call.params.return_h_post
    run_sums = launcher(
        mhc_pre_sums_kernel, (tiles, plan.splits, 1),
        {"num_warps": t.sum_warps, "num_stages": t.stages}, sizes.sums,
    )  # fmt: skip
    run_gates = launcher(
        mhc_pre_coefficients_kernel, (plan.gate_programs, 1, 1), {"num_warps": t.gate_warps},
        sizes.gates,
    )  # fmt: skip
    run_gradients = launcher(
        mhc_pre_gradients_kernel, (plan.column_tiles, plan.groups, plan.streams // t.own),
        {"num_warps": t.warps, "num_stages": t.stages}, sizes.gradients,
    )  # fmt: skip
    space = [call.new((n,), torch.float32) for n in plan.workspace]
    allocate = allocator(call.device, tuple(space))
    add_up = grouped(call, plan, sizes.phi)

    def compute(tensors: Any, grads: list[Any]) -> None:
        g_res, g_layer, g_post, phi, x, b = tensors
        g_post = g_post if has_post else None
        parts, sums, coef, rounds = allocate()
        run_sums(g_res, g_layer, phi, x, parts)
        if not t.fold:
            run_gates(g_post, b, parts, sums, coef, rounds)

        def gradients(d_x: Any, d_phi: Any, d_b: Any) -> None:
            read = (g_res, g_layer, g_post, phi, x, b)
            run_gradients(*read, d_x, d_phi, d_b, parts, sums, coef, rounds)

        add_up(gradients, *grads)

    return compute


def grouped(call: Any, plan: Plan, phi_count: int) -> Callable[..., None]:
    """What runs the gradients' kernel, through a workspace where there are several groups."""
    _, has_phi, has_b = call.present
    if plan.groups == 1 or not (has_phi or has_b):
        return lambda gradients, *grads: gradients(*grads)
    wanted = [phi_count * has_phi, plan.m * has_b]
    metas = [call.new((plan.groups * n,), torch.float32) for n in wanted if n]
    allocate = allocator(call.device, tuple(metas))
    blocks = -(-phi_count // ADDED) * has_phi + has_b
    fixed = (phi_count, plan.m, plan.groups, ADDED)
    run = launcher(mhc_pre_groups_kernel, (blocks, 1, 1), {"num_warps": 4}, fixed)

    def compute(gradients: Callable[..., None], d_x: Any, d_phi: Any, d_b: Any) -> None:
        made = iter(allocate())
        part_phi = next(made) if has_phi else None
        part_b = next(made) if has_b else None
        gradients(d_x, part_phi, part_b)
        run(part_phi, part_b, d_phi, d_b)

    return compute
