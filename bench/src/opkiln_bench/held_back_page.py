"""`held_back.md`: what the automatic choice costs on shapes that no table was made from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opkiln_bench.analysis import Result
from opkiln_bench.pages import by_op, milliseconds, regret, regrets, sizes
from opkiln_bench.regret import HELD_BACK_TARGET, tenths

INTRODUCTION = """\
# The held-back sample

Shapes drawn between those of the pages with a fixed seed (`opkiln-bench suite=held_back`), timed
for opkiln and torch. No table is made from them: here dispatch goes by the nearest row of
the pages. {told} [How these numbers are taken](method.md).
"""
HEAD = """\
| Op | rows | with both | median regret | largest | above {target:g} % |
|---|---|---|---|---|---|
"""
ABOVE = """\
## Rows above {target:g} %

| Op | Call | dtype | auto took | its time<br>ms | the faster<br>ms | Regret |
|---|---|---|---|---|---|---|
"""


def held_back_page(rows: Sequence[Result]) -> str:
    """A line an op, then every row above the target."""
    told = regrets(rows, HELD_BACK_TARGET) or "Nothing was timed against torch here."
    text = INTRODUCTION.format(told=told) + "\n" + HEAD.format(target=100 * HELD_BACK_TARGET)
    text += "".join(f"{line_of(op, found)}\n" for op, found in by_op(rows).items())
    above = [r for r in rows if r.regret is not None and r.regret.value > HELD_BACK_TARGET]
    if above:
        text += "\n" + ABOVE.format(target=100 * HELD_BACK_TARGET)
        above.sort(key=lambda r: -r.regret.value if r.regret else 0.0)
        text += "".join(f"{row_of(row)}\n" for row in above)
    return text


def line_of(op: str, rows: Sequence[Result]) -> str:
    values = sorted(r.regret.value for r in rows if r.regret is not None)
    if not values:
        return f"| {op} | {len(rows)} | 0 | – | – | – |"
    median = values[(len(values) - 1) // 2]
    above = sum(value > HELD_BACK_TARGET for value in values)
    figures = f"{tenths(median)} | {tenths(values[-1])} | {above}"
    return f"| {op} | {len(rows)} | {len(values)} | {figures} |"


def row_of(row: Result) -> str:
    """A row above the target: auto took the slower of the two."""
    assert row.regret is not None
    times = {"opkiln": row.ours_us, **{a.backend: a.time_us for a in row.alternatives}}
    taken = times[row.regret.picked]
    faster = None if taken is None else taken / (1 + row.regret.value)
    cells = [
        *(row.record["op"], sizes(row.record), row.record["dtype"], row.regret.picked),
        *(milliseconds(taken), milliseconds(faster), regret(row)),
    ]
    return f"| {' | '.join(cells)} |"


def write_held_back(folder: Path, rows: Sequence[Result]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "held_back.md"
    path.write_text(held_back_page(rows), encoding="utf-8")
    return path
