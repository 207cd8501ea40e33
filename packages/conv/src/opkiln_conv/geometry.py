"""Convolutions seen alike: three spatial dims (d, h, w), the missing leading ones of size 1."""

import math
from dataclasses import dataclass
from typing import Any

Dims = tuple[int, int, int]
Strides = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Geometry:
    """One convolution.

    padding: zeros before each dim (those after it show in `outs`). of_group, group_outs: input
    and output channels of a group. x_strides: over (n, c, d, h, w); w_strides:
    over (o, i, d, h, w), out_strides: over (n, c, pixel), all in elements.
    """

    itemsize: int
    batch: int
    groups: int
    of_group: int
    group_outs: int
    sizes: Dims
    outs: Dims
    kernel: Dims
    stride: Dims
    padding: Dims
    dilation: Dims
    x_strides: Strides
    w_strides: Strides
    out_strides: Dims
    aligned: bool

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def terms(self) -> int:
        """Products that one output sums."""
        return self.of_group * self.taps

    @property
    def pixels(self) -> int:
        """Outputs of one channel of one image."""
        return math.prod(self.outs)

    @property
    def places(self) -> int:
        """Inputs of one channel of one image."""
        return math.prod(self.sizes)

    @property
    def check(self) -> tuple[bool, bool, bool]:
        """For each dim, whether a tap may lie outside the input."""
        d, h, w = (self.padding[i] > 0 or self.last_tap(i) >= self.sizes[i] for i in range(3))
        return d, h, w

    def last_tap(self, dim: int) -> int:
        """Coordinate of the last tap of the last output."""
        reach = (self.kernel[dim] - 1) * self.dilation[dim]
        return (self.outs[dim] - 1) * self.stride[dim] - self.padding[dim] + reach

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits; tiles and padding reach past the ends."""
        x = (self.batch, self.groups * self.of_group, *self.sizes)
        w = (self.groups * self.group_outs, self.of_group, *self.kernel)
        out = (self.batch, self.groups * self.group_outs, self.pixels)
        margin = [
            p + k * d for p, k, d in zip(self.padding, self.kernel, self.dilation, strict=True)
        ]
        reach = [(n + m) for n, m in zip(self.sizes, margin, strict=True)]
        return (
            max(
                span((*x[:2], *reach), self.x_strides),
                span(w, self.w_strides),
                span(out, self.out_strides),
            )
            >= 2**31 - 2**24
        )

    @property
    def plain(self) -> bool:
        """Whether each image is one stretch of memory in the order (c, d, h, w)."""
        return dense(self.x_strides[1:], (self.of_group * self.groups, *self.sizes))

    @property
    def channels_inner(self) -> bool:
        """Whether channels are the innermost dim of the input."""
        return self.x_strides[1] == 1 and self.of_group * self.groups > 1 and not self.plain

    @property
    def weight_plain(self) -> bool:
        """Whether an output channel's weights are one stretch of memory, taps innermost."""
        return dense(self.w_strides[1:], (self.of_group, *self.kernel))

    @property
    def weight_channels_inner(self) -> bool:
        """Whether an output channel's weights are one stretch of memory, channels innermost."""
        order = (*self.w_strides[2:], self.w_strides[1])
        return dense(order, (*self.kernel, self.of_group))

    @property
    def pointwise(self) -> bool:
        """Whether every output sees one input, its own."""
        return self.taps == 1 and self.sizes == self.outs and not any(self.padding)


def dense(strides: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether these dims, outermost first, are one stretch of memory."""
    step = 1
    for stride, size in zip(reversed(strides), reversed(sizes), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def span(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements between the first and the last."""
    return sum(max(n - 1, 0) * abs(s) for n, s in zip(sizes, strides, strict=True))


def three(values: Any, fill: int) -> Dims:
    """A value a dim, with `fill` for the dims that the convolution does not have."""
    values = tuple(values)
    d, h, w = (fill,) * (3 - len(values)) + values
    return d, h, w


def five(meta: Any, ndim: int) -> Strides:
    """Strides over five dims: (n, c, d, h, w) or (o, i, d, h, w)."""
    lead = meta.stride[:-ndim] if meta.ndim > ndim + 1 else (0, *meta.stride[:-ndim])
    return (*lead, *three(meta.stride[-ndim:], 0))


def geometry_of(call: Any) -> Geometry:
    """The geometry of a call of conv1d, conv2d or conv3d."""
    x, w, out, p = call.tensors.input, call.tensors.weight, call.outputs[0], call.params
    ndim = len(p.stride)
    out_strides = five(out, ndim)
    return Geometry(
        itemsize=x.dtype.itemsize,
        batch=x.shape[0] if x.ndim == ndim + 2 else 1,
        groups=p.groups,
        of_group=w.shape[1],
        group_outs=w.shape[0] // p.groups,
        sizes=three(x.shape[-ndim:], 1),
        outs=three(out.shape[-ndim:], 1),
        kernel=three(w.shape[2:], 1),
        stride=three(p.stride, 1),
        padding=three(p.padding[::2], 0),
        dilation=three(p.dilation, 1),
        x_strides=five(x, ndim),
        w_strides=five(w, ndim),
        # Contiguous or channels_last: pixels are evenly spaced.
        out_strides=(
            out_strides[0],
            out_strides[1],
            out.shape[-ndim - 1] if out.channels_last else 1,
        ),
        aligned=x.aligned and w.aligned,
    )
