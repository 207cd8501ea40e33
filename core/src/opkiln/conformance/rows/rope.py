"""Rows of the rotary embeddings: one table for the five rules, one for explicit positions.

Angles are float32: their error is half a unit of the largest position, so `condition` is that.
"""

from __future__ import annotations

from typing import Any

from opkiln.conformance.cases import ALL, BF16, F16, F32, Row, row
from opkiln.conformance.tensors import integers, t

# label, shape, layout, fill, options, the rest of `row`.
ROPE: tuple[tuple[str, tuple[int, ...], str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("odd", (2, 7, 3, 24), "contiguous", "normal", {}, dict(dtypes=ALL)),
    ("rows", (33, 64), "contiguous", "normal", {}, dict(dtypes=(F16, BF16, F32))),
    ("two_columns", (5, 2), "contiguous", "normal", {}, {}),
    ("six_columns", (2, 5, 2, 6), "contiguous", "normal", {}, {}),
    ("width128", (1, 12, 1, 128), "contiguous", "normal", {}, {}),
    ("one_token", (2, 1, 3, 16), "contiguous", "normal", {}, {}),
    ("partial", (2, 5, 2, 32), "contiguous", "normal", dict(rotary_dim=12), dict(dtypes=ALL)),
    ("offset", (2, 5, 2, 32), "contiguous", "normal", dict(offset=4000), {}),
    ("base", (2, 9, 2, 32), "contiguous", "normal", dict(base=500000.0), {}),
    ("transposed", (2, 5, 4, 16), "transposed", "normal", {}, dict(upstream="transposed")),
    ("strided", (2, 5, 2, 16), "strided", "normal", {}, dict(upstream="strided")),
    ("padded", (2, 5, 2, 16), "padded", "normal", {}, dict(upstream="padded")),
    ("shifted", (2, 5, 2, 16), "shifted", "normal", {}, {}),
    ("expanded", (3, 5, 2, 16), "expanded", "normal", {}, dict(upstream="constant")),
    ("batch_last", (3, 5, 2, 16), "batch_last", "normal", {}, {}),
    ("empty", (0, 5, 2, 16), "contiguous", "normal", {}, {}),
    ("nan", (9, 48), "contiguous", "nan", {}, {}),
    ("inf", (9, 48), "contiguous", "one inf", dict(offset=5), {}),  # sin(0) * inf would be NaN
    ("large", (9, 48), "contiguous", "large", {}, {}),
)


def rope_rows(**options: Any) -> tuple[Row, ...]:
    made = []
    for label, shape, layout, fill, own, how in ROPE:
        tokens = shape[0] if len(shape) == 2 else shape[1]
        reach = float(tokens + own.get("offset", 0))
        values = options | own
        if values.pop("factors", False):
            pairs = own.get("rotary_dim", shape[-1]) // 2
            values["rescale_factors"] = t(pairs, fill="positive", dtype=F32)
        x = t(*shape, layout=layout, fill=fill)
        made.append(row(label, condition=reach, **how, x=x, **values))
    return tuple(made)


def bands(rule: dict[str, Any], **bounds: float) -> tuple[Row, ...]:
    """A row for each bound of a rule's bands, off its default. 64 columns over 64 positions: the
    first pair turns 10 times, the tenth once.
    """
    x = t(2, 29, 2, 64)
    return tuple(
        Row(name, {"x": x, **rule, name: value}, condition=29.0) for name, value in bounds.items()
    )


IDS = [0, 5, 1, 1, 99, 63, 64]
POSITION_IDS = tuple(
    row(label, condition=100.0, **how, position_ids=ids, max_position=100, x=x, **options)
    for label, x, ids, options, how in (
        ("odd", t(7, 3, 24), integers(IDS), {}, dict(dtypes=ALL)),
        ("partial", t(7, 2, 32), integers(IDS), dict(rotary_dim=12), dict(dtypes=ALL)),
        ("two_columns", t(7, 2, 2), integers(IDS), {}, {}),
        ("width128", t(7, 1, 128), integers(IDS), dict(base=500000.0), {}),
        ("one_token", t(1, 3, 16), integers([42]), {}, {}),
        (
            "transposed",
            t(7, 3, 16, layout="transposed"),
            integers(IDS),
            {},
            dict(upstream="transposed"),
        ),
        (
            "strided",
            t(7, 3, 16, layout="strided"),
            integers(IDS, layout="strided"),
            {},
            dict(upstream="strided"),
        ),
        ("padded", t(7, 3, 16, layout="padded"), integers(IDS), {}, dict(upstream="padded")),
        ("shifted", t(7, 3, 16, layout="shifted"), integers(IDS), {}, {}),
        ("expanded", t(7, 3, 16, layout="expanded"), integers(IDS), {}, dict(upstream="constant")),
        ("empty", t(0, 3, 16), integers([]), {}, {}),
        ("nan", t(7, 3, 16, fill="nan"), integers(IDS), {}, {}),
        ("inf", t(6, 3, 16, fill="one inf"), integers(IDS[1:]), {}, {}),
        ("large", t(7, 3, 16, fill="large"), integers(IDS), {}, {}),
    )
)


TABLES = {
    "rope_neox": ("rope_neox", rope_rows()),
    "rope_non_neox": ("rope_non_neox", rope_rows()),
    "rope_llama31": (
        "rope_llama31",
        (
            *rope_rows(scale_factor=8.0, original_max_position=64),
            *bands(
                dict(scale_factor=8.0, original_max_position=64),
                low_freq_factor=0.25,
                high_freq_factor=8.0,
            ),
        ),
    ),
    "rope_yarn": (
        "rope_yarn",
        (
            *rope_rows(scale=4.0, original_max_position=64, attn_factor=1.25),
            *bands(dict(scale=4.0, original_max_position=64), beta_fast=4.0, beta_slow=0.25),
        ),
    ),
    "rope_longrope": (
        "rope_longrope",
        rope_rows(
            factors=True, max_position_embeddings=8192, original_max_position_embeddings=1024
        ),
    ),
    "rope_neox_position_ids": ("rope_neox_position_ids", POSITION_IDS),
}
