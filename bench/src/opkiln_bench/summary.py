"""A README's tables, by family and by op, put between two markers by `report --readme`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from opkiln_bench.analysis import Result
from opkiln_bench.pages import FAMILIES, by_family, is_gradient
from opkiln_bench.verdict import Ratio

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"


def summary(rows: Sequence[Result], gpu: str, commits: Sequence[str], dates: Sequence[str]) -> str:
    """The total, a table by family and, folded, one by op; then the ops that have no ratio."""
    families = by_family(rows)
    by_name = {
        FAMILIES.get(family, family): [r for found in ops.values() for r in found]
        for family, ops in families.items()
    }
    ops = {op: found for by_op in families.values() for op, found in by_op.items()}
    dirty = {c: "-dirty" if c.endswith("-dirty") else "" for c in commits}
    short = ", ".join(sorted({c[:12] + mark for c, mark in dirty.items()}))
    days = ", ".join(sorted({d[:10] for d in dates}))
    lines = [
        total(ratios_of([r for r in rows if not is_gradient(r)])),
        "",
        *table("family", by_name),
        "",
        f"Fastest other implementation's device time over ours, {gpu}, {days}, {short}.",
    ]
    without = [op for op, found in ops.items() if not ratios_of(found)]
    if without:
        lines.append(f"Without a ratio: {', '.join(without)}.")
    lines += ["", "<details><summary>By op</summary>", "", *table("op", ops), "", "</details>"]
    return "\n".join(lines)


def table(what: str, groups: Mapping[str, Sequence[Result]]) -> list[str]:
    """A line a group that has a ratio: rows with one, verdicts, geometric mean, who was timed."""
    lines = [
        f"| {what} | rows | ahead | level | behind | geometric mean | against |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in groups.items():
        ratios = ratios_of(rows)
        if ratios:
            numbers = [str(len(ratios)), *map(str, counts(ratios))]
            cells = [name, *numbers, f"{geometric_mean(ratios):.2f}×", against(rows)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def ratios_of(rows: Sequence[Result]) -> list[Ratio]:
    return [r.ratio for r in rows if r.ratio is not None]


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
