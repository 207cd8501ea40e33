"""Pooling windows: sizes, checks and the walk over taps that all pools share.

A window has `kernel_size[i]` taps along spatial dim i, `dilation[i]` apart; windows start every
`stride[i]` elements, the first at `-padding[i]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.spec import Call, TensorMeta


def output_extent(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Windows along one dim, by torch's rule: with ceil_mode none starts in the right padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    return count


def output_sizes(call: Call) -> tuple[int, ...]:
    """Spatial sizes of the result of a pool with fixed windows."""
    p = call.params
    n = len(p.kernel_size)
    dilation = getattr(p, "dilation", (1,) * n)
    return tuple(
        output_extent(*dim, p.ceil_mode)
        for dim in zip(
            call.tensors.input.shape[-n:], p.kernel_size, p.stride, p.padding, dilation, strict=True
        )
    )


def pooled(call: Call, dtype: torch.dtype | None = None) -> TensorMeta:
    """Meta of the pooled tensor: input's batch and channels, the windows' sizes."""
    x = call.tensors.input
    sizes = output_sizes(call)
    return call.new((*x.shape[: -len(sizes)], *sizes), dtype or x.dtype, x.channels_last)


def check_input(call: Call, ndim: int) -> None:
    """[C, *S] or [N, C, *S] with `ndim` spatial dims; only the batch may be empty."""
    name, shape = call.spec.name, call.tensors.input.shape
    if len(shape) not in (ndim + 1, ndim + 2):
        raise ArgumentError(
            f"{name}: input has {len(shape)} dims, expected {ndim + 1} (unbatched) or {ndim + 2}"
        )
    if any(size == 0 for size in shape[-ndim - 1 :]):
        raise ArgumentError(
            f"{name}: input has shape {list(shape)}, only the batch size may be zero"
        )


def check_window(call: Call) -> None:
    """What torch checks of a window, and that at least one fits."""
    p, name = call.params, call.spec.name
    n = len(p.kernel_size)
    check_input(call, n)
    for what in ("kernel_size", "stride", "dilation"):
        values = getattr(p, what, (1,) * n)
        if any(v <= 0 for v in values):
            raise ArgumentError(f"{name}: {what} must be greater than zero, got {list(values)}")
    if any(v < 0 for v in p.padding):
        raise ArgumentError(f"{name}: padding must not be negative, got {list(p.padding)}")
    if any(2 * v > k for v, k in zip(p.padding, p.kernel_size, strict=True)):
        raise ArgumentError(
            f"{name}: padding must be at most half of kernel_size, got padding {list(p.padding)} "
            f"and kernel_size {list(p.kernel_size)}"
        )
    sizes = output_sizes(call)
    if any(size < 1 for size in sizes):
        raise ArgumentError(
            f"{name}: no window of kernel_size {list(p.kernel_size)} fits into input of shape "
            f"{list(call.tensors.input.shape)}: the output would have sizes {list(sizes)}"
        )


def taps(call: Call) -> int:
    """Taps of one window."""
    return math.prod(call.params.kernel_size)


def taps_of(kernel_size: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every tap of a window, in the order of its flat offset."""
    return itertools.product(*(range(k) for k in kernel_size))


def scatter_taps(
    grad: torch.Tensor,
    input_shape: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    share_of_tap: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Gradient of a pool: each tap's share of `grad` added to the element that it looked at.

    share_of_tap(flat tap) -> what that tap of every window receives, in grad's shape. Tap by tap
    through strided views, so the order of the sums is fixed and the result deterministic.
    """
    n = len(kernel_size)
    sizes = grad.shape[-n:]
    reach = [
        max((o - 1) * s + (k - 1) * d + 1, p + i)
        for o, s, k, d, p, i in zip(
            sizes, stride, kernel_size, dilation, padding, input_shape[-n:], strict=True
        )
    ]
    padded = grad.new_zeros((*input_shape[:-n], *reach))
    for flat, tap in enumerate(taps_of(kernel_size)):
        window: Any = [
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, dilation, sizes, stride, strict=True)
        ]
        padded[(..., *window)] += share_of_tap(flat)
    inner: Any = [slice(p, p + i) for p, i in zip(padding, input_shape[-n:], strict=True)]
    return padded[(..., *inner)]


def check_adaptive(call: Call) -> None:
    """[C, H, W] or [N, C, H, W] with a plane to pool, and two sizes that are not negative."""
    name, shape, sizes = call.spec.name, call.tensors.input.shape, call.params.output_size
    if len(shape) not in (3, 4):
        raise ArgumentError(f"{name}: input has {len(shape)} dims, expected 3 (unbatched) or 4")
    if any(size == 0 for size in shape[-2:]):
        raise ArgumentError(f"{name}: input has shape {list(shape)}, the plane must not be empty")
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"{name}: output_size must not be negative, got {list(sizes)}")


def adaptive_pooled(call: Call, dtype: torch.dtype | None = None) -> TensorMeta:
    """Meta of the adaptively pooled tensor."""
    x = call.tensors.input
    shape = (*x.shape[:-2], *call.params.output_size)
    return call.new(shape, dtype or x.dtype, x.channels_last)


def adaptive_bounds(
    size: int, out_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """First element and end of each of `out_size` windows over `size` elements, int64 [out_size].

    Window i is [floor(i * size / out_size), ceil((i + 1) * size / out_size)). The windows that hold
    element e are [floor(e * out_size / size), ceil((e + 1) * out_size / size)): the same rule with
    the two sizes exchanged.
    """
    i = torch.arange(out_size, device=device)
    return i * size // max(out_size, 1), -(-(i + 1) * size // max(out_size, 1))


def adaptive_extent(size: int, out_size: int) -> int:
    """Elements of the widest window.

    With size / out_size = p / q in lowest terms, i * p runs through every remainder modulo q, and a
    window that starts at remainder q - 1 reaches furthest: ceil((q - 1 + p) / q) elements.
    """
    if out_size == 0:
        return 0
    common = math.gcd(size, out_size)
    p, q = size // common, out_size // common
    return -(-(q - 1 + p) // q)


def adaptive_taps(call: Call) -> int:
    """Taps of the largest window."""
    sizes = zip(call.tensors.input.shape[-2:], call.params.output_size, strict=True)
    return math.prod(adaptive_extent(size, out) for size, out in sizes)


def adaptive_flops(call: Call) -> int:
    """Elements looked at by all windows together; neighbours overlap where sizes do not divide."""
    total = math.prod(call.tensors.input.shape[:-2])
    for size, out in zip(call.tensors.input.shape[-2:], call.params.output_size, strict=True):
        total *= sum(-(-(i + 1) * size // out) - i * size // out for i in range(out))
    return total
