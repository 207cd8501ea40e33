"""What the first run of conv.py tries: the tilings in Triton that suit a geometry."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import common

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/conv/src")]

from opkiln_conv import tilings  # noqa: E402
from opkiln_conv.geometry import Geometry  # noqa: E402
from opkiln_conv.tilings import Tiling  # noqa: E402

Shape = tuple[int, int, int, int]  # channels, pixels, products, warps
SMALL: list[Shape] = [(64, 64, 64, 4), (64, 32, 64, 4), (64, 128, 64, 4), (128, 64, 64, 4)]
LARGE: list[Shape] = [(128, 128, 64, 4), (128, 128, 64, 8), (128, 256, 64, 8), (256, 128, 64, 8)]


def fitting(g: Geometry, shapes: list[Shape]) -> list[Shape]:
    """Those that leave no block of channels or pixels without work."""
    least_m = max(tilings.power_of_two(g.group_outs), 16)
    least_n = max(tilings.power_of_two(g.pixels), 32)
    return [s for s in shapes if s[0] <= least_m and s[1] <= least_n]


def splits(g: Geometry, m: int, n: int, steps: int) -> list[int]:
    """No split where that fills half the GPU, and those nearest to one and two programs a
    multiprocessor.
    """
    tiles = g.batch * -(-g.pixels // n) * -(-g.group_outs // m)
    most = max(min(steps // 2, 8), 1)
    near = {min(max(round(programs / tiles), 1), most) for programs in (132, 264)}
    return sorted(near | {1} if tiles >= 40 else near)


def pointwise(g: Geometry) -> Iterator[Tiling]:
    for m, n, k, w in fitting(g, [*SMALL, *LARGE[:2], (32, 64, 64, 4), (128, 32, 64, 4)]):
        for split in splits(g, m, n, g.of_group // k):
            for stages in (2, 4) if g.of_group // k // split > 2 else (3,):
                yield Tiling("pointwise", m, n, k, w, stages, split, static=True)
            if g.of_group % 128 == 0 and g.of_group // 128 >= split and m * n <= 8192:
                yield Tiling("pointwise", m, n, 128, w, 2, split, static=True)


def packed(g: Geometry) -> Iterator[Tiling]:
    heavy = g.terms * g.pixels * g.group_outs > 2**31
    tall = [(64, 256, 64, 4), (64, 256, 64, 8)] if heavy else []
    for m, n, k, w in fitting(g, LARGE + SMALL[2:] + tall if heavy else SMALL + LARGE[:2]):
        k = min(k, tilings.power_of_two(g.of_group))
        steps = g.taps * -(-g.of_group // k)
        for split in splits(g, m, n, steps):
            for stages in (3, 4) if heavy else (4,):
                if (m + n) * k * 2 * stages <= 220 * 1024:
                    yield Tiling("packed", m, n, k, w, stages, split, static=True)


def gather(g: Geometry) -> Iterator[Tiling]:
    if g.groups > 1:
        shapes = [(16, 64, 32, 2), (16, 128, 32, 4), (16, 64, 64, 2), (16, 64, 64, 4),
                  (16, 128, 64, 4), (16, 32, 64, 1), (16, 32, 64, 2)]  # fmt: skip
        shapes = [s for s in shapes if s[2] >= min(g.terms, 64)]
    elif g.of_group < 16:
        most_k = min(max(tilings.power_of_two(g.terms), 16), 64)
        blocks = [(64, 64, 4), (64, 32, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4), (32, 128, 4),
                  (32, 256, 4), (64, 256, 8), (32, 64, 4), (32, 32, 2), (32, 256, 8)]  # fmt: skip
        ks = sorted({most_k, min(most_k, 32), 16})
        shapes = fitting(g, [(m, n, k, w) for (m, n, w), k in itertools.product(blocks, ks)])
    else:
        shapes = fitting(g, [(64, 64, 32, 4), (64, 64, 64, 4), (64, 32, 64, 4), (64, 128, 32, 8),
                             (128, 64, 32, 8)])  # fmt: skip
    for m, n, k, w in shapes:
        steps = -(-g.terms // k)
        for split in splits(g, m, n, steps) if steps > 4 else (1,):
            if steps > split:
                yield Tiling("gather", m, n, k, w, 2, split, static=True, ahead=True)
            if g.of_group < 16 or k == 64:
                yield Tiling("gather", m, n, k, w, 2, split, static=True)


def channelwise(g: Geometry) -> Iterator[Tiling]:
    for m, n, w in [(1, 128, 2), (1, 128, 4), (1, 256, 4), (1, 256, 8), (1, 512, 4), (1, 64, 2),
                    (1, 64, 1), (1, 32, 1), (2, 64, 2)]:  # fmt: skip
        yield Tiling("channelwise", m, n, num_warps=w, static=True)


def first_run(g: Geometry) -> list[Tiling]:
    """What the rule says first, then what may be better."""
    first = tilings.rule(g)
    found = [first, replace(first, static=True)]
    if g.pointwise:
        found += pointwise(g)
    elif g.of_group == 1 and g.groups > 1:
        found += channelwise(g)
    else:
        if g.groups == 1 and g.of_group >= 16:
            found += packed(g)
        if g.terms * g.pixels * g.group_outs < 2**31:
            found += gather(g)
    return list(dict.fromkeys(t for t in found if tilings.can_use(g, t)))
