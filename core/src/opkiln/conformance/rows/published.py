"""Geometries of the published workloads, in small batches, for a GPU only.

Kernels have tilings, and engines, of their own for them, which no smaller row reaches. What lookups
do not read is cut: samples, planes of a pool, all but a few rows of a norm.
"""

from __future__ import annotations

from typing import Any

from opkiln.conformance.cases import BF16, F16, F32, Row, row
from opkiln.conformance.rows.large import affine, statistics
from opkiln.conformance.tensors import t

HALF = (F16, BF16)
SIZES = (F16, F32)  # the tables of pools and planes tell element sizes apart

# label, sizes, output channels, input channels a group, kernel, options
CONV: dict[int, tuple[tuple[str, tuple[int, ...], int, int, tuple[int, ...], dict[str, Any]], ...]]
CONV = {
    1: (
        ("encodec_deep", (600,), 256, 128, (10,), {}),
        ("encodec_init", (24000,), 32, 1, (7,), {}),
        ("wav2vec2", (16000,), 512, 1, (10,), dict(stride=5)),
        ("whisper", (3000,), 1280, 80, (3,), {}),
    ),
    2: (
        ("expand", (28, 28), 512, 128, (1, 1), {}),
        ("reduce", (28, 28), 128, 512, (1, 1), {}),
        ("classifier", (7, 7), 2048, 512, (1, 1), {}),
        ("late_stage", (14, 14), 1024, 256, (1, 1), {}),
        ("resnet_1x1", (56, 56), 256, 64, (1, 1), {}),
        ("aspp", (32, 32), 256, 2048, (3, 3), dict(padding=12, dilation=12)),
        ("highres", (112, 112), 512, 256, (3, 3), dict(padding=1)),
        ("midres", (56, 56), 128, 64, (5, 5), dict(padding=2)),
        ("mobilenet", (56, 56), 32, 1, (3, 3), dict(padding=1, groups=32)),
        ("resnet_3x3", (56, 56), 64, 64, (3, 3), dict(padding=1)),
        ("resnext", (28, 28), 256, 4, (3, 3), dict(padding=1, groups=32)),
        ("stage_3x3", (56, 56), 256, 128, (3, 3), dict(padding=1, stride=2)),
        ("stage_5x5", (56, 56), 256, 128, (5, 5), dict(padding=2, stride=2)),
        ("stem", (112, 112), 64, 3, (3, 3), dict(padding=1, stride=2)),
        ("stride2", (28, 28), 128, 128, (3, 3), dict(padding=1, stride=2)),
    ),
    3: (
        ("resnext", (8, 28, 28), 128, 2, (3, 3, 3), dict(padding=1, groups=32)),
        ("aspp", (8, 16, 16), 256, 256, (3, 3, 3), dict(padding=6, dilation=6)),
        ("r3d_stem", (16, 112, 112), 64, 3, (3, 3, 3), dict(padding=1)),
        ("unet", (32, 64, 64), 64, 32, (3, 3, 3), dict(padding=1)),
        ("downsample", (8, 56, 56), 128, 64, (3, 3, 3), dict(padding=1, stride=2)),
    ),
}
# label, sizes, window
MAX_POOLS: dict[int, tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...]] = {
    1: (
        ("ecg", (2048,), dict(kernel_size=5, stride=2, padding=2, dilation=2, ceil_mode=True)),
        ("sincnet", (4096,), dict(kernel_size=3)),
        ("textcnn", (128,), dict(kernel_size=128, stride=1)),
    ),
    2: (
        ("alexnet", (55, 55), dict(kernel_size=3, stride=2, ceil_mode=True)),
        ("stem", (112, 112), dict(kernel_size=3, stride=2, padding=1)),
        ("vgg", (56, 56), dict(kernel_size=2)),
    ),
    3: (
        ("c3d_pool1", (16, 112, 112), dict(kernel_size=(1, 2, 2))),
        ("c3d_pool2", (16, 56, 56), dict(kernel_size=2)),
        ("medicalnet", (32, 112, 112), dict(kernel_size=3, stride=2, padding=1, ceil_mode=True)),
    ),
}
# label, samples, channels, sizes
PLANES = (
    ("fc", 32, 64, ()),
    ("stage1", 8, 64, (32, 32)),
    ("stage2", 4, 128, (32, 32)),
    ("stage3", 4, 256, (28, 28)),
    ("stem", 8, 64, (56, 56)),
    ("image", 8, 128, (32, 32)),
    ("tail", 4, 64, (30, 30)),
)
WIDTHS = (4096, 8192, 12_289, 16_384)
ROW_COUNTS = (1, 130)  # either side of what the norms take for few rows


def conv(n: int) -> tuple[Row, ...]:
    """Each with a bias and without, whose tilings may differ."""
    found = []
    for label, sizes, outs, ins, kernel, options in CONV[n]:
        x = t(1, ins * options.get("groups", 1), *sizes)
        tensors: dict[str, Any] = dict(input=x, weight=t(outs, ins, *kernel))
        for name, bias in ((label, None), (f"{label}_bias", t(outs))):
            found.append(row(name, HALF, grad=False, **tensors, bias=bias, **options))
    return tuple(found)


def max_pool(n: int, **more: Any) -> tuple[Row, ...]:
    """Values that are often equal, as an index tells which was taken."""
    return tuple(
        row(label, SIZES, input=t(1, 3, *sizes, fill="ties"), **window, **more)
        for label, sizes, window in MAX_POOLS[n]
    )


def planes(own: str) -> tuple[Row, ...]:
    """By the input's own statistics and by given ones; own: the argument that says which."""
    found = []
    for label, n, c, sizes in PLANES:
        if not sizes and own != "training":  # instances are planes
            continue
        given: dict[str, Any] = {"input": t(n, c, *sizes), **statistics(c), **affine(c)}
        for name, wanted in (("own", True), ("given", False)):
            found.append(row(f"{label}_{name}", SIZES, **(given | {own: wanted})))
    return tuple(found)


def rows(whole: tuple[str, ...], vectors: tuple[str, ...] = ()) -> tuple[Row, ...]:
    """whole: tensors of the input's shape; vectors: of its last dim."""
    found = []
    for n in WIDTHS:
        shape: dict[str, Any] = {} if "scale" in whole else {"normalized_shape": (n,)}
        for count in ROW_COUNTS:
            tensors: dict[str, Any] = {name: t(count, n) for name in whole}
            tensors |= {name: t(n) for name in vectors}
            found.append(row(f"{count}x{n}", (BF16,), **tensors, **shape))
    return tuple(found)


PUBLISHED: dict[str, tuple[Row, ...]] = {
    **{f"conv{n}d": conv(n) for n in CONV},
    **{f"max_pool{n}d": max_pool(n) for n in MAX_POOLS},
    **{f"max_pool{n}d_indices": max_pool(n, return_indices=True) for n in MAX_POOLS},
    "batch_norm": planes("training"),
    "instance_norm": planes("use_input_stats"),
    "rms_norm": rows(("input",), ("weight",)),
    "layer_norm": rows(("input",), ("weight", "bias")),
    "fused_add_rms_norm": rows(("input", "residual"), ("weight",)),
    "fused_add_layer_norm": rows(("input", "residual"), ("weight", "bias")),
    "ada_layer_norm": rows(("input", "scale", "shift")),
    "ada_layer_norm_zero": rows(("input", "scale", "shift", "gate")),
}
