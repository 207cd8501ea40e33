"""Wall clock: how long the call takes on a CPU, for machines without a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping

from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.timing import MeasureError, Samples, Thunk, round_count, schedule


class WallTimer:
    name = "wall"
    title = "CPU wall clock"

    def __init__(self, settings: TimerSettings) -> None:
        self.settings = settings

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back on a CPU."""

    def measure(self, calls: Mapping[str, Thunk]) -> dict[str, Samples | MeasureError]:
        slowest_ms = 0.0
        for call in calls.values():
            for _ in range(self.settings.warmup_calls):
                start = time.perf_counter_ns()
                call()
                last_ms = (time.perf_counter_ns() - start) / 1e6
            slowest_ms = max(slowest_ms, last_ms)
        found = {name: Samples() for name in calls}
        for name, is_reversed in schedule(list(calls), round_count(slowest_ms, self.settings)):
            start = time.perf_counter_ns()
            calls[name]()
            elapsed_us = (time.perf_counter_ns() - start) / 1e3
            samples = found[name]
            (samples.reversed_us if is_reversed else samples.forward_us).append(elapsed_us)
        return dict(found)
