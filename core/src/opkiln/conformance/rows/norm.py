"""Rows of the normalizations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from opkiln.conformance.cases import ALL, BF16, F16, F32, TWO, Row, row
from opkiln.conformance.tensors import t

THREE = (F16, BF16, F32)
STATISTICS = dict(dtype=F32)

# one_column: its gradient is a difference of equal terms, each times rstd <= 1 / sqrt(eps) = 316.
# label, shape, how many dims are normalized, fill, layout, the rest of `row`.
ROW_NORM: tuple[tuple[str, tuple[int, ...], int, str, str, dict[str, Any]], ...] = (
    ("odd", (5, 77), 1, "normal", "contiguous", dict(dtypes=ALL)),
    ("even", (6, 256), 1, "normal", "contiguous", dict(dtypes=THREE)),
    ("one_column", (4, 1), 1, "normal", "contiguous", dict(magnitude=316.0)),
    ("three_columns", (9, 3), 1, "normal", "contiguous", {}),
    ("width1152", (2, 1152), 1, "normal", "contiguous", {}),
    ("width8200", (2, 8200), 1, "normal", "contiguous", {}),
    ("width70001", (1, 70001), 1, "normal", "contiguous", dict(dtypes=(F32,))),
    ("dims4", (2, 3, 2, 40), 1, "normal", "contiguous", {}),
    ("normalized2", (3, 4, 10), 2, "normal", "contiguous", {}),
    ("vector", (50,), 1, "normal", "contiguous", dict(dtypes=(F32,))),
    ("transposed", (20, 48), 1, "normal", "transposed", dict(upstream="transposed")),
    ("strided", (4, 64), 1, "normal", "strided", dict(upstream="strided")),
    ("padded", (7, 64), 1, "normal", "padded", dict(upstream="padded")),
    ("shifted", (3, 128), 1, "normal", "shifted", dict(upstream="shifted")),
    ("expanded", (4, 72), 1, "normal", "expanded", dict(upstream="constant", magnitude=1.0)),
    ("batch_last", (3, 5, 24), 1, "normal", "batch_last", {}),
    ("empty", (3, 0, 40), 1, "normal", "contiguous", {}),
    ("nan", (4, 100), 1, "one nan", "contiguous", {}),
    ("inf", (4, 100), 1, "one inf", "contiguous", dict(grad=False)),
    ("zeros", (3, 48), 1, "zeros", "contiguous", {}),
    ("tiny", (4, 100), 1, "tiny", "contiguous", {}),
    ("large", (3, 300), 1, "large", "contiguous", dict(dtypes=THREE)),
    ("mean2000", (5, 96), 1, "mean2000", "contiguous", dict(dtypes=(F32,), condition=2000)),
    ("mean500", (5, 96), 1, "mean500", "contiguous", dict(condition=500)),
)


def row_norms(
    like_input: Sequence[str], vectors: Sequence[str], normalized: bool = True, **options: Any
) -> tuple[Row, ...]:
    """The table for one op. like_input: operands of the input's shape; vectors: of one row's."""
    made = []
    for label, shape, dims, fill, layout, how in ROW_NORM:
        if not normalized and dims > 1:
            continue
        tail = shape[len(shape) - dims :]
        operands: dict[str, Any] = {like_input[0]: t(*shape, fill=fill, layout=layout)}
        operands |= {name: t(*shape, layout=layout) for name in like_input[1:]}
        operands |= {name: t(*tail) for name in vectors}
        extent: dict[str, Any] = {"normalized_shape": tail} if normalized else {}
        made.append(row(label, **how, **operands, **extent, **options))
    return tuple(made)


def with_vectors(rows: tuple[Row, ...], vectors: Sequence[str]) -> tuple[Row, ...]:
    """Rows with operands absent, in another dtype, and strided."""
    base = rows[0]
    n = base.arguments["normalized_shape"]
    plain = [Row(label, base.arguments, TWO) for label in ("no_affine", "strided_affine")]
    absent, strided = plain
    extra = [
        absent.having(**dict.fromkeys(vectors, None)),
        strided.having(**{v: t(*n, layout="strided") for v in vectors}),
        Row("f32_affine", base.arguments, (F16, BF16)).having(
            **{v: t(*n, dtype=F32) for v in vectors}
        ),
        Row("bf16_affine", base.arguments, (F32,)).having(
            **{v: t(*n, dtype=BF16) for v in vectors}
        ),
        Row("large_eps", base.arguments, (F32,)).having(eps=0.25),
    ]
    extra += [Row(f"no_{v}", base.arguments, (F32,)).having(**{v: None}) for v in vectors[1:]]
    return (*rows, *extra)


def modulated(names: Sequence[str]) -> tuple[Row, ...]:
    """Adaptive norms: operands of the input's shape, per sample, and in another dtype."""
    rows = row_norms(("input", *names), (), normalized=False)
    per_sample: dict[str, Any] = {n: t(3, 1, 24) for n in names}
    per_column: dict[str, Any] = {n: t(24) for n in names}
    full: dict[str, Any] = {n: t(4, 40) for n in names}
    return (
        *rows,
        row("per_sample", ALL, input=t(3, 5, 24), **per_sample),
        row("per_column", input=t(3, 5, 24), **per_column),
        row("offset_one", input=t(4, 40), **full, scale_offset=1.0),
        row("large_eps", (F32,), input=t(4, 40), **full, eps=0.25),
    )


