"""Max pooling in one, two and three dimensions, with and without indices.

out = max over the window's taps. NaN wins (several: the last); ties go to the first index; padding
is never chosen. Indices are int64 and flat over the spatial plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkiln.ops.common import wide
from opkiln.ops.derive import with_backward
from opkiln.ops.pool.window import check_window, pooled, scatter_taps, taps
from opkiln.spec import FLOAT, Call, OpSpec, OutputSpec, ParamSpec, TensorMeta, TensorSpec

TORCH: dict[int, Callable[..., Any]] = {
    1: torch.nn.functional.max_pool1d,
    2: torch.nn.functional.max_pool2d,
    3: torch.nn.functional.max_pool3d,
}
WINDOW = tuple(ParamSpec(n, "int[]") for n in ("kernel_size", "stride", "padding", "dilation"))


def offset_dtype(count: int) -> torch.dtype:
    """Smallest integer that numbers `count` taps: what the backward is handed per output."""
    if count <= 256:
        return torch.uint8
    return torch.int16 if count <= 32768 else torch.int32


def window_offset(
    indices: torch.Tensor,
    spatial: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Flat plane indices -> flat offsets inside each window.

    A window whose taps all step over the input (a dilation beyond its size) has an index of no tap,
    in torch one outside the plane; it gets offset 0, a tap that lies in the padding.
    """
    n = len(spatial)
    offset = torch.zeros_like(indices)
    rest = indices
    positions, missed = [], []
    for size in reversed(spatial):
        positions.append(rest % size)
        rest = rest // size
    for i, position in enumerate(reversed(positions)):
        out_size = indices.shape[indices.ndim - n + i]
        start = torch.arange(out_size, device=indices.device) * stride[i] - padding[i]
        step = position - start.view(-1, *[1] * (n - 1 - i))
        offset = offset * kernel_size[i] + step // dilation[i]
        if dilation[i] > spatial[i]:
            missed.append(step % dilation[i] != 0)
    for no_tap in missed:
        offset = offset.masked_fill(no_tap, 0)
    return offset.to(offset_dtype(math.prod(kernel_size)))


def pool_with_offset(
    input: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, flat indices and window offsets."""
    window = (kernel_size, stride, padding, dilation)
    out, indices = torch_pool(input, *window, ceil_mode, return_indices=True)
    return out, indices, window_offset(indices, input.shape[-len(kernel_size) :], *window)


def torch_pool(input: torch.Tensor, kernel_size: Sequence[int], *options: Any, **more: Any) -> Any:
    n = len(kernel_size)
    if n == 3 and input.ndim == 4:  # torch 2.13 takes no [C, D, H, W] that looks channels_last
        input = input.contiguous()
    return TORCH[n](input, kernel_size, *options, **more)


def reference(input: torch.Tensor, **window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, _, offset = pool_with_offset(wide(input), **window)
    return out.to(input.dtype), offset


def reference_indices(input: torch.Tensor, **window: Any) -> tuple[torch.Tensor, ...]:
    out, indices, offset = pool_with_offset(wide(input), **window)
    return out.to(input.dtype), indices, offset


def native(input: torch.Tensor, **window: Any) -> torch.Tensor:
    return torch_pool(input, **window)


def native_indices(input: torch.Tensor, **window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch_pool(input, **window, return_indices=True)


def native_train(input: torch.Tensor, **window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, _, offset = pool_with_offset(input, **window)
    return out, offset


def backward_reference(
    grad_out: torch.Tensor,
    offset: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    input_shape: Sequence[int],
    output_mask: list[bool],
) -> tuple[torch.Tensor]:
    """grad_input[i] = sum of grad_out over the windows whose maximum was element i."""
    window = (kernel_size, stride, padding, dilation)
    g = wide(grad_out)

    def won(tap: int) -> torch.Tensor:
        return torch.where(offset == tap, g, 0)  # a product would spread an infinite gradient

    grad = scatter_taps(g, input_shape, *window, won)
    return (grad.to(grad_out.dtype),)


def offset_meta(call: Call) -> TensorMeta:
    return pooled(call, offset_dtype(taps(call)))


def max_pool_specs(ndim: int, with_indices: bool) -> tuple[OpSpec, OpSpec]:
    """The spec of one max pool and of its backward."""
    suffix, page = ("_indices", "Indices") if with_indices else ("", "")
    indices = OutputSpec("indices", lambda call: pooled(call, torch.int64), differentiable=False)
    return with_backward(
        OpSpec(
            op=f"MaxPool{ndim}d{page}Fwd",
            name=f"max_pool{ndim}d{suffix}",
            family="pool",
            tensors=(TensorSpec("input", "*NC_spatial", FLOAT),),
            params=(*WINDOW, ParamSpec("ceil_mode", "bool")),
            outputs=(
                OutputSpec("out", pooled),
                *((indices,) if with_indices else ()),
                OutputSpec("offset", offset_meta, saved=True, doc="winning tap of each window"),
            ),
            reference=reference_indices if with_indices else reference,
            native=native_indices if with_indices else native,
            native_train=pool_with_offset if with_indices else native_train,
            flops=lambda call: taps(call) * pooled(call).numel,
            check=check_window,
            doc=f"{ndim}-D max pooling" + (", with flat indices." if with_indices else "."),
        ),
        wrt=("input",),
        needs=(),
        reference=backward_reference,
        flops=lambda call: call.tensors.grad_out.numel,
        double="backward",
    )


SPECS = tuple(
    spec for n in (1, 2, 3) for indices in (False, True) for spec in max_pool_specs(n, indices)
)
