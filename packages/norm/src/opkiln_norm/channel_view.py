"""How a channel norm sees its tensors: as outer x rows x cols.

Every input [N, C, *S] is seen as `outer` x `rows` x `cols`. A statistic runs over all cols, and
over all rows too where `pool` is set; without it each row has its own. What that means:

op, layout                          outer          rows           cols        pool
batch norm, contiguous              C              N              S           yes
batch norm, channels_last or 2-D    -              C              N, S        no
group norm, contiguous              N, G           C / G          S           yes
group norm without affine           -              N, G           C / G, S    no
group norm, channels_last           N, G or N      C / G or C     S           yes, or grouped
instance norm                       - or N         N, C or C      S           no
instance norm, running statistics   C              N              S           no
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from opkiln.spec import TensorMeta

from opkiln_norm.row_plan import MAX_ALIGN

SECTOR = 32  # bytes that DRAM and L2 hand out at least
Dim = tuple[int, tuple[int, ...]]  # size, stride in each tensor


@dataclass(frozen=True, slots=True)
class Steps:
    """One tensor's strides, in units of View.align but for the dense axis (0 rows, 1 cols)."""

    outer: tuple[int, ...]
    row: int
    cols: tuple[int, ...]
    dense: int

    @property
    def nested(self) -> tuple[Any, ...]:
        return (self.outer, self.row, self.cols)


@dataclass(frozen=True, slots=True)
class View:
    """The tensors of a call as outer x rows x cols.

    channel: where the channel is found: "outer", "row" (modulo `channels`), or "group" (outer
    modulo the number of groups, and row); "plane": the statistics are those of its group of planes.
    segment: neighbouring `per_group` rows share a statistic.
    statistics: strides of the saved statistics along outer and rows.
    """

    pool: bool
    outer: int
    rows: int
    cols: int
    channels: int
    channel: str
    steps: tuple[Steps, ...]
    outer_sizes: tuple[int, ...] = ()
    col_sizes: tuple[int, ...] = ()
    align: int = 1
    per_group: int = 1
    segment: bool = False
    statistics: tuple[int, int] = (0, 1)
    averaged: bool = False  # the rows are one channel's instances

    @property
    def count(self) -> int:
        """Values of one statistic."""
        return self.cols * (self.rows if self.pool else self.per_group if self.segment else 1)

    @property
    def key(self) -> list[int]:
        """What the tuning table knows a view by."""
        return [self.outer, self.rows, self.cols, self.steps[0].dense]


def merge(dims: Iterable[Dim]) -> list[Dim]:
    """Join neighbouring dims that step through every tensor as one; size-1 dims vanish."""
    found: list[Dim] = []
    for size, strides in dims:
        if size == 1:
            continue
        if found and all(a == size * b for a, b in zip(found[-1][1], strides, strict=True)):
            found[-1] = (found[-1][0] * size, strides)
        else:
            found.append((size, strides))
    return found


def dims_of(metas: Sequence[TensorMeta]) -> list[Dim]:
    return [(size, tuple(m.stride[d] for m in metas)) for d, size in enumerate(metas[0].shape)]


def make_view(
    outer: Sequence[Dim], row: Dim | None, cols: Sequence[Dim], tensors: int, **fields: Any
) -> View:
    """The view over these dims: strides in units of their common divisor."""
    zeros = (0,) * tensors
    rows, row_strides = row or (1, zeros)
    n_cols = math.prod(size for size, _ in cols)
    n_outer = math.prod(size for size, _ in outer)
    outer, cols = (list(dims) or [(1, zeros)] for dims in (outer, cols))
    steps = []
    divisors = [MAX_ALIGN]
    for t in range(tensors):
        o, c = ([strides[t] for _, strides in dims] for dims in (outer, cols))
        r = row_strides[t]
        dense = 0 if r == 1 and rows > 1 else 1 if c == [1] or n_cols == 1 else -1
        divisors += [*o, *([rows] if dense == 0 else [r]), *([n_cols] if dense == 1 else c)]
        steps.append((o, r, c, dense))
    align = math.gcd(*divisors)
    return View(
        outer=n_outer,
        rows=rows,
        cols=n_cols,
        outer_sizes=tuple(size for size, _ in outer[1:]),
        col_sizes=tuple(size for size, _ in cols[1:]),
        align=align,
        steps=tuple(
            Steps(
                tuple(s // align for s in o),
                r if dense == 0 else r // align,
                tuple(c) if dense == 1 else tuple(s // align for s in c),
                dense,
            )
            for o, r, c, dense in steps
        ),
        **fields,
    )


def channels_first_in_memory(meta: TensorMeta) -> bool:
    """Whether neighbouring channels are neighbours in memory."""
    return meta.stride[1] == 1 and meta.shape[1] > 1


def batch_view(metas: Sequence[TensorMeta]) -> View:
    """One statistic a channel."""
    n, c, *spatial = dims_of(metas)
    cols = merge([n, *spatial])
    fields: dict[str, Any] = {"tensors": len(metas), "channels": c[0]}
    if channels_first_in_memory(metas[0]) or len(cols) <= 1:
        return make_view([], c, cols, pool=False, channel="row", **fields)
    return make_view([c], cols[0], cols[1:], pool=True, channel="outer", **fields)


def group_view(metas: Sequence[TensorMeta], groups: int, affine: bool) -> View:
    """One statistic a sample and group."""
    n, c, *spatial = dims_of(metas)
    size = c[0] // groups
    if size == 1:
        return instance_view(metas)
    g: Dim = (groups, tuple(s * size for s in c[1]))
    member: Dim = (size, c[1])
    fields: dict[str, Any] = {"tensors": len(metas), "channels": c[0], "per_group": size}
    whole, sets = merge([member, *spatial]), merge([n, g])
    if not affine and len(whole) == 1 and len(sets) <= 1:
        fields["per_group"] = 1
        row = sets[0] if sets else None
        return make_view([], row, whole, pool=False, channel="row", **fields)
    narrow = size * metas[0].dtype.itemsize < SECTOR
    if channels_first_in_memory(metas[0]) and narrow:
        fields |= {"segment": True, "statistics": (groups, 1)}
        return make_view([n], c, merge(spatial), pool=False, channel="row", **fields)
    return make_view(sets, member, merge(spatial), pool=True, channel="group", **fields)


def instance_view(metas: Sequence[TensorMeta], averaged: bool = False) -> View:
    """One statistic a sample and channel. averaged: rows are the samples of one channel."""
    n, c, *spatial = dims_of(metas)
    fields: dict[str, Any] = {"tensors": len(metas), "channels": c[0], "pool": False}
    cols = merge(spatial)
    if averaged:
        fields |= {"statistics": (1, c[0]), "averaged": True}
        return make_view([c], n, cols, channel="outer", **fields)
    sets = merge([n, c])
    if len(sets) <= 1:
        return make_view([], sets[0] if sets else None, cols, channel="row", **fields)
    return make_view([n], c, cols, channel="row", statistics=(c[0], 1), **fields)
