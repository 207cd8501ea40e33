"""Tensors of a conformance case: values by a name, memory by a layout.

Values are drawn in float64 on the CPU and cast, so every device sees the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opkiln.spec import wide_dtype

Shape = tuple[int, ...]


@dataclass(frozen=True)
class T:
    """One tensor argument.

    dtype None: the dtype of the case; wide: the dtype that its sums have. values: for integers.
    """

    shape: Shape
    fill: str = "normal"
    layout: str = "contiguous"
    dtype: torch.dtype | None = None
    wide: bool = False
    values: Any = None

    def build(self, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        dtype = self.dtype or (wide_dtype(dtype) if self.wide else dtype)
        if self.values is not None:
            drawn = torch.tensor(self.values, dtype=dtype).view(self.shape)
        elif dtype.is_complex:
            parts = [FILLS[self.fill](self.shape, generator) for _ in range(2)]
            drawn = torch.complex(*parts).to(dtype)
        else:
            drawn = FILLS[self.fill](self.shape, generator).to(dtype)
        return LAYOUTS[self.layout](drawn)


def t(*shape: int, **how: Any) -> T:
    """`t(5, 77, fill="nan", layout="padded")`."""
    return T(shape, **how)


def integers(values: list[int], dtype: torch.dtype = torch.int64, layout: str = "contiguous") -> T:
    """A one-dimensional integer tensor."""
    return T((len(values),), layout=layout, dtype=dtype, values=values)


def normal(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def scaled(scale: float, shift: float = 0.0, limit: float = 6e4) -> Callable[..., torch.Tensor]:
    """Normal values times `scale` plus `shift`; `limit` keeps them finite in float16."""
    return lambda shape, g: (normal(shape, g) * scale + shift).clamp(-limit, limit)


def ties(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """Few distinct values."""
    return torch.randint(-1, 2, shape, generator=generator).double()


def sprinkled(*specials: float) -> Callable[..., torch.Tensor]:
    """Normal values with `specials` at the first, the last and every 37th element."""

    def fill(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        flat = normal(shape, generator).flatten()
        where = sorted({*range(0, flat.numel(), 37), flat.numel() - 1})
        for i, position in enumerate(where):
            flat[position] = specials[i % len(specials)]
        return flat.view(shape)

    return fill


def last_rows(special: float) -> Callable[..., torch.Tensor]:
    """Normal values; one element of the first row is `special`, so that other rows stay finite."""

    def fill(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        drawn = normal(shape, generator)
        drawn.view(-1)[shape[-1] // 2] = special
        return drawn

    return fill


INF, NAN = float("inf"), float("nan")
FILLS: dict[str, Callable[..., torch.Tensor]] = {
    "normal": normal,
    "positive": lambda shape, g: normal(shape, g).abs() + 0.5,
    "negative": lambda shape, g: -normal(shape, g).abs() - 0.5,
    "zeros": lambda shape, g: torch.zeros(shape, dtype=torch.float64),
    "tiny": scaled(1e-3),
    "small": scaled(0.1),
    "large": scaled(9000.0),
    "mean500": scaled(1.0, 500.0),
    "mean2000": scaled(1.0, 2000.0),
    "near one": lambda shape, g: 1 + normal(shape, g).abs() * 1e-3,
    "ties": ties,
    "nan": sprinkled(NAN),
    "inf": sprinkled(INF, -INF),
    "-inf": lambda shape, g: torch.full(shape, -INF, dtype=torch.float64),
    "one nan": last_rows(NAN),
    "one inf": last_rows(INF),
}


def gaps(shape: Shape, like: torch.Tensor) -> torch.Tensor:
    """Memory between the elements of a strided tensor: NaN, and 0 for integers (a valid index)."""
    empty = NAN if like.is_floating_point() or like.is_complex() else 0
    return torch.full(shape, empty, dtype=like.dtype)


def with_row_length(extra: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows that lie `extra` elements further apart than they are long."""

    def place(x: torch.Tensor) -> torch.Tensor:
        room = gaps((*x.shape[:-1], x.shape[-1] + extra), x)
        return room[..., : x.shape[-1]].copy_(x)

    return place


def every_second(x: torch.Tensor) -> torch.Tensor:
    return gaps((*x.shape[:-1], 2 * x.shape[-1]), x)[..., ::2].copy_(x)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, one element after a 16-byte boundary."""
    return gaps((x.numel() + 1,), x)[1:].view(x.shape).copy_(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT.contiguous().mT


def batch_last(x: torch.Tensor) -> torch.Tensor:
    """The first dim innermost in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.ndim])


def expanded(x: torch.Tensor) -> torch.Tensor:
    """The first row for every row: stride 0 along the first dim."""
    return x[:1].clone().expand(x.shape)


def constant(x: torch.Tensor) -> torch.Tensor:
    """One value everywhere, every stride 0: the gradient that sum() sends back."""
    return x.flatten()[:1].clone().view([1] * x.ndim).expand(x.shape) if x.numel() else x


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "padded": with_row_length(3),
    "strided": every_second,
    "shifted": shifted,
    "transposed": transposed,
    "batch_last": batch_last,
    "channels_last": channels_last,
    "expanded": expanded,
    "constant": constant,
}
OVERLAPPING = ("expanded", "constant")


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`x` with its storage, strides and offset on another device."""
    return (
        x
        if x.device == device
        else storage_of(x).to(device).as_strided(x.shape, x.stride(), x.storage_offset())
    )


def storage_of(x: torch.Tensor) -> torch.Tensor:
    """All memory behind `x` as a flat tensor, gaps included."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of `x`'s elements: NaN equals itself."""
    return x.contiguous().view(-1).view(torch.uint8)
