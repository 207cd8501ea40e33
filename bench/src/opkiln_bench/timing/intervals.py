"""Which device activity belongs to which call, and how long it took.

Each call stands between two marker kernels on its stream. Its device time is the length of the
union of the kernel, memcpy and memset intervals between them: gaps do not count, overlap counts
once. Work on another stream is an error of the call after whose first marker it starts, even if it
starts after the second: a call that hides its work there would look fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opkiln_bench.timing import MeasureError


@dataclass(frozen=True, slots=True)
class Activity:
    """One interval of device work."""

    name: str
    start_ns: int
    end_ns: int
    stream: int


@dataclass(frozen=True, slots=True)
class Span:
    """What one call did on the device."""

    busy_ns: int
    kernels: int


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union of [start, end) intervals."""
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total += end - start
            reached = end
        elif end > reached:
            total += end - reached
            reached = end
    return total


def attribute(activities: Sequence[Activity], marker: str, calls: int) -> list[Span | MeasureError]:
    """One entry a call, in order. Raises MeasureError when the markers themselves do not add up."""
    events = sorted(activities, key=lambda a: (a.start_ns, a.end_ns))
    markers = [a for a in events if marker in a.name]
    if len(markers) != 2 * calls:
        raise MeasureError(
            f"{len(markers)} markers recorded for {calls} calls, expected {2 * calls}"
        )
    streams = {m.stream for m in markers}
    if len(streams) != 1:
        raise MeasureError(f"markers on streams {sorted(streams)}: calls must share one stream")
    (stream,) = streams
    work = [a for a in events if marker not in a.name]
    calls_end = [*(m.start_ns for m in markers[2::2]), None]
    spans: list[Span | MeasureError] = []
    position = 0
    for begin, end, next_ns in zip(markers[::2], markers[1::2], calls_end, strict=True):
        # work that ended before this call began was the flush's or an earlier call's
        while position < len(work) and work[position].end_ns <= begin.end_ns:
            position += 1
        inside, elsewhere = [], []
        index = position
        while index < len(work) and (next_ns is None or work[index].start_ns < next_ns):
            activity = work[index]
            if activity.stream != stream:  # also what starts late: nothing else uses a stream
                elsewhere.append(activity)
            elif activity.start_ns < end.end_ns:
                inside.append(activity)
                position = index + 1
            index += 1
        spans.append(_span(inside, elsewhere, stream))
    return spans


def _span(
    inside: Sequence[Activity], elsewhere: Sequence[Activity], stream: int
) -> Span | MeasureError:
    if elsewhere:
        return MeasureError(
            f"{elsewhere[0].name[:60]} ran on stream {elsewhere[0].stream}, the call on {stream}"
        )
    if not inside:
        return MeasureError("the call launched nothing on the device")
    return Span(union_ns((a.start_ns, a.end_ns) for a in inside), len(inside))
