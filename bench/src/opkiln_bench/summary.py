"""A README's table: a line an op, put between two markers by `report --readme`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from opkiln_bench.analysis import Result
from opkiln_bench.verdict import Ratio

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"


def summary(rows: Sequence[Result], gpu: str, commits: Sequence[str], dates: Sequence[str]) -> str:
    """The total; per op: rows with a ratio, verdicts, geometric mean; then the ops without."""
    by_op: dict[str, list[Result]] = {}
    for row in rows:
        by_op.setdefault(row.record["op"], []).append(row)
    lines = [
        total([r.ratio for r in rows if r.ratio is not None]),
        "",
        "| op | rows | ahead | level | behind | geometric mean | against |",
        "|---|---|---|---|---|---|---|",
    ]
    without = []
    for op, found in sorted(by_op.items()):
        ratios = [r.ratio for r in found if r.ratio is not None]
        if not ratios:
            without.append(op)
            continue
        cells = [
            op,
            str(len(ratios)),
            *map(str, counts(ratios)),
            f"{geometric_mean(ratios):.2f}×",
            against(found),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    dirty = {c: "-dirty" if c.endswith("-dirty") else "" for c in commits}
    short = ", ".join(sorted({c[:12] + mark for c, mark in dirty.items()}))
    days = ", ".join(sorted({d[:10] for d in dates}))
    lines += ["", f"Fastest other implementation's device time over ours, {gpu}, {days}, {short}."]
    if without:
        lines.append(f"No kernel of ours yet: {', '.join(without)}.")
    return "\n".join(lines)


def counts(ratios: Sequence[Ratio]) -> list[int]:
    return [sum(r.verdict == v for r in ratios) for v in ("ahead", "level", "behind")]


def geometric_mean(ratios: Sequence[Ratio]) -> float:
    return math.exp(sum(math.log(r.value) for r in ratios) / len(ratios))


def total(ratios: Sequence[Ratio]) -> str:
    """`200 rows: 150 ahead, 40 level, 10 behind; geometric mean 1.20×`."""
    ahead, level, behind = counts(ratios)
    mean = f"; geometric mean {geometric_mean(ratios):.2f}×" if ratios else ""
    return f"{len(ratios)} rows: {ahead} ahead, {level} level, {behind} behind{mean}"


def against(rows: Sequence[Result]) -> str:
    """The other implementations that were timed, the most often timed first; `n of m` where some
    rows lack one: a verdict says nothing about who was not there.
    """
    timed = Counter(a.backend for row in rows if row.ratio for a in row.alternatives)
    all_rows = sum(row.ratio is not None for row in rows)
    return ", ".join(
        name if count == all_rows else f"{name} ({count} of {all_rows})"
        for name, count in sorted(timed.items(), key=lambda item: (-item[1], item[0]))
    )


def into_readme(readme: Path, text: str) -> None:
    """Replace what stands between the markers. ValueError where they are missing."""
    page = readme.read_text("utf-8")
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no {BEGIN} and {END}")
    readme.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", "utf-8")
