"""Rows for a GPU only: in Triton's interpreter they would take minutes.

MANY: a dim other than the batch is longer than the y and z axes of a grid are (65,535), or a row
has more scores than one block holds. TILED: calls that grow along `dim` to more elements than 32
bits count, for ops without a batch, and for planes and rows that the first case does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opkiln.conformance.cases import BF16, F16, F32, Row, row
from opkiln.conformance.tensors import T, integers, t

ONE = (F32,)
MANY_AXIS = 65_539  # a prime above 65,535


@dataclass(frozen=True)
class Tiled:
    """names: the tensors repeated along `dim`, which is also the dim of every output that grows."""

    row: Row
    names: tuple[str, ...]
    dim: int = 0


def affine(channels: int) -> dict[str, Any]:
    return {"weight": t(channels), "bias": t(channels)}


def statistics(channels: int) -> dict[str, Any]:
    return {"running_mean": t(channels), "running_var": t(channels, fill="positive")}


def rope(*shape: int) -> Row:
    return row("many_heads" if len(shape) == 4 else "many_tokens", ONE, shape[0], x=t(*shape))


def topk(label: str, scores: T, k: int) -> Row:
    batch, queries, kv, _ = scores.shape
    starts, ends = (
        T((batch, queries), dtype=torch.int32, values=[v] * (batch * queries)) for v in (0, kv)
    )
    return row(label, ONE, scores=scores, starts=starts, ends=ends, topk=k)


def pool(rank: int, **options: Any) -> Row:
    return row("many_channels", ONE, input=t(1, MANY_AXIS, *(4, 2, 2)[:rank]), **options)


MANY: dict[str, tuple[Row, ...]] = {
    "batch_norm": (
        row(
            "many_channels",
            ONE,
            input=t(8, MANY_AXIS, 2),  # 16 values a channel: no variance near zero
            **statistics(MANY_AXIS),
            **affine(MANY_AXIS),
            training=True,
        ),
        row("many_samples", ONE, input=t(MANY_AXIS, 2, 3), **statistics(2), training=True),
    ),
    "group_norm": (
        row(
            "many_groups",
            ONE,
            input=t(1, 2 * MANY_AXIS, 12),
            num_groups=MANY_AXIS,
            **affine(2 * MANY_AXIS),
        ),
    ),
    "instance_norm": (row("many_channels", ONE, input=t(1, MANY_AXIS, 24), **affine(MANY_AXIS)),),
    **{
        f"conv{n}d": (
            row(
                "many_outputs",
                ONE,
                grad=False,
                input=t(1, 2, *[2] * n),
                weight=t(MANY_AXIS, 2, *[1] * n),
            ),
            row(
                "many_groups",
                ONE,
                grad=False,
                input=t(1, MANY_AXIS, *[2] * n),
                weight=t(MANY_AXIS, 1, *[2] * n),
                groups=MANY_AXIS,
            ),
        )
        for n in (1, 2, 3)
    },
    **{f"avg_pool{n}d": (pool(n, kernel_size=2),) for n in (1, 2, 3)},
    **{f"max_pool{n}d": (pool(n, kernel_size=2),) for n in (1, 2, 3)},
    **{f"max_pool{n}d_indices": (pool(n, kernel_size=2, return_indices=True),) for n in (1, 2, 3)},
    "adaptive_avg_pool2d": (pool(2, output_size=1),),
    "adaptive_max_pool2d": (pool(2, output_size=1),),
    "adaptive_max_pool2d_indices": (pool(2, output_size=1, return_indices=True),),
    "mean_pooling": (
        row("many_heads", ONE, input=t(1, 5, MANY_AXIS, 2), chunk_size=2),
        row("many_chunks", ONE, input=t(1, 2 * MANY_AXIS, 1, 2), chunk_size=2),
        row(
            "many_sequences",
            ONE,
            input=t(1, 3 * MANY_AXIS, 1, 2),
            chunk_size=2,
            cu_seqlens=integers(list(range(0, 3 * MANY_AXIS + 1, 3)), torch.int32),
            num_chunks=2 * MANY_AXIS,
        ),
    ),
    **{
        name: (rope(MANY_AXIS, 8), rope(1, 2, MANY_AXIS, 8))
        for name in ("rope_neox", "rope_non_neox", "rope_llama31", "rope_yarn", "rope_longrope")
    },
    "rope_neox_position_ids": (
        row(
            "many_tokens",
            ONE,
            MANY_AXIS,
            x=t(MANY_AXIS, 1, 8),
            position_ids=integers(list(range(MANY_AXIS))),
            max_position=MANY_AXIS,
        ),
        row(
            "many_heads",
            ONE,
            x=t(2, MANY_AXIS, 8),
            position_ids=integers([1, 0]),
            max_position=2,
        ),
    ),
    "topk_selector": (
        topk("many_queries", t(1, MANY_AXIS, 5, 1), 2),
        topk("many_groups", t(1, 2, 5, MANY_AXIS), 2),
        topk("long_row", t(2, 1, 2**20, 1, fill="near one"), 2048),
    ),
}

# avg_pool2d and conv3d: the planes of pytorch/pytorch#84018 and pytorch/pytorch#163539.
TILED: dict[str, Tiled] = {
    "avg_pool2d": Tiled(row("plane", (F16,), input=t(4, 64, 228, 228), kernel_size=2), ("input",)),
    "conv3d": Tiled(
        row("plane", (BF16,), input=t(1, 16, 2, 1282, 722), weight=t(16, 16, 1, 3, 3)),
        ("input",),
        dim=2,
    ),
    "fft": Tiled(row("long", (torch.complex64,), input=t(8, 65_536)), ("input",)),
    "topk_selector": Tiled(topk("long", t(1, 2, 2**18, 1), 2048), ("scores", "starts", "ends")),
    "rope_neox_position_ids": Tiled(
        row(
            "batch",
            (F16,),
            x=t(67, 5, 24),
            position_ids=integers(list(range(67))),
            max_position=67,
        ),
        ("x", "position_ids"),
    ),
    "batch_norm": Tiled(
        row(
            "batch",
            (F16,),
            input=t(67, 8, 33, 31),
            running_mean=t(8, dtype=F32),
            running_var=t(8, fill="positive", dtype=F32),
            training=True,
        ),
        ("input",),
    ),
}
