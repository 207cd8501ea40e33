"""Rows of the pools: one table of windows for every rank."""

from __future__ import annotations

from typing import Any

import torch

from opkiln.conformance.cases import ALL, BF16, F16, F32, Row, row
from opkiln.conformance.tensors import integers, t

Window = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]

# label, window options, how the tensor is made, the rest of `row`. Values of a window: per dim,
# cut to the rank; sizes are SIZES of the rank.
SIZES = {1: (23,), 2: (9, 11), 3: (5, 7, 6)}
WINDOWS: tuple[Window, ...] = (
    ("k3_s2_p1", dict(kernel_size=3, stride=2, padding=1), {}, dict(dtypes=ALL)),
    ("k2", dict(kernel_size=2), {}, dict(dtypes=(F16, BF16, F32))),
    ("k1", dict(kernel_size=1), {}, {}),
    ("overlap", dict(kernel_size=(4, 3, 2), stride=1, padding=(2, 1, 0)), {}, {}),
    ("stride_over", dict(kernel_size=2, stride=(3, 4, 3)), {}, {}),
    ("ceil", dict(kernel_size=3, stride=(3, 2, 2), padding=(1, 0, 1), ceil_mode=True), {}, {}),
    ("whole", dict(kernel_size="sizes"), {}, {}),
    ("unbatched", dict(kernel_size=3, stride=2), dict(batch=()), {}),
    ("empty", dict(kernel_size=3, stride=2), dict(batch=(0,)), {}),
    (
        "transposed",
        dict(kernel_size=3, stride=2),
        dict(layout="transposed"),
        dict(upstream="transposed"),
    ),
    ("strided", dict(kernel_size=2, stride=2), dict(layout="strided"), dict(upstream="strided")),
    ("padded", dict(kernel_size=2, stride=2), dict(layout="padded"), dict(upstream="padded")),
    ("shifted", dict(kernel_size=2, stride=2), dict(layout="shifted"), {}),
    ("expanded", dict(kernel_size=2, stride=2), dict(layout="expanded"), dict(upstream="constant")),
    ("batch_last", dict(kernel_size=2, stride=2), dict(layout="batch_last"), {}),
    (
        "channels_last",
        dict(kernel_size=3, stride=2, padding=1),
        dict(layout="channels_last"),
        dict(upstream="channels_last"),
    ),
    ("nan", dict(kernel_size=3, stride=2, padding=1), dict(fill="nan"), {}),
    ("large", dict(kernel_size=3, stride=2), dict(fill="large"), {}),
)
MAX_WINDOWS: tuple[Window, ...] = (
    ("dilated", dict(kernel_size=3, stride=1, padding=1, dilation=(2, 3, 2)), {}, {}),
    ("ties", dict(kernel_size=3, stride=2, padding=1), dict(fill="ties"), {}),
    ("negative", dict(kernel_size=3, stride=2, padding=1), dict(fill="negative"), {}),
    ("inf", dict(kernel_size=3, stride=2, padding=1), dict(fill="inf"), {}),
    ("only_-inf", dict(kernel_size=2, stride=2), dict(fill="-inf"), {}),
)
AVERAGE_WINDOWS: tuple[Window, ...] = (
    ("inf", dict(kernel_size=3, stride=2, padding=1), dict(fill="one inf"), {}),
    (
        "exclude_padding",
        dict(kernel_size=3, stride=2, padding=1, count_include_pad=False),
        {},
        dict(dtypes=ALL),
    ),
    (
        "exclude_padding_ceil",
        dict(kernel_size=3, stride=2, padding=1, count_include_pad=False, ceil_mode=True),
        {},
        {},
    ),
)
DIVISOR: Window = ("divisor", dict(kernel_size=3, stride=2, padding=1, divisor_override=5), {}, {})


def per_dim(value: Any, rank: int) -> Any:
    if value == "sizes":
        return SIZES[rank]
    return value[:rank] if isinstance(value, tuple) else value


def pool_rows(rank: int, maximum: bool, **options: Any) -> tuple[Row, ...]:
    """The window table for one pool."""
    table = [*WINDOWS, *(MAX_WINDOWS if maximum else AVERAGE_WINDOWS)]
    if not maximum and rank > 1:
        table.append(DIVISOR)
    made = []
    for label, window, tensor, how in table:
        tensor = dict(tensor)
        if tensor.get("layout") == "channels_last" and rank == 1:
            continue
        shape = (*tensor.pop("batch", (2,)), 3, *SIZES[rank])
        values = {name: per_dim(value, rank) for name, value in window.items()}
        made.append(row(label, **how, input=t(*shape, **tensor), **values, **options))
    return tuple(made)


