"""Rows of the convolutions: one table for every rank."""

from __future__ import annotations

from typing import Any

from opkiln.conformance.cases import ALL, BF16, F16, F32, Row, row
from opkiln.conformance.tensors import t

SIZES = {1: (23,), 2: (9, 11), 3: (5, 7, 6)}

# label, input channels, output channels, kernel, options, how the tensors are made, rest of `row`.
# Values of a kernel or an option: per dim, cut to the rank; no kernel: the whole
# input. one_channel: its one bias gradient sums many terms that may cancel.
CONV: tuple[
    tuple[str, int, int, tuple[int, ...], dict[str, Any], dict[str, Any], dict[str, Any]], ...
] = (
    ("k3", 5, 7, (3, 3, 3), dict(padding=1), {}, dict(dtypes=ALL)),
    ("k3_c16", 16, 32, (3, 3, 3), dict(padding=1), {}, dict(dtypes=(F16, BF16, F32))),
    ("no_bias", 5, 7, (3, 3, 3), {}, dict(bias=False), {}),
    ("pointwise", 24, 19, (1, 1, 1), {}, {}, dict(dtypes=ALL)),
    ("pointwise_stride", 8, 8, (1, 1, 1), dict(stride=2), {}, {}),
    ("stride", 4, 6, (3, 2, 3), dict(stride=(2, 3, 2), padding=(1, 0, 1)), {}, {}),
    ("dilation", 4, 6, (3, 3, 2), dict(dilation=(2, 3, 2), padding=2), {}, {}),
    ("same", 4, 6, (3, 5, 3), dict(padding="same"), {}, {}),
    ("same_even", 4, 6, (4, 2, 2), dict(padding="same", dilation=(1, 3, 1)), {}, {}),
    ("valid", 4, 6, (3, 2, 3), dict(padding="valid", stride=2), {}, {}),
    ("groups", 6, 9, (3, 3, 3), dict(groups=3, padding=1), {}, dict(dtypes=(F16, BF16, F32))),
    ("depthwise", 8, 8, (3, 3, 3), dict(groups=8, padding=1), {}, {}),
    ("depthwise_twice", 4, 8, (3, 3, 3), dict(groups=4), {}, {}),
    ("one_channel", 1, 1, (3, 3, 3), {}, {}, dict(magnitude=10.0)),
    ("whole", 3, 4, (), dict(padding=(0, 1, 0)), {}, {}),
    ("large_padding", 3, 4, (2, 2, 2), dict(padding=3), {}, {}),
    ("unbatched", 3, 4, (3, 3, 3), {}, dict(batch=()), {}),
    ("empty", 3, 4, (3, 3, 3), {}, dict(batch=(0,)), {}),
    (
        "transposed",
        4,
        6,
        (3, 3, 3),
        dict(padding=1),
        dict(layout="transposed"),
        dict(upstream="transposed"),
    ),
    ("strided", 4, 6, (3, 3, 3), {}, dict(layout="strided"), dict(upstream="strided")),
    ("padded", 4, 6, (3, 3, 3), {}, dict(layout="padded"), {}),
    ("shifted", 8, 8, (3, 3, 3), {}, dict(layout="shifted"), {}),
    ("expanded", 4, 6, (3, 3, 3), {}, dict(layout="expanded"), dict(upstream="constant")),
    ("batch_last", 4, 6, (3, 3, 3), {}, dict(layout="batch_last"), {}),
    (
        "channels_last",
        6,
        8,
        (3, 3, 3),
        dict(padding=1),
        dict(layout="channels_last"),
        dict(upstream="channels_last"),
    ),
    ("weight_strided", 4, 6, (3, 3, 3), {}, dict(weight_layout="strided"), {}),
    ("nan", 3, 4, (3, 3, 3), dict(padding=1), dict(fill="one nan"), {}),
    ("inf", 3, 4, (3, 3, 3), dict(padding=1), dict(fill="one inf"), {}),
    ("large", 3, 4, (3, 3, 3), dict(padding=1), dict(fill="large"), dict(dtypes=(BF16, F32))),
)


def conv_rows(rank: int) -> tuple[Row, ...]:
    made = []
    for label, c_in, c_out, kernel, options, tensors, how in CONV:
        made_of = dict(tensors)
        if made_of.get("layout") == "channels_last" and rank == 1:
            continue
        batch = made_of.pop("batch", (2,))
        bias = t(c_out) if made_of.pop("bias", True) else None
        weight_layout = made_of.pop("weight_layout", "contiguous")
        per_dim: dict[str, Any] = {
            name: value[:rank] if isinstance(value, tuple) else value
            for name, value in options.items()
        }
        c_group = c_in // options.get("groups", 1)
        extent = kernel[:rank] or SIZES[rank]
        made.append(
            row(
                label,
                **how,
                input=t(*batch, c_in, *SIZES[rank], **made_of),
                weight=t(c_out, c_group, *extent, layout=weight_layout),
                bias=bias,
                **per_dim,
            )
        )
    return tuple(made)


TABLES = {f"conv{n}d": (f"conv{n}d", conv_rows(n)) for n in (1, 2, 3)}
