"""Device time of a call from CUPTI activity, through torch.profiler.

One profiler session a row: starting one costs about as much as a hundred small calls.
"""

from __future__ import annotations

import ctypes
import functools
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.timing import MeasureError, Samples, Thunk, round_count, schedule
from opkiln_bench.timing.intervals import Activity, Span, attribute

MARKER = "spin_kernel"  # what torch.cuda._sleep launches; no op of ours or a peer's does
ATTEMPTS = 3  # CUPTI drops records when its buffers run full: rare, and seen by the marker count


def mark() -> None:
    """Put a marker kernel on the current stream."""
    torch.cuda._sleep(1)


@functools.cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def forget_kept_lines() -> None:
    """Make L2 lines that loads with `evict_last` left (Inductor's do) ordinary.

    They survive zeroing: on an H200 a kernel that reads 4 MB again took 2.3 us after zeroing alone
    and 3.2 us cold. The driver acts at once, not in stream order, hence the synchronization.
    """
    torch.cuda.synchronize()
    status = driver().cuCtxResetPersistingL2Cache()
    if status:
        raise MeasureError(f"cuCtxResetPersistingL2Cache: CUDA error {status}")


class L2Flush:
    """Leaves nothing of a call's inputs in L2: kept lines first, then `factor` times its size."""

    def __init__(self, device: torch.device, factor: float) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.buffer = torch.empty(int(factor * l2_bytes), dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        forget_kept_lines()
        self.buffer.zero_()


@contextmanager
def recorded(out: list[Activity]) -> Iterator[None]:
    """Append the device activity of the block to `out`."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # acc_events=True would silence it too, and make a Python object of every event
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        with profile(activities=[ProfilerActivity.CUDA]) as session:
            yield
            torch.cuda.synchronize()
    for event in session.profiler.kineto_results.events():
        # torch.compile's regions are mirrored onto the device as annotations: records, not work
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            start = event.start_ns()
            out.append(
                Activity(
                    event.name(), start, start + event.duration_ns(), event.device_resource_id()
                )
            )


class CuptiTimer:
    name = "cupti"
    title = "GPU device time"
    l2_flush = "lines that `evict_last` loads kept made ordinary, then zeroing"

    def __init__(self, device: torch.device, settings: TimerSettings) -> None:
        self.settings = settings
        self.flush = L2Flush(device, settings.l2_flush_factor)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def measure(self, calls: Mapping[str, Thunk]) -> dict[str, Samples | MeasureError]:
        slowest_ms = max(self._warm(call) for call in calls.values())
        order = schedule(list(calls), round_count(slowest_ms, self.settings))
        for attempt in range(ATTEMPTS):
            try:
                return self._collect(order, self._run(calls, order))
            except MeasureError:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _warm(self, call: Thunk) -> float:
        """Run the warm-up calls; how long one takes, in ms, flush included."""
        for _ in range(self.settings.warmup_calls):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.flush()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    def _run(
        self, calls: Mapping[str, Thunk], order: list[tuple[str, bool]]
    ) -> list[Span | MeasureError]:
        activities: list[Activity] = []
        with recorded(activities):
            for name, _ in order:
                self.flush()
                mark()
                calls[name]()
                mark()
        return attribute(activities, MARKER, len(order))

    @staticmethod
    def _collect(
        order: list[tuple[str, bool]], spans: list[Span | MeasureError]
    ) -> dict[str, Samples | MeasureError]:
        found: dict[str, Samples | MeasureError] = {name: Samples() for name, _ in order}
        for (name, is_reversed), span in zip(order, spans, strict=True):
            samples = found[name]
            if isinstance(samples, MeasureError):
                continue
            if isinstance(span, MeasureError):
                found[name] = span
                continue
            (samples.reversed_us if is_reversed else samples.forward_us).append(span.busy_ns / 1e3)
            samples.kernels = span.kernels
        return found
