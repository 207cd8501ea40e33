"""The gradient of a pool: its windows as the pool's `Geometry`, and the layout of what it reads."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from opkiln.spec import TensorMeta

from opkiln_pool.geometry import Geometry, common_unit, geometry_of, three

Strides = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A tensor with one value a window: its strides over (n, c, d, h, w), in elements, and whether
    its first element lies on a 16-byte boundary.
    """

    strides: Strides
    aligned: bool

    def unit(self, limit: int, counts: tuple[int, ...], unit_dim: int) -> int:
        return common_unit(limit, counts, self.strides, unit_dim) if self.aligned else 1


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a pool. `pool`: the pool, its strides those of the input's gradient.

    offset: None for averages. channels: None where the planes of both are evenly spaced, n apart.
    """

    pool: Geometry
    grad: Gathered
    offset: Gathered | None
    channels: int | None

    @property
    def read(self) -> list[Gathered]:
        return [self.grad] if self.offset is None else [self.grad, self.offset]

    @property
    def counts(self) -> tuple[int, ...]:
        """Windows along each of the dims that strides step over."""
        planes, c = self.pool.planes, self.channels
        return (*((planes, 1) if c is None else (planes // c, c)), *self.pool.outs)

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits; blocks reach a little past the end."""
        spans = [
            sum((n - 1) * abs(s) for n, s in zip(self.counts, t.strides, strict=True))
            for t in self.read
        ]
        elements = self.pool.planes * math.prod(self.pool.sizes)
        return max(*spans, elements) >= 2**31 - 2**24

    def offset_strides(self, unit: int = 1) -> tuple[int, ...]:
        return in_units(self.offset.strides if self.offset else (0, 0, 0, 0, 1), unit)


def in_units(strides: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Strides of which all but the one along vectors, 1, are multiples of `unit`."""
    return tuple(1 if s == 1 else s // unit for s in strides)


def gradient_of(call: Any) -> Gradient:
    """The gradient that a call of any pool's backward but mean_pooling's computes."""
    grad, offset = call.tensors.grad_out, getattr(call.tensors, "offset", None)
    result = call.new(call.params.input_shape, grad.dtype, grad.channels_last)
    forward = SimpleNamespace(
        spec=call.spec,
        params=call.params,
        tensors=SimpleNamespace(input=result),
        outputs=(grad,),
    )
    pool = geometry_of(forward)
    ndim = 2 if pool.adaptive else len(call.params.kernel_size)
    metas = [grad] if offset is None else [grad, offset]
    lead = grad.shape[:-ndim]
    even = all(planes_are_even(m, ndim) for m in metas) and not pool.channels_last
    read = [gathered(m, ndim, even) for m in metas]
    channels = None if even or len(lead) < 2 else lead[1]
    return Gradient(pool, read[0], read[1] if offset is not None else None, channels)


def planes_are_even(meta: TensorMeta, ndim: int) -> bool:
    """Whether planes (n, c) lie one step apart."""
    lead, steps = meta.shape[:-ndim], meta.stride[:-ndim]
    return len(lead) < 2 or 1 in lead or steps[0] == lead[1] * steps[1]


def gathered(meta: TensorMeta, ndim: int, even: bool) -> Gathered:
    lead, steps = meta.shape[:-ndim], meta.stride[:-ndim]
    if len(lead) < 2:
        n, c = steps[0], 0
    elif even:
        n, c = steps[0] if lead[1] == 1 else steps[1], 0
    else:
        n, c = steps[0], steps[1]
    d, h, w = three(meta.stride[-ndim:], 0)
    return Gathered((n, c, d, h, w), meta.aligned)
