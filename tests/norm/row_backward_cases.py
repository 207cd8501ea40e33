"""What the tests of the row norms' backward share: the tensors of a call, and its parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

NORMS = ("rms_norm", "layer_norm")
FUSED = ("fused_add_rms_norm", "fused_add_layer_norm")
ADA = ("ada_layer_norm", "ada_layer_norm_zero")
OPS = (*NORMS, *FUSED, *ADA)
GRADIENTS = {
    "rms_norm": 2,
    "layer_norm": 3,
    "fused_add_rms_norm": 2,
    "fused_add_layer_norm": 3,
    "ada_layer_norm": 3,
    "ada_layer_norm_zero": 4,
}
Make = Callable[..., torch.Tensor]


def tensors_of(
    op: str,
    make: Make,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight: torch.dtype | None = None,
    modulation: Sequence[tuple[int, ...]] = (),
) -> list[Any]:
    """Those of `op`'s backward: make(*shape, dtype=...) of each. modulation: shapes, else x's."""
    x = make(*shape, dtype=dtype)
    g = make(*shape, dtype=dtype)
    rows = shape[:-1]
    rstd = make(*rows, dtype=torch.float32).abs() + 0.5
    mean = make(*rows, dtype=torch.float32)
    w = make(shape[-1], dtype=weight or dtype)
    if op == "rms_norm":
        return [g, x, w, rstd]
    if op == "layer_norm":
        return [g, x, w, mean, rstd]
    if op in FUSED:
        return [g, make(*shape, dtype=dtype), x, w]
    shapes = modulation or (shape,) * 3
    if op == "ada_layer_norm":
        return [g, x, make(*shapes[0], dtype=dtype), mean, rstd]
    return [g, x, *[make(*s, dtype=dtype) for s in shapes], mean, rstd]


def params_of(
    op: str,
    shape: tuple[int, ...],
    mask: Sequence[bool] = (),
    modulation: Sequence[tuple[int, ...]] = (),
) -> dict[str, Any]:
    params: dict[str, Any] = {"output_mask": list(mask or (True,) * GRADIENTS[op])}
    if op in ADA:
        params["scale_offset"] = 1.0
        if op == "ada_layer_norm":
            params["shift_shape"] = (modulation or (shape,) * 2)[1]
        return params
    params["normalized_shape"] = shape[-1:]
    return params | ({"eps": 1e-5} if op in FUSED else {})
