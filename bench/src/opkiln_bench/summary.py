"""A README's table: a line an op, put between two markers by `report --readme`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from opkiln_bench.analysis import Result

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"


def summary(rows: Sequence[Result], gpu: str, commits: Sequence[str], dates: Sequence[str]) -> str:
    """Per op: rows with a ratio, verdicts, geometric mean; then the ops that have none."""
    by_op: dict[str, list[Result]] = {}
    for row in rows:
        by_op.setdefault(row.record["op"], []).append(row)
    lines = [
        "| op | rows | ahead | level | behind | geometric mean | against |",
        "|---|---|---|---|---|---|---|",
    ]
    without = []
    for op, found in sorted(by_op.items()):
        ratios = [r.ratio for r in found if r.ratio is not None]
        if not ratios:
            without.append(op)
            continue
        counts = [sum(r.verdict == v for r in ratios) for v in ("ahead", "level", "behind")]
        mean = math.exp(sum(math.log(r.value) for r in ratios) / len(ratios))
        cells = [op, str(len(ratios)), *map(str, counts), f"{mean:.2f}×", against(found)]
        lines.append(f"| {' | '.join(cells)} |")
    dirty = {c: "-dirty" if c.endswith("-dirty") else "" for c in commits}
    short = ", ".join(sorted({c[:12] + mark for c, mark in dirty.items()}))
    days = ", ".join(sorted({d[:10] for d in dates}))
    lines += ["", f"Fastest other implementation's device time over ours, {gpu}, {days}, {short}."]
    if without:
        lines.append(f"No kernel of ours yet: {', '.join(without)}.")
    return "\n".join(lines)


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
