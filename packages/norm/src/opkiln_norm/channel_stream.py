"""Channel norms in slices, both passes in one persistent kernel, the second one set behind.

stream_kernel            forward: what moments_kernel and apply_kernel do
stream_backward_kernel   backward: what sums_kernel and gradient_kernel do

A pass over a set that all programs have just read finds it in L2, so that DRAM is read once. The
programs wait for each other's part of a set, but only after they have worked on the next one.
"""

import triton
import triton.language as tl

from opkiln_norm.channel_backward import gradient_slice, slice_sums
from opkiln_norm.channel_slices import apply_slice, slice_moments
from opkiln_norm.channel_tile import place


@triton.jit
def announce(counters_ptr, unit):
    """Tell the other programs that this one has written its slice of a unit's workspace."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    tl.atomic_add(counters_ptr + unit, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_all(counters_ptr, unit, programs):
    """Until all programs have announced a unit. They run at once: the launch is cooperative."""
    arrived = tl.atomic_add(counters_ptr + unit, 0, sem="acquire", scope="gpu")
    while arrived < programs:
        arrived = tl.atomic_add(counters_ptr + unit, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def leave(counters_ptr, units, programs):
    """The last program to leave, when no other reads a counter any more, sets them all to 0."""
    if tl.atomic_add(counters_ptr + units, 1, sem="acq_rel", scope="gpu") == programs - 1:
        lanes = tl.arange(0, 128)
        for first in tl.range(0, units + 1, 128):
            tl.store(counters_ptr + first + lanes, 0, mask=first + lanes <= units)


@triton.jit
def stream_kernel(
    x_ptr, rm_ptr, rv_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, moment_ptr, ws_ptr,
    x_steps, y_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, channels, per_group,
    stat, strides, count, eps, momentum,
    slices, items, sets, counters_ptr, units, GIVEN: tl.constexpr, SLICES: tl.constexpr,
    X_DENSE: tl.constexpr, Y_DENSE: tl.constexpr, POOL: tl.constexpr, SEGMENT: tl.constexpr,
    CHANNEL: tl.constexpr, ONE_OUTER: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_I: tl.constexpr, ALIGN_J: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, EVICT: tl.constexpr,
    STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: `slices` programs, all resident (a cooperative launch). Each takes its slice of every
    unit in turn: the moments of unit k, then the result of unit k - 1, whose moments the others
    have had a unit's time to write. counters [units + 1] is 0 before and after.
    """
    n_rows = i_units * ALIGN_I
    n_cols = j_units * ALIGN_J
    part = tl.program_id(0)
    for unit in tl.range(0, units + 1):
        if unit < units:
            outer, first_row = place(unit, row_blocks, ONE_OUTER, ROWS)
            slice_moments(
                x_ptr, ws_ptr, outer, first_row, part, slices, items, sets, x_steps, outer_sizes,
                col_sizes, n_rows, n_cols, X_DENSE, POOL, EVEN, ALIGN, ROWS, BLOCK_M, BLOCK_N,
                CHUNKS,
                "evict_last",
            )  # fmt: skip
            announce(counters_ptr, unit)
        if unit > 0:
            wait_for_all(counters_ptr, unit - 1, slices)
            outer, first_row = place(unit - 1, row_blocks, ONE_OUTER, ROWS)
            apply_slice(
                x_ptr, rm_ptr, rv_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, moment_ptr, ws_ptr,
                outer, first_row, part, slices, items, sets, x_steps, y_steps, outer_sizes,
                col_sizes, n_rows, n_cols, channels, per_group, stat, strides, count, eps,
                momentum, GIVEN, SLICES, X_DENSE, Y_DENSE, POOL,
                SEGMENT, CHANNEL, EVEN, ALIGN, ROWS, BLOCK_M, BLOCK_N, CHUNKS, "evict_first",
                STORE_CACHE,
            )  # fmt: skip
    leave(counters_ptr, units, slices)


@triton.jit
def stream_backward_kernel(
    x_ptr, g_ptr, w_ptr, mean_ptr, rstd_ptr, d_ptr, gw_ptr, gb_ptr, ws_ptr,
    x_steps, g_steps, d_steps, outer_sizes, col_sizes, i_units, j_units, row_blocks, channels,
    per_group, strides, count, slices, items, sets, counters_ptr, units,
    TRAINING: tl.constexpr, SLICES: tl.constexpr,
    X_DENSE: tl.constexpr, G_DENSE: tl.constexpr, D_DENSE: tl.constexpr,
    POOL: tl.constexpr, SEGMENT: tl.constexpr, CHANNEL: tl.constexpr, ONE_OUTER: tl.constexpr,
    EVEN: tl.constexpr, PACKED: tl.constexpr, ALIGN: tl.constexpr, ALIGN_I: tl.constexpr,
    ALIGN_J: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr, EVICT: tl.constexpr, STORE_CACHE: tl.constexpr,
):  # fmt: skip
    """Grid: `slices` programs, all resident, as in stream_kernel."""
    n_rows = i_units * ALIGN_I
    n_cols = j_units * ALIGN_J
    part = tl.program_id(0)
    for unit in tl.range(0, units + 1):
        if unit < units:
            outer, first_row = place(unit, row_blocks, ONE_OUTER, ROWS)
            slice_sums(
                x_ptr, g_ptr, mean_ptr, ws_ptr, outer, first_row, part, slices, items, sets,
                x_steps, g_steps, outer_sizes, col_sizes, n_rows, n_cols, channels, per_group,
                strides,
                X_DENSE, G_DENSE, POOL, CHANNEL, EVEN, ALIGN, ROWS, BLOCK_M, BLOCK_N, CHUNKS,
                "evict_last",
            )  # fmt: skip
            announce(counters_ptr, unit)
        if unit > 0:
            wait_for_all(counters_ptr, unit - 1, slices)
            outer, first_row = place(unit - 1, row_blocks, ONE_OUTER, ROWS)
            gradient_slice(
                x_ptr, g_ptr, w_ptr, mean_ptr, rstd_ptr, d_ptr, gw_ptr, gb_ptr, ws_ptr,
                outer, first_row, part, slices, items, sets, x_steps, g_steps, d_steps,
                outer_sizes, col_sizes, n_rows, n_cols, channels, per_group, strides, count,
                TRAINING,
                SLICES, X_DENSE, G_DENSE, D_DENSE, POOL, CHANNEL, EVEN, ALIGN, ROWS, BLOCK_M,
                BLOCK_N, CHUNKS, "evict_first", STORE_CACHE,
            )  # fmt: skip
    leave(counters_ptr, units, slices)
