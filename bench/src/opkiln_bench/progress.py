"""What runs now, what came out, how long it will take: a line a row, a live line on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.status import Status

from opkiln_bench.analysis import judge
from opkiln_bench.catalogue import Row
from opkiln_bench.limits import Limits


class Progress:
    """Plain lines everywhere; on a terminal also which row is being measured."""

    def __init__(self, console: Console, total: int, limits: Limits | None) -> None:
        self.console = console
        self.total = total
        self.limits = limits
        self.done = 0
        self.spent_s = 0.0
        self.status: Status | None = None
        if console.is_terminal:
            self.status = console.status("")
            self.status.start()

    def start(self, row: Row) -> None:
        if self.status is not None:
            left = self.total - self.done
            eta = f", about {self.spent_s / self.done * left:.0f} s" if self.done else ""
            self.status.update(f"{row}  ({left} left{eta})")

    def finish(self, entry: dict[str, Any], seconds: float) -> None:
        self.done += 1
        self.spent_s += seconds
        result = judge(entry, "", self.limits)
        times = [f"opkiln {result.ours_us:.2f} us"] if result.ours_us else []
        times += [f"{a.backend} {a.time_us:.2f}" for a in result.alternatives]
        remarks = [f"opkiln {result.status}: {result.reason}"] if result.reason else []
        remarks += [f"{backend}: {reason}" for backend, reason in result.unusable]
        verdict = f"  {result.ratio.value:.2f}x {result.ratio.verdict}" if result.ratio else ""
        self.console.print(
            f"[{self.done}/{self.total}] {entry['op']} {entry['label']} {entry['dtype']}  "
            f"{', '.join(times)}{verdict}  {seconds:.1f} s"
            + "".join(f"\n    {remark}" for remark in remarks),
            markup=False,
        )

    def fail(self, row: Row, reason: str) -> None:
        """A row that could not be measured at all; it is not in the record."""
        self.done += 1
        self.console.print(
            f"[{self.done}/{self.total}] {row}  not measured: {reason}", markup=False
        )

    def close(self, seconds: Mapping[str, float]) -> None:
        """Where the time went."""
        if self.status is not None:
            self.status.stop()
        spent = sorted(seconds.items(), key=lambda item: -item[1])
        self.console.print("time: " + ", ".join(f"{name} {s:.1f} s" for name, s in spent))
