"""The rows of a row norm's tensors: leading dims collapsed, strides of each operand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Operand:
    """Strides over the collapsed leading dims (None: one row serves all), and between columns."""

    strides: tuple[int, ...] | None = None
    stride_n: int | None = None


def collapse(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Merge neighbouring dims that every tensor steps through as one; size-1 dims vanish.

    strides: one sequence a tensor. Returns the sizes, and the steps of each tensor.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for size, *dim in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        merges = bool(sizes) and all(
            done[-1] == size * step for done, step in zip(steps, dim, strict=True)
        )
        if merges:
            sizes[-1] *= size
        else:
            sizes.append(size)
        for done, step in zip(steps, dim, strict=True):
            if merges:
                done.pop()
            done.append(step)
    return sizes, steps


def column_stride(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Stride of the normalized dims seen as one, None if dense. ValueError if one does not do."""
    sizes, (steps,) = collapse(shape, [stride])
    if len(sizes) > 1:
        raise ValueError("the normalized dims do not collapse to one stride")
    return None if not steps or steps[0] == 1 else steps[0]


def broadcast_strides(meta: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of `meta` expanded to `shape`."""
    steps = [0 if size == 1 else step for size, step in zip(meta.shape, meta.stride, strict=True)]
    return (*[0] * (len(shape) - meta.ndim), *steps)


def operand_metas(call: Any) -> tuple[list[Any], list[Any]]:
    """Metas of x, r, w, b, g where each has its own rows, and of a w and b of one row, or None."""
    t = vars(call.tensors)
    own = [t["input"], *(t.get(n) for n in ("residual", "scale", "shift", "gate"))]
    return own, [t.get("weight"), t.get("bias")]


def operands_of(call: Any, split: int) -> tuple[list[int], list[Operand]]:
    """Sizes of the collapsed leading dims, and the operands with strides in elements."""
    own, shared = operand_metas(call)
    shape = own[0].shape
    strides = [None if m is None else broadcast_strides(m, shape) for m in own]
    sizes, steps = collapse(shape[:split], [s[:split] for s in strides if s is not None])
    rows = iter(steps)
    operands = [
        Operand()
        if s is None
        else Operand(tuple(next(rows)) or (0,), column_stride(shape[split:], s[split:]))
        for s in strides
    ]
    for i, meta in enumerate(shared, start=2):
        if meta is not None:
            operands[i] = Operand(None, column_stride(meta.shape, meta.stride))
    return sizes, operands
