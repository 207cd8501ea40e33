"""Average pooling in one, two and three dimensions.

out = sum over the window's elements / divisor. The divisor is `divisor_override` where given; else
the elements of the window that lie inside the padded input (count_include_pad) or inside the input
itself. With ceil_mode the last window may hang over the padding; what hangs over is never counted.
Sums in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.common import wide
from opkiln.ops.derive import with_backward
from opkiln.ops.pool.window import check_window, pooled, scatter_taps, taps
from opkiln.spec import FLOAT, Call, OpSpec, OutputSpec, ParamSpec, TensorSpec

TORCH: dict[int, Callable[..., Any]] = {
    1: torch.nn.functional.avg_pool1d,
    2: torch.nn.functional.avg_pool2d,
    3: torch.nn.functional.avg_pool3d,
}
WINDOW = tuple(ParamSpec(n, "int[]") for n in ("kernel_size", "stride", "padding"))


def reference(input: torch.Tensor, **window: Any) -> torch.Tensor:
    return TORCH[len(window["kernel_size"])](wide(input), **window).to(input.dtype)


def native(input: torch.Tensor, **window: Any) -> torch.Tensor:
    if is_cpu_half(input):  # torch 2.13 has no avg_pool3d for float16 on the CPU
        return reference(input, **window)
    return TORCH[len(window["kernel_size"])](input, **window)


def is_cpu_half(t: torch.Tensor) -> bool:
    return t.device.type == "cpu" and t.dtype.itemsize == 2


def divisors(
    spatial: Sequence[int],
    out_sizes: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
    like: torch.Tensor,
) -> torch.Tensor:
    """Elements that each window counts, [*out_sizes]: the product of the counts along each dim."""
    counts = like.new_ones(())
    for i, size in enumerate(spatial):
        start = torch.arange(out_sizes[i], device=like.device) * stride[i] - padding[i]
        end = (start + kernel_size[i]).clamp(max=size + padding[i])
        if not count_include_pad:
            start, end = start.clamp(min=0), end.clamp(max=size)
        counts = counts.unsqueeze(-1) * (end - start).to(like.dtype)
    return counts


def backward_reference(
    grad_out: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    input_shape: Sequence[int],
    output_mask: list[bool],
    divisor_override: int | None = None,
) -> tuple[torch.Tensor]:
    """grad_input[i] = sum of grad_out / divisor over the windows that hold element i."""
    n = len(kernel_size)
    window = (kernel_size, stride, padding)
    g = wide(grad_out)
    if divisor_override is None:
        sizes = (input_shape[-n:], grad_out.shape[-n:])
        share = g / divisors(*sizes, *window, count_include_pad, g)
    else:
        share = g / divisor_override
    grad = scatter_taps(share, input_shape, *window, (1,) * n, lambda tap: share)
    return (grad.to(grad_out.dtype),)


def backward_native(
    grad_out: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    input_shape: Sequence[int],
    output_mask: list[bool],
    divisor_override: int | None = None,
) -> tuple[torch.Tensor]:
    """torch's kernel for one and two dims; its 3-D one adds atomically, in any order.

    On widened, contiguous gradients: on a GPU torch sums 16-bit ones in 16 bits, and is wrong for
    channels_last ones (torch 2.11).
    """
    n = len(kernel_size)
    window = (kernel_size, stride, padding, ceil_mode, count_include_pad)
    if n == 3:
        return backward_reference(
            grad_out, *window, input_shape, output_mask, divisor_override=divisor_override
        )
    grad = wide(grad_out).contiguous()
    if n == 1:  # a plane of height 1
        grad = grad.unsqueeze(-2)
        kernel_size, stride, padding = (1, *kernel_size), (1, *stride), (0, *padding)
        input_shape = (*input_shape[:-1], 1, input_shape[-1])
    grad = torch.ops.aten.avg_pool2d_backward(
        grad,
        grad.new_empty(input_shape),  # only its shape is read
        list(kernel_size),
        list(stride),
        list(padding),
        ceil_mode,
        count_include_pad,
        divisor_override,
    )
    grad = grad.squeeze(-2) if n == 1 else grad
    return (grad.to(grad_out.dtype),)


def check(call: Call) -> None:
    check_window(call)
    if getattr(call.params, "divisor_override", None) == 0:
        raise ArgumentError(f"{call.spec.name}: divisor_override must not be zero, got 0")


def avg_pool_specs(ndim: int) -> tuple[OpSpec, OpSpec]:
    """The spec of one average pool and of its backward; in 1-D there is no divisor_override."""
    override = (ParamSpec("divisor_override", "int?"),) if ndim > 1 else ()
    return with_backward(
        OpSpec(
            op=f"AvgPool{ndim}dFwd",
            name=f"avg_pool{ndim}d",
            family="pool",
            tensors=(TensorSpec("input", "*NC_spatial", FLOAT),),
            params=(
                *WINDOW,
                ParamSpec("ceil_mode", "bool"),
                ParamSpec("count_include_pad", "bool"),
                *override,
            ),
            outputs=(OutputSpec("out", pooled),),
            reference=reference,
            native=native,
            flops=lambda call: taps(call) * pooled(call).numel,
            check=check,
            reduction=taps,
            doc=f"{ndim}-D average pooling.",
        ),
        wrt=("input",),
        needs=(),
        reference=backward_reference,
        native=backward_native,
        flops=lambda call: math.prod(call.params.kernel_size) * call.tensors.grad_out.numel,
        double="backward",
    )


SPECS = tuple(spec for n in (1, 2, 3) for spec in avg_pool_specs(n))
