"""One run: every chosen row through preparing, checking and timing, into the record."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from opkiln.measured import arch_of
from opkiln.registry import REGISTRY

from opkiln_bench import cheats, check
from opkiln_bench.analysis import OURS
from opkiln_bench.catalogue import Row
from opkiln_bench.contestants import (
    Contestant,
    Subject,
    bring,
    bucket_entry,
    cost_of,
    declined,
    enter,
    shown_args,
)
from opkiln_bench.environment import ClockSampler, device_name, environment
from opkiln_bench.limits import Limits
from opkiln_bench.records import SCHEMA_VERSION
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.timing import MeasureError, Timer
from opkiln_bench.tuning import measure_briefly

Entry = dict[str, Any]

HOST_BUDGET_S = 0.5  # for the host time of one backend on one row


def one_line(error: BaseException) -> str:
    """The type of an exception and the first line of its text."""
    text = (str(error).strip() or "no message").splitlines()[0][:300]
    return f"{type(error).__name__}: {text}"


def finite(value: float) -> float | None:
    """JSON has no infinity: None."""
    return round(value, 4) if math.isfinite(value) else None


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def header_of(
    device: torch.device,
    timer: Timer,
    stamp: str,
    config: Mapping[str, Any],
    backends: Sequence[str],
) -> dict[str, Any]:
    """What a record begins with: where, with what and how its figures are taken. stamp: commit."""
    return {
        "schema_version": SCHEMA_VERSION,
        "date": now(),
        "commit": stamp,
        "timer": timer.name,
        "l2_flush": getattr(timer, "l2_flush", None),
        "environment": environment(device),
        "config": dict(config),
        "backends": list(backends),
    }


class Sweep:
    """Measures rows on one device. seconds: where the time went, by phase."""

    def __init__(
        self,
        device: torch.device,
        timer: Timer,
        settings: TimerSettings,
        backends: Sequence[str],
        commit: str,
        limits: Limits | None = None,
    ) -> None:
        self.device = device
        self.timer = timer
        self.settings = settings
        self.backends = backends
        self.commit = commit
        self.limits = limits
        self.clocks = ClockSampler(device)
        if device.type == "cuda":
            measure_briefly()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def measure(self, row: Row) -> Entry:
        """The record of one row. A backend that fails is an entry, not an exception."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        with self.phase("inputs"):
            subject = bring(row, self.device)
        entries: dict[str, Entry] = {}
        outputs: dict[str, list[torch.Tensor]] = {}
        ready: dict[str, Contestant] = {}
        implemented = REGISTRY.of(subject.spec.name)
        for backend in self.backends:
            if backend in implemented or backend == OURS:
                with self.phase(f"first calls of {backend}"):
                    entries[backend] = self._enter(subject, backend, outputs, ready)
        with self.phase("checks"):
            results = self._check(subject, outputs, entries, ready)
        with self.phase("timing"), self.clocks.watching() as seen:
            self._time(subject, entries, ready)
        with self.phase("host and memory"):
            for backend, contestant in ready.items():
                if entries[backend]["status"] == "ok":
                    entries[backend] |= self._host_and_memory(subject, contestant)
        with self.phase("checks"):
            self._expose(subject, entries, ready, results)
        entry = self._entry(row, subject, entries) | {"clocks": self.clocks.summary(seen)}
        del subject, ready
        with self.phase("freeing"):
            self._free()
        return entry

    def _enter(
        self,
        subject: Subject,
        backend: str,
        outputs: dict[str, list[torch.Tensor]],
        ready: dict[str, Contestant],
    ) -> Entry:
        no = declined(subject, backend)
        if no is not None:
            return {"status": no[0], "reason": no[1]}
        check.poison(subject)
        try:
            contestant, outputs[backend] = enter(subject, backend)
        except Exception as error:  # whatever a backend raises is its result on this row
            return {"status": "failed", "reason": one_line(error)}
        ready[backend] = contestant
        return {
            "status": "ok",
            "reason": "",
            "version": contestant.version,
            "first_call_ms": round(contestant.first_call_ms, 3),
        }

    def _check(
        self,
        subject: Subject,
        outputs: dict[str, list[torch.Tensor]],
        entries: dict[str, Entry],
        ready: dict[str, Contestant],
    ) -> dict[str, torch.Tensor | None]:
        """Drops from `ready` whose result is wrong; elements of the others' results."""
        for backend, verdict in check.against_reference(subject, outputs).items():
            entries[backend]["error_ratio"] = finite(verdict.ratio)
            if not verdict.ok:
                entries[backend] |= {"status": "wrong", "reason": verdict.reason}
                del ready[backend]
        kept = {backend: cheats.sample(outputs[backend]) for backend in ready}
        outputs.clear()
        return kept

    def _expose(
        self,
        subject: Subject,
        entries: dict[str, Entry],
        ready: dict[str, Contestant],
        results: dict[str, torch.Tensor | None],
    ) -> None:
        """The last thing done with a row: its input is another one afterwards."""
        cheats.change_input(subject)
        for backend, contestant in ready.items():
            if entries[backend]["status"] != "ok":
                continue
            reason = cheats.kept_result(subject, contestant, results[backend])
            if reason is not None:
                entries[backend] = {"status": "wrong", "reason": reason}

    def _time(
        self, subject: Subject, entries: dict[str, Entry], ready: dict[str, Contestant]
    ) -> None:
        calls = {b: partial(c.launch, *subject.tensors) for b, c in ready.items()}
        if not calls:
            return
        try:
            found = self.timer.measure(calls)
        except (MeasureError, RuntimeError) as error:
            found = {b: MeasureError(one_line(error)) for b in calls}
        for backend, samples in found.items():
            if isinstance(samples, MeasureError):
                entries[backend] |= {"status": "failed", "reason": str(samples)}
                continue
            entries[backend] |= {
                "forward_us": [round(t, 3) for t in samples.forward_us],
                "reversed_us": [round(t, 3) for t in samples.reversed_us],
                "kernels": samples.kernels,
            }
            if self.limits is not None:
                median = statistics.median(samples.all_us)
                reason = cheats.too_fast(subject.row, cost_of(subject), median, self.limits)
                if reason is not None:
                    entries[backend] = {"status": "failed", "reason": reason}

    def _host_and_memory(self, subject: Subject, contestant: Contestant) -> Entry:
        """Host time of a call on an idle device, and the memory that it takes at its peak."""
        spent: list[float] = []
        began = time.perf_counter()
        while len(spent) < self.settings.host_calls:
            self.timer.synchronize()
            start = time.perf_counter_ns()
            result = contestant.launch(*subject.tensors)
            spent.append((time.perf_counter_ns() - start) / 1e3)
            del result
            if time.perf_counter() - began > HOST_BUDGET_S:  # top-k by torch takes 0.2 s a call
                break
        found: Entry = {"host_us": round(statistics.median(spent), 2)}
        if self.device.type == "cuda":
            self.timer.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            contestant.launch(*subject.tensors)
            self.timer.synchronize()
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        return found

    def _entry(self, row: Row, subject: Subject, backends: dict[str, Entry]) -> Entry:
        specs = {t.name: t for t in subject.spec.tensors}
        return {
            "op": row.op,
            "name": row.name,
            "label": row.label,
            "dtype": row.dtype,
            "family": row.family,
            "forward": row.forward,
            "pages": row.pages,
            "model": row.model,
            "note": row.note,
            "peak": row.peak,
            "tensors": {
                n: {
                    "shape": list(t.shape),
                    "dtype": t.dtype,
                    "dims": specs[n].dims.replace(" ", ", "),
                    # the op allows this dtype whatever the row's is: say so on the page
                    "fixed_dtype": bool(specs[n].dtypes) and t.dtype != row.dtype,
                }
                for n, t in subject.shown_tensors.items()
            },
            "args": row.args,
            "shown_args": shown_args(subject),
            "cost": cost_of(subject),
            "bucket": bucket_entry(subject),
            "timer": {"name": self.timer.name, "title": self.timer.title},
            "gpu": device_name(self.device),
            "arch": arch_of(self.device),
            "date": now(),
            "commit": self.commit,
            "backends": backends,
        }

    def _free(self) -> None:
        """Give cached blocks back where the next row may need them: above half of the memory."""
        if self.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.device)
        if free < total / 2:
            gc.collect()
            torch.cuda.empty_cache()
