"""Attribution of device activity to calls, on synthetic activity."""

from __future__ import annotations

import pytest
from opkiln_bench.timing import MeasureError, round_count, schedule
from opkiln_bench.timing.intervals import Activity, Span, attribute, union_ns


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ([], 0),
        ([(0, 10)], 10),
        ([(0, 10), (20, 25)], 15),
        ([(0, 10), (5, 12)], 12),
        ([(0, 100), (10, 20), (30, 40)], 100),
        ([(20, 25), (0, 10), (10, 20)], 25),
    ],
    ids=["none", "one", "gap", "overlap", "nested", "unsorted-touching"],
)
def test_union(intervals: list[tuple[int, int]], length: int) -> None:
    assert union_ns(intervals) == length


def work(name: str, start: int, end: int, stream: int = 7) -> Activity:
    return Activity(name, start, end, stream)


def marker(start: int, stream: int = 7) -> Activity:
    return Activity("void spin_kernel(long)", start, start + 1, stream)


def test_a_call_is_what_stands_between_its_markers() -> None:
    activity = [
        work("Memset (flush)", 0, 90),
        marker(100),
        work("gemm", 110, 130),
        work("epilogue", 140, 145),
        marker(150),
        work("Memset (flush)", 160, 250),
        marker(260),
        work("gemm", 270, 300),
        marker(310),
    ]
    assert attribute(activity, "spin_kernel", 2) == [Span(25, 2), Span(30, 1)]


def test_order_of_the_records_does_not_matter() -> None:
    activity = [marker(0), work("a", 5, 9), marker(20)]
    assert attribute(activity[::-1], "spin_kernel", 1) == [Span(4, 1)]


def test_work_that_starts_under_the_marker_counts() -> None:
    # programmatic dependent launch lets a kernel begin before the one ahead has ended
    assert attribute([marker(10), work("pdl", 10, 30), marker(40)], "spin_kernel", 1) == [
        Span(20, 1)
    ]


def test_nothing_launched_is_an_error_of_that_call() -> None:
    activity = [marker(0), marker(10), marker(20), work("a", 25, 30), marker(40)]
    empty, full = attribute(activity, "spin_kernel", 2)
    assert isinstance(empty, MeasureError) and "launched nothing" in str(empty)
    assert full == Span(5, 1)


def test_another_stream_is_an_error_of_that_call() -> None:
    activity = [marker(0), work("a", 2, 4), work("side", 3, 6, stream=13), marker(10)]
    (found,) = attribute(activity, "spin_kernel", 1)
    assert isinstance(found, MeasureError) and "side ran on stream 13" in str(found)


def test_work_hidden_on_another_stream_after_the_call_is_an_error_of_it() -> None:
    activity = [
        *[marker(0), work("a", 2, 4), marker(10), work("late", 12, 60, stream=13)],
        work("Memset (flush)", 14, 90),
        *[marker(100), work("a", 102, 104), marker(110), work("Memset (flush)", 120, 200)],
        *[marker(210), work("a", 212, 215), marker(220), work("last", 230, 240, stream=13)],
    ]
    first, second, third = attribute(activity, "spin_kernel", 3)
    assert isinstance(first, MeasureError) and "late ran on stream 13" in str(first)
    assert second == Span(2, 1)
    assert isinstance(third, MeasureError) and "last ran on stream 13" in str(third)


def test_lost_markers_are_an_error_of_the_session() -> None:
    with pytest.raises(MeasureError, match="3 markers recorded for 2 calls"):
        attribute([marker(0), marker(10), marker(20)], "spin_kernel", 2)


def test_markers_on_two_streams_are_an_error() -> None:
    with pytest.raises(MeasureError, match="share one stream"):
        attribute([marker(0), marker(10, stream=9)], "spin_kernel", 1)


def test_rounds_alternate_their_order() -> None:
    assert schedule(["a", "b"], 2) == [("a", False), ("b", False), ("b", True), ("a", True)]


def test_round_count_keeps_to_its_bounds() -> None:
    from opkiln_bench.settings import Timer

    settings = Timer(min_samples=20, max_samples=60, budget_ms=400.0)
    assert round_count(0.05, settings) == 60
    assert round_count(10.0, settings) == 40
    assert round_count(500.0, settings) == 20