# label, input shape, training, fill, layout, the rest of `row`.
BATCH_NORM: tuple[tuple[str, tuple[int, ...], bool, str, str, dict[str, Any]], ...] = (
    ("train_image", (3, 5, 4, 3), True, "normal", "contiguous", dict(dtypes=ALL)),
    ("eval_image", (3, 5, 4, 3), False, "normal", "contiguous", dict(dtypes=ALL)),
    ("train_rows", (6, 5), True, "normal", "contiguous", {}),
    ("eval_rows", (6, 5), False, "normal", "contiguous", {}),
    (
        "train_signal",
        (4, 3, 9),
        True,
        "normal",
        "contiguous",
        dict(upstream="constant", magnitude=1.0),
    ),
    ("train_volume", (2, 3, 3, 4, 5), True, "normal", "contiguous", {}),
    ("train_long", (4, 2, 1700), True, "normal", "contiguous", {}),
    ("train_two_values", (2, 7), True, "normal", "contiguous", dict(dtypes=(F32,), grad=False)),
    (
        "train_channels_last",
        (2, 6, 5, 4),
        True,
        "normal",
        "channels_last",
        dict(upstream="channels_last"),
    ),
    ("eval_channels_last", (2, 6, 5, 4), False, "normal", "channels_last", {}),
    ("train_volume_channels_last", (2, 3, 3, 4, 5), True, "normal", "channels_last", {}),
    ("train_transposed", (3, 4, 6, 5), True, "normal", "transposed", dict(upstream="transposed")),
    ("train_strided", (3, 4, 10), True, "normal", "strided", dict(upstream="strided")),
    ("eval_padded", (3, 4, 10), False, "normal", "padded", {}),
    ("train_shifted", (3, 4, 16), True, "normal", "shifted", dict(upstream="shifted")),
    ("train_expanded", (3, 4, 10), True, "normal", "expanded", {}),
    ("eval_empty", (0, 3, 4, 4), False, "normal", "contiguous", {}),
    ("train_empty", (0, 3, 4, 4), True, "normal", "contiguous", {}),
    ("train_empty_planes", (2, 3, 0), True, "normal", "contiguous", {}),
    ("eval_nan", (2, 3, 20), False, "nan", "contiguous", {}),
    ("train_nan", (2, 3, 20), True, "one nan", "contiguous", {}),
    ("eval_inf", (2, 3, 20), False, "one inf", "contiguous", {}),
    ("train_large", (4, 2, 36), True, "large", "contiguous", dict(dtypes=THREE)),
    (
        "train_mean500",
        (4, 3, 16),
        True,
        "mean500",
        "contiguous",
        dict(dtypes=(F32,), condition=500),
    ),
    ("train_tiny", (4, 3, 16), True, "tiny", "contiguous", {}),
)


def batch_norm_rows() -> tuple[Row, ...]:
    made = []
    for label, shape, training, fill, layout, how in BATCH_NORM:
        c = shape[1]
        made.append(
            row(
                label,
                **how,
                input=t(*shape, fill=fill, layout=layout),
                running_mean=t(c, **STATISTICS),
                running_var=t(c, fill="positive", **STATISTICS),
                weight=t(c, dtype=F32 if "large" in label else None),
                bias=t(c, dtype=F32 if "large" in label else None),
                training=training,
            )
        )
    base = made[0]
    return (
        *made,
        Row("train_no_running", base.arguments).having(running_mean=None, running_var=None),
        # Without running statistics: whether their mean is inf or NaN depends on the algorithm.
        Row("train_inf", base.arguments, grad=False).having(
            input=t(3, 5, 4, 3, fill="one inf"), running_mean=None, running_var=None
        ),
        Row("train_no_affine", base.arguments).having(weight=None, bias=None),
        Row("train_no_bias", base.arguments, (F32,)).having(bias=None),
        Row("train_momentum", base.arguments, (F32,)).having(momentum=0.7, eps=0.25),
        Row("train_f16_running", base.arguments, (F16,)).having(
            running_mean=t(5), running_var=t(5, fill="positive")
        ),
        Row("train_f32_affine", base.arguments, (F16, BF16)).having(
            weight=t(5, dtype=F32), bias=t(5, dtype=F32)
        ),
        Row("train_strided_running", base.arguments, (F32,)).having(
            running_mean=t(5, layout="strided"),
            running_var=t(5, fill="positive", layout="strided"),
            weight=t(5, layout="strided"),
        ),
    )


