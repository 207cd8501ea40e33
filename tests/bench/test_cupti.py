"""Attribution and agreement on a real GPU: what CUPTI says belongs to the call that did it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.timing import MeasureError, Samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
MIB = 1 << 20


@pytest.fixture
def measure() -> Callable[[Callable[[], Any]], Samples | MeasureError]:
    from opkiln_bench.timing.cupti import CuptiTimer

    timer = CuptiTimer(torch.device("cuda", 0), TimerSettings(max_samples=20))
    return lambda call: timer.measure({"call": call})["call"]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8 * MIB, device="cuda")


def kernels_of(found: Samples | MeasureError) -> int:
    assert isinstance(found, Samples), found
    assert len(found.all_us) == 20
    assert all(t > 0 for t in found.all_us)
    assert found.kernels is not None
    return found.kernels


@pytest.mark.parametrize("count", [1, 2, 5])
def test_known_kernel_counts(measure: Any, x: torch.Tensor, count: int) -> None:
    assert kernels_of(measure(lambda: [x.add(1) for _ in range(count)])) == count


def test_memset_and_memcpy_count(measure: Any, x: torch.Tensor) -> None:
    y = torch.empty_like(x)

    def call() -> None:
        y.copy_(x)  # a device-to-device memcpy
        y.zero_()  # a memset

    found = measure(call)
    assert kernels_of(found) == 2
    alone = measure(lambda: y.copy_(x))
    assert sum(found.all_us) > 1.2 * sum(alone.all_us)


@triton.jit
def read_all(x_ptr, y_ptr, BLOCK: tl.constexpr, EVICT: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + offs, eviction_policy=EVICT))
    tl.store(y_ptr + tl.program_id(0), total)


def test_the_flush_reaches_lines_that_loads_kept(x: torch.Tensor) -> None:
    """Reading again after `evict_last` reads takes as long as reading what nobody has read."""
    from opkiln_bench.timing.cupti import MARKER, L2Flush, mark, recorded
    from opkiln_bench.timing.intervals import Activity, Span, attribute

    first, other = x[:MIB], x[MIB : 2 * MIB]  # 4 MiB each
    y = torch.empty(MIB // 4096, device="cuda")
    flush = L2Flush(torch.device("cuda", 0), 2.0)

    def read(t: torch.Tensor, evict: str) -> None:
        read_all[(MIB // 4096,)](t, y, BLOCK=4096, EVICT=evict)

    for evict in ("", "evict_last"):
        read(first, evict)
    activities: list[Activity] = []
    with recorded(activities):
        for again in (first, other) * 20:
            read(first, "evict_last")
            flush()
            mark()
            read(again, "")
            mark()
    spans = attribute(activities, MARKER, 40)
    times = [s.busy_ns for s in spans if isinstance(s, Span)]
    kept, cold = statistics.median(times[::2]), statistics.median(times[1::2])
    assert kept > 0.93 * cold  # 0.71 where the flush only zeroes


def test_a_call_that_launches_nothing_is_an_error(measure: Any) -> None:
    found = measure(lambda: None)
    assert isinstance(found, MeasureError) and "launched nothing" in str(found)


def test_work_on_another_stream_is_an_error(measure: Any, x: torch.Tensor) -> None:
    side = torch.cuda.Stream()

    def call() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add(1)
        torch.cuda.current_stream().wait_stream(side)

    found = measure(call)
    assert isinstance(found, MeasureError) and "on stream" in str(found)


def test_a_graph_replay_is_timed_by_its_kernels(measure: Any, x: torch.Tensor) -> None:
    out = torch.empty_like(x)
    torch.add(x, 1, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(x, 1, out=out)
        torch.mul(out, 2, out=out)
    replayed = measure(graph.replay)
    eager = measure(lambda: torch.mul(torch.add(x, 1, out=out), 2, out=out))
    assert kernels_of(replayed) == kernels_of(eager) == 2
    assert median(replayed) == pytest.approx(median(eager), rel=0.05)


def test_contestants_are_told_apart(x: torch.Tensor) -> None:
    from opkiln_bench.timing.cupti import CuptiTimer

    timer = CuptiTimer(torch.device("cuda", 0), TimerSettings(max_samples=20))
    half = x[: x.numel() // 8].clone()
    found = timer.measure({"large": lambda: x.add(1), "small": lambda: half.add(1)})
    assert median(found["large"]) > 3 * median(found["small"])


def median(samples: Any) -> float:
    assert isinstance(samples, Samples), samples
    return float(torch.tensor(samples.all_us).median())


def two_ways(call: Callable[[], Any], rounds: int = 20) -> tuple[float, float]:
    """Median times of the same calls by CUPTI and between two events, L2 flushed, in us."""
    from opkiln_bench.timing.cupti import MARKER, L2Flush, mark, recorded
    from opkiln_bench.timing.intervals import Activity, Span, attribute

    flush = L2Flush(torch.device("cuda", 0), 2.0)
    call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    activities: list[Activity] = []
    with recorded(activities):
        for begin, end in events:
            flush()
            torch.cuda._sleep(200_000)  # about 0.1 ms: the host is ahead when the events come
            begin.record()
            call()
            end.record()
            mark()
    spans = attribute(activities, MARKER, rounds)
    busy = [s.busy_ns / 1e3 for s in spans if isinstance(s, Span)]
    assert len(busy) == rounds
    return statistics.median(busy), statistics.median(b.elapsed_time(e) * 1e3 for b, e in events)


def one_kernel() -> Callable[[], Any]:
    x = torch.randn(128 * MIB, device="cuda")
    return lambda: x.add(1)


def three_kernels() -> Callable[[], Any]:
    x = torch.randn(128 * MIB, device="cuda")
    return lambda: x.add(1).mul_(2).sub_(3)


def matmul() -> Callable[[], Any]:
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def rms_norm_of_opkiln() -> Callable[[], Any]:
    from opkiln.functional import rms_norm

    x = torch.randn(32768, 8192, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8192, device="cuda", dtype=torch.bfloat16)
    return lambda: rms_norm(x, [8192], weight, backend="opkiln")


def graph_replay() -> Callable[[], Any]:
    x = torch.randn(128 * MIB, device="cuda")
    out = torch.add(x, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(x, 1, out=out)
        torch.mul(out, 2, out=out)
    return graph.replay


@pytest.mark.parametrize(
    "prepare", [one_kernel, three_kernels, matmul, rms_norm_of_opkiln, graph_replay]
)
def test_agreement_with_events_above_50_us(
    measure: Any, prepare: Callable[[], Callable[[], Any]]
) -> None:
    call = prepare()
    by_cupti, by_events = two_ways(call)
    assert by_cupti > 50
    assert by_events == pytest.approx(by_cupti, rel=0.03)
    assert median(measure(call)) == pytest.approx(by_cupti, rel=0.06)  # other clocks


def test_the_profiler_warns_nobody(
    measure: Any, x: torch.Tensor, recwarn: pytest.WarningsRecorder
) -> None:
    measure(lambda: x.add(1))
    assert [str(w.message) for w in recwarn.list] == []
