"""Adaptive average pooling: a plane of any size to a plane of the given size.

out[i, j] = mean of the window of rows [floor(i * H / h), ceil((i + 1) * H / h)) and likewise of
columns; `output_size` = (h, w). Sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkiln.ops.common import wide
from opkiln.ops.derive import with_backward
from opkiln.ops.pool.avg_pool import is_cpu_half
from opkiln.ops.pool.window import (
    adaptive_bounds,
    adaptive_flops,
    adaptive_pooled,
    adaptive_taps,
    check_adaptive,
)
from opkiln.spec import FLOAT, OpSpec, OutputSpec, ParamSpec, TensorSpec, unit_reduction

pool: Callable[..., Any] = torch.nn.functional.adaptive_avg_pool2d


def reference(input: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    return pool(wide(input), output_size).to(input.dtype)


def native(input: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    rough = input.dtype.itemsize == 2 and not input.is_contiguous()  # torch sums in 16 bits there
    return (
        reference(input, output_size) if rough or is_cpu_half(input) else pool(input, output_size)
    )


def areas(plane: Sequence[int], output_size: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Elements of each window, [h, w]."""
    rows, columns = (
        end - start
        for start, end in (
            adaptive_bounds(size, out, like.device)
            for size, out in zip(plane, output_size, strict=True)
        )
    )
    return (rows[:, None] * columns).to(like.dtype)


def backward_reference(
    grad_out: torch.Tensor,
    output_size: Sequence[int],
    input_shape: Sequence[int],
    output_mask: list[bool],
) -> tuple[torch.Tensor]:
    """grad_input[e] = sum of grad_out / area over the windows that hold element e.

    These windows are themselves adaptive ones, from the output's plane to the input's (see
    `adaptive_bounds`), so the sum is a pooled mean times its area: no scatter, a fixed order.
    """
    if grad_out.numel() == 0:
        return (grad_out.new_zeros(input_shape),)
    plane = input_shape[-2:]
    g = wide(grad_out)
    share = g / areas(plane, output_size, g)
    grad = pool(share, list(plane)) * areas(output_size, plane, g)
    return (grad.to(grad_out.dtype),)


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="AdaptiveAvgPool2dFwd",
        name="adaptive_avg_pool2d",
        family="pool",
        tensors=(TensorSpec("input", "*NCHW", FLOAT),),
        params=(ParamSpec("output_size", "int[]"),),
        outputs=(OutputSpec("out", adaptive_pooled),),
        reference=reference,
        native=native,
        flops=adaptive_flops,
        check=check_adaptive,
        reduction=adaptive_taps,
        doc="Average pooling to a plane of given size.",
    ),
    wrt=("input",),
    needs=(),
    reference=backward_reference,
    flops=lambda call: call.tensors.grad_out.numel,
    reduction=unit_reduction,  # few windows look at one element
    double="backward",
)
SPECS = (SPEC, BACKWARD)
