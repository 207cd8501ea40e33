"""What runs now, what came out, how long it will take: a line a row, a live line on a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.status import Status

from opkiln_bench.analysis import judge
from opkiln_bench.catalogue import Row
from opkiln_bench.held_back import PAGE as HELD_BACK
from opkiln_bench.limits import Limits
from opkiln_bench.records import row_key
from opkiln_bench.regret import HELD_BACK_TARGET, PAGES_TARGET, Regret, summary


class Progress:
    """Plain lines everywhere; on a terminal also which row is being measured."""

    def __init__(self, console: Console, total: int, limits: Limits | None) -> None:
        self.console = console
        self.total = total
        self.limits = limits
        self.done = 0
        self.spent_s = 0.0
        self.outcomes: Counter[str] = Counter()
        self.log_ratios = 0.0
        self.regrets: list[tuple[str, Regret | None]] = []
        self.target = PAGES_TARGET
        self.status: Status | None = None
        if console.is_terminal:
            self.status = console.status("")
            self.status.start()

    def start(self, row: Row) -> None:
        if self.status is not None:
            self.status.update(f"{row}  ({self.total - self.done} left{self.estimate()})")

    def estimate(self) -> str:
        """`, about 90 s`: the rows left at the pace of those done."""
        left = self.total - self.done
        return f", about {self.spent_s / self.done * left:.0f} s" if self.done and left else ""

    def finish(self, entry: dict[str, Any], seconds: float) -> None:
        self.done += 1
        self.spent_s += seconds
        result = judge(entry, "", self.limits)
        times = [f"opkiln {result.ours_us:.2f} us"] if result.ours_us else []
        times += [f"{a.backend} {a.time_us:.2f}" for a in result.alternatives]
        remarks = [f"opkiln {result.status}: {result.reason}"] if result.reason else []
        remarks += [f"{backend}: {reason}" for backend, reason in result.unusable]
        verdict = f"  {result.ratio.value:.2f}x {result.ratio.verdict}" if result.ratio else ""
        self.outcomes[result.ratio.verdict if result.ratio else result.status] += 1
        if HELD_BACK in entry["pages"]:
            self.target = HELD_BACK_TARGET
        self.regrets.append((" ".join(row_key(entry)), result.regret))
        if result.ratio:
            self.log_ratios += math.log(result.ratio.value)
        # a terminal has the estimate on its live line
        estimate = "" if self.status is not None else self.estimate()
        self.console.print(
            f"[{self.done}/{self.total}] {entry['op']} {entry['label']} {entry['dtype']}  "
            f"{', '.join(times)}{verdict}  {seconds:.1f} s{estimate}"
            + "".join(f"\n    {remark}" for remark in remarks),
            markup=False,
        )

    def fail(self, row: Row, reason: str) -> None:
        """A row that could not be measured at all; it is not in the record."""
        self.done += 1
        self.outcomes["not measured"] += 1
        self.console.print(
            f"[{self.done}/{self.total}] {row}  not measured: {reason}", markup=False
        )

    def close(self, seconds: Mapping[str, float], wall_s: float) -> None:
        """What came out, and where the time went."""
        if self.status is not None:
            self.status.stop()
        ratios = sum(self.outcomes[verdict] for verdict in ("ahead", "level", "behind"))
        counts = ", ".join(f"{count} {what}" for what, count in self.outcomes.most_common())
        mean = f"; geometric mean {math.exp(self.log_ratios / ratios):.2f}x" if ratios else ""
        self.console.print(f"{self.done} of {self.total} rows: {counts or 'none'}{mean}")
        if told := summary(self.regrets, self.target):
            self.console.print(told)
        spent = sorted(seconds.items(), key=lambda item: -item[1])
        self.console.print(
            f"time {wall_s:.0f} s: "
            + ", ".join(f"{name} {s:.1f} s" for name, s in spent if s >= 0.05)
        )