ADAPTIVE: tuple[tuple[str, Any, dict[str, Any], dict[str, Any]], ...] = (
    ("odd", (4, 3), {}, dict(dtypes=ALL)),
    ("one", 1, {}, {}),
    ("same", (9, 11), {}, {}),
    ("keep_rows", (None, 5), {}, {}),
    ("larger", (12, 13), {}, {}),
    ("unbatched", (4, 3), dict(batch=()), {}),
    ("empty", (4, 3), dict(batch=(0,)), {}),
    ("transposed", (4, 3), dict(layout="transposed"), dict(upstream="transposed")),
    ("strided", (4, 3), dict(layout="strided"), dict(upstream="strided")),
    ("padded", (4, 3), dict(layout="padded"), {}),
    ("shifted", (3, 3), dict(layout="shifted"), {}),
    ("expanded", (3, 3), dict(layout="expanded"), dict(upstream="constant")),
    ("channels_last", (4, 3), dict(layout="channels_last"), dict(upstream="channels_last")),
    ("nan", (4, 3), dict(fill="nan"), {}),
    ("inf", (4, 3), dict(fill="one inf"), {}),
    ("large", (2, 2), dict(fill="large"), {}),
    ("ties", (4, 3), dict(fill="ties"), {}),
)


def adaptive_rows(**options: Any) -> tuple[Row, ...]:
    made = []
    for label, size, tensor, how in ADAPTIVE:
        tensor = dict(tensor)
        shape = (*tensor.pop("batch", (2,)), 3, 9, 11)
        made.append(row(label, **how, input=t(*shape, **tensor), output_size=size, **options))
    return tuple(made)


OFFSETS = [0, 7, 7, 20]  # an empty sequence in the middle
MEAN_POOLING = (
    row("tail", ALL, input=t(2, 19, 3, 5), chunk_size=4),
    row("exact", (F16, BF16, F32), input=t(2, 16, 2, 8), chunk_size=4),
    row("one_token", input=t(2, 6, 2, 5), chunk_size=1),
    row("chunk_over_all", input=t(2, 6, 2, 5), chunk_size=64),
    row("one_head", input=t(1, 33, 1, 16), chunk_size=8),
    row("long_chunk", input=t(1, 1030, 1, 3), chunk_size=512),
    row("empty_batch", input=t(0, 8, 2, 5), chunk_size=4),
    row("transposed", input=t(2, 19, 3, 5, layout="transposed"), chunk_size=4,
        upstream="transposed"),
    row("strided", input=t(2, 19, 3, 5, layout="strided"), chunk_size=4, upstream="strided"),
    row("padded", input=t(2, 19, 3, 5, layout="padded"), chunk_size=4, upstream="padded"),
    row("shifted", input=t(2, 16, 2, 8, layout="shifted"), chunk_size=4),
    row("expanded", input=t(2, 19, 3, 5, layout="expanded"), chunk_size=4, upstream="constant"),
    row("batch_last", input=t(2, 19, 3, 5, layout="batch_last"), chunk_size=4),
    row("nan", input=t(2, 19, 3, 5, fill="nan"), chunk_size=4),
    row("inf", input=t(2, 19, 3, 5, fill="inf"), chunk_size=4),
    row("large", input=t(2, 19, 3, 5, fill="large"), chunk_size=4),
    row("sequences", ALL, input=t(1, 20, 2, 5), cu_seqlens=integers(OFFSETS), chunk_size=4),
    row("sequences_int32", input=t(1, 20, 2, 5), chunk_size=3,
        cu_seqlens=integers(OFFSETS, dtype=torch.int32)),
    row("sequences_padded", input=t(1, 20, 2, 5, layout="padded"), chunk_size=4,
        cu_seqlens=integers(OFFSETS, layout="strided")),
    row("sequences_room", input=t(1, 20, 2, 5), cu_seqlens=integers(OFFSETS), chunk_size=4,
        num_chunks=9),
    row("one_sequence", input=t(1, 20, 2, 5), cu_seqlens=integers([0, 20]), chunk_size=6),
)  # fmt: skip


def window_tables() -> dict[str, tuple[str, tuple[Row, ...]]]:
    tables = {}
    for n in (1, 2, 3):
        tables[f"avg_pool{n}d"] = (f"avg_pool{n}d", pool_rows(n, maximum=False))
        for suffix, indices in (("", False), ("_indices", True)):
            rows = pool_rows(n, maximum=True, return_indices=indices)
            tables[f"max_pool{n}d{suffix}"] = (f"max_pool{n}d", rows)
    return tables


TABLES = {
    **window_tables(),
    "adaptive_avg_pool2d": ("adaptive_avg_pool2d", adaptive_rows()),
    "adaptive_max_pool2d": ("adaptive_max_pool2d", adaptive_rows(return_indices=False)),
    "adaptive_max_pool2d_indices": ("adaptive_max_pool2d", adaptive_rows(return_indices=True)),
    "mean_pooling": ("mean_pooling", MEAN_POOLING),
}
