"""Adaptive max pooling, with and without indices.

out[i, j] = max of the window of rows [floor(i * H / h), ceil((i + 1) * H / h)) and likewise of
columns; `output_size` = (h, w). NaN wins (several: the last); ties go to the first index. Indices
are int64 and flat over the input's plane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opkiln.ops.common import wide
from opkiln.ops.derive import with_backward
from opkiln.ops.pool.max_pool import offset_dtype
from opkiln.ops.pool.window import (
    adaptive_bounds,
    adaptive_extent,
    adaptive_flops,
    adaptive_pooled,
    adaptive_taps,
    check_adaptive,
)
from opkiln.spec import FLOAT, Call, OpSpec, OutputSpec, ParamSpec, TensorMeta, TensorSpec

pool: Callable[..., Any] = torch.nn.functional.adaptive_max_pool2d


def window_offset(
    indices: torch.Tensor, plane: Sequence[int], output_size: Sequence[int]
) -> torch.Tensor:
    """Flat plane indices -> offsets inside each window, whose rows are as long as the widest."""
    extents = [adaptive_extent(s, o) for s, o in zip(plane, output_size, strict=True)]
    first_row, _ = adaptive_bounds(plane[0], output_size[0], indices.device)
    first_column, _ = adaptive_bounds(plane[1], output_size[1], indices.device)
    row = indices // plane[1] - first_row[:, None]
    column = indices % plane[1] - first_column
    return (row * extents[1] + column).to(offset_dtype(extents[0] * extents[1]))


def pool_with_offset(
    input: torch.Tensor, output_size: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, flat indices and window offsets."""
    out, indices = pool(input, output_size, return_indices=True)
    return out, indices, window_offset(indices, input.shape[-2:], output_size)


def reference(input: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    out, _, offset = pool_with_offset(wide(input), output_size)
    return out.to(input.dtype), offset


def reference_indices(input: torch.Tensor, output_size: Sequence[int]) -> tuple[torch.Tensor, ...]:
    out, indices, offset = pool_with_offset(wide(input), output_size)
    return out.to(input.dtype), indices, offset


def native(input: torch.Tensor, output_size: Sequence[int]) -> torch.Tensor:
    return pool(input, output_size)


def native_indices(
    input: torch.Tensor, output_size: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return pool(input, output_size, return_indices=True)


def native_train(
    input: torch.Tensor, output_size: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    out, _, offset = pool_with_offset(input, output_size)
    return out, offset


def backward_reference(
    grad_out: torch.Tensor,
    offset: torch.Tensor,
    output_size: Sequence[int],
    input_shape: Sequence[int],
    output_mask: list[bool],
) -> tuple[torch.Tensor]:
    """grad_input[e] = sum of grad_out over the windows whose maximum was element e.

    Element by element over the few windows that hold it (at most 2 along a dim that shrinks): a
    gather, so the order of the sums is fixed.
    """
    g = wide(grad_out)
    grad = g.new_zeros(input_shape)
    if g.numel() == 0:
        return (grad.to(grad_out.dtype),)
    pitch = adaptive_extent(input_shape[-1], output_size[1])
    for row, dy, row_holds in holders(input_shape[-2], output_size[0], g.device):
        for column, dx, column_holds in holders(input_shape[-1], output_size[1], g.device):
            at = (..., row[:, None], column)
            won = offset[at] == dy[:, None] * pitch + dx
            won = won & row_holds[:, None] & column_holds
            grad = grad + torch.where(won, g[at], 0)
    return (grad.to(grad_out.dtype),)


def holders(
    size: int, out_size: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The windows that hold each of `size` elements, in order: (window, place in it, holds)."""
    first, end = adaptive_bounds(out_size, size, device)
    starts, _ = adaptive_bounds(size, out_size, device)
    element = torch.arange(size, device=device)
    found = []
    for k in range(adaptive_extent(out_size, size)):
        window = (first + k).clamp(max=out_size - 1)
        found.append((window, element - starts[window], first + k < end))
    return found


def offset_meta(call: Call) -> TensorMeta:
    return adaptive_pooled(call, offset_dtype(adaptive_taps(call)))


def adaptive_max_pool_specs(with_indices: bool) -> tuple[OpSpec, OpSpec]:
    """The spec of the pool, with or without indices, and of its backward."""
    suffix, page = ("_indices", "Indices") if with_indices else ("", "")
    indices = OutputSpec(
        "indices", lambda call: adaptive_pooled(call, torch.int64), differentiable=False
    )
    return with_backward(
        OpSpec(
            op=f"AdaptiveMaxPool2d{page}Fwd",
            name=f"adaptive_max_pool2d{suffix}",
            family="pool",
            tensors=(TensorSpec("input", "*NCHW", FLOAT),),
            params=(ParamSpec("output_size", "int[]"),),
            outputs=(
                OutputSpec("out", adaptive_pooled),
                *((indices,) if with_indices else ()),
                OutputSpec("offset", offset_meta, saved=True, doc="winning tap of each window"),
            ),
            reference=reference_indices if with_indices else reference,
            native=native_indices if with_indices else native,
            native_train=pool_with_offset if with_indices else native_train,
            flops=adaptive_flops,
            check=check_adaptive,
            doc="Max pooling to a plane of given size"
            + (", with flat indices." if with_indices else "."),
        ),
        wrt=("input",),
        needs=(),
        reference=backward_reference,
        flops=lambda call: call.tensors.grad_out.numel,
        double="backward",
    )


SPECS = tuple(spec for indices in (False, True) for spec in adaptive_max_pool_specs(indices))
