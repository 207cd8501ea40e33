"""What ATen's backwards of pools take: flat indices of the maxima, and a line as a plane."""

from __future__ import annotations

import math
from typing import Any

import torch
from opkiln.ops.pool.window import adaptive_bounds, adaptive_extent


class Plane:
    """The window of a pool's backward as ATen has it: a line is a plane of height 1.

    p: the backward's parameters.
    """

    def __init__(self, p: Any) -> None:
        self.is_line = len(p.kernel_size) == 1
        one, none = ([1], [0]) if self.is_line else ([], [])
        self.kernel_size = [*one, *p.kernel_size]
        self.stride = [*one, *p.stride]
        self.padding = [*none, *p.padding]
        self.dilation = [*one, *getattr(p, "dilation", ())]
        shape = list(p.input_shape)
        self.shape = [*shape[:-1], *one, shape[-1]]

    def enter(self, t: torch.Tensor) -> torch.Tensor:
        return t.unsqueeze(-2) if self.is_line else t

    def leave(self, t: torch.Tensor) -> torch.Tensor:
        return t.squeeze(-2) if self.is_line else t


def window_indices(offset: torch.Tensor, p: Any) -> torch.Tensor:
    """Offsets inside windows -> int64 indices over the input's plane. p: the backward's parameters.

    The inverse of `opkiln.ops.pool.max_pool.window_offset`.
    """
    n = len(p.kernel_size)
    plane = p.input_shape[-n:]
    flat = torch.zeros_like(offset, dtype=torch.int64)
    for i in range(n):
        tap = offset.long() // math.prod(p.kernel_size[i + 1 :]) % p.kernel_size[i]
        window = torch.arange(offset.shape[offset.ndim - n + i], device=offset.device)
        start = (window * p.stride[i] - p.padding[i]).view(-1, *[1] * (n - 1 - i))
        flat = flat * plane[i] + start + tap * p.dilation[i]
    return flat


def adaptive_indices(offset: torch.Tensor, p: Any) -> torch.Tensor:
    """The same for adaptive windows, whose rows are as long as the widest."""
    height, width = p.input_shape[-2:]
    pitch = adaptive_extent(width, p.output_size[1])
    first_row, _ = adaptive_bounds(height, p.output_size[0], offset.device)
    first_column, _ = adaptive_bounds(width, p.output_size[1], offset.device)
    row = first_row[:, None] + offset.long() // pitch
    return row * width + first_column + offset.long() % pitch