# label, input shape, groups, fill, layout, the rest of `row`.
GROUP_NORM: tuple[tuple[str, tuple[int, ...], int, str, str, dict[str, Any]], ...] = (
    ("odd", (2, 6, 5, 3), 2, "normal", "contiguous", dict(dtypes=ALL)),
    ("one_group", (3, 5, 7), 1, "normal", "contiguous", {}),
    ("group_per_channel", (2, 5, 33), 5, "normal", "contiguous", {}),
    ("three_channels", (1, 48, 8, 8), 16, "normal", "contiguous", {}),
    ("rows", (4, 24), 3, "normal", "contiguous", {}),
    ("volume", (2, 4, 3, 4, 5), 2, "normal", "contiguous", {}),
    ("long", (1, 4, 90, 91), 2, "normal", "contiguous", {}),
    ("channels_last", (2, 8, 5, 6), 4, "normal", "channels_last", dict(upstream="channels_last")),
    ("volume_channels_last", (2, 4, 3, 4, 5), 2, "normal", "channels_last", {}),
    ("transposed", (2, 4, 6, 5), 2, "normal", "transposed", dict(upstream="transposed")),
    ("strided", (2, 4, 12), 2, "normal", "strided", dict(upstream="strided")),
    ("padded", (2, 4, 12), 2, "normal", "padded", dict(upstream="padded")),
    ("shifted", (2, 4, 16), 2, "normal", "shifted", {}),
    ("expanded", (3, 4, 12), 2, "normal", "expanded", dict(upstream="constant", magnitude=1.0)),
    ("empty", (0, 6, 4, 4), 3, "normal", "contiguous", {}),
    ("nan", (2, 4, 30), 2, "one nan", "contiguous", {}),
    ("inf", (2, 4, 30), 2, "one inf", "contiguous", dict(grad=False)),
    ("large", (2, 4, 40), 2, "large", "contiguous", dict(dtypes=THREE)),
    ("tiny", (2, 4, 40), 2, "tiny", "contiguous", {}),
    ("mean500", (2, 4, 40), 2, "mean500", "contiguous", dict(dtypes=(F32,), condition=500)),
)


def group_norm_rows() -> tuple[Row, ...]:
    made = [
        row(
            label,
            **how,
            input=t(*shape, fill=fill, layout=layout),
            num_groups=groups,
            weight=t(shape[1]),
            bias=t(shape[1]),
        )
        for label, shape, groups, fill, layout, how in GROUP_NORM
    ]
    base = made[0]
    return (
        *made,
        Row("no_affine", base.arguments).having(weight=None, bias=None),
        Row("no_bias", base.arguments, (F32,)).having(bias=None),
        Row("large_eps", base.arguments, (F32,)).having(eps=0.25),
        Row("f32_affine", base.arguments, (F16, BF16)).having(
            weight=t(6, dtype=F32), bias=t(6, dtype=F32)
        ),
    )


def instance_norm_rows() -> tuple[Row, ...]:
    """The rows of batch_norm that an instance has: more than one value per plane."""
    made = []
    for r in batch_norm_rows():
        values = dict(r.arguments)
        values["use_input_stats"] = values.pop("training")
        if len(values["input"].shape) > 2:
            made.append(replace(r, arguments=values))
    return tuple(made)


TABLES = {
    "rms_norm": ("rms_norm", with_vectors(row_norms(("input",), ("weight",)), ("weight",))),
    "layer_norm": (
        "layer_norm",
        with_vectors(row_norms(("input",), ("weight", "bias")), ("weight", "bias")),
    ),
    "fused_add_rms_norm": (
        "fused_add_rms_norm",
        with_vectors(row_norms(("input", "residual"), ("weight",)), ("weight",)),
    ),
    "fused_add_layer_norm": (
        "fused_add_layer_norm",
        with_vectors(row_norms(("input", "residual"), ("weight", "bias")), ("weight", "bias")),
    ),
    "ada_layer_norm": ("ada_layer_norm", modulated(("scale", "shift"))),
    "ada_layer_norm_zero": ("ada_layer_norm_zero", modulated(("scale", "shift", "gate"))),
    "batch_norm": ("batch_norm", batch_norm_rows()),
    "group_norm": ("group_norm", group_norm_rows()),
    "instance_norm": ("instance_norm", instance_norm_rows()),
}
