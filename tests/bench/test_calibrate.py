"""The streams behind the floor table move what they say, once each; timing needs a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from opkiln_bench import calibrate
from opkiln_bench.timing import MeasureError
from opkiln_bench.timing.intervals import Span

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMS = 132


@pytest.mark.parametrize("shape", calibrate.SHAPES[::2], ids=str)
@pytest.mark.parametrize("words", [(0, 0), (96, 0), (0, 5024), (70_016, 32), (1 << 29, 1 << 22)])
def test_chunks_cover_every_word(shape: calibrate.Shape, words: tuple[int, int]) -> None:
    programs, chunk = calibrate.chunks(words, shape.block, SMS)
    for count, size in zip(words, chunk, strict=True):
        assert programs * size >= count
        assert size <= shape.block
        assert size % calibrate.LINE_WORDS == 0  # vectors of 16 bytes, no line shared
    assert programs <= SMS or programs % SMS == 0


@pytest.mark.parametrize(
    "words", [(2080, 2080), (2080, 480), (480, 2080), (2080, 0), (0, 2080)], ids=str
)
@pytest.mark.parametrize("hints", [False, True], ids=["plain", "hints"])
def test_a_stream_writes_what_it_read_and_no_more(words: tuple[int, int], hints: bool) -> None:
    x = torch.arange(4096, dtype=torch.int32, device=DEVICE)
    y = torch.full_like(x, -1)
    calibrate.stream(x, y, words, calibrate.Shape(512, 4, hints), SMS)()
    programs, (read_chunk, write_chunk) = calibrate.chunks(words, 512, SMS)
    expected = torch.full_like(x, -1)
    for i in range(programs):
        start, stop = i * write_chunk, min((i + 1) * write_chunk, words[1])
        if start < stop:
            expected[start:stop] = 1  # beyond its reads a program writes 0 + 1
            both = max(0, min(stop - start, read_chunk, words[0] - i * read_chunk))
            expected[start : start + both] = x[i * read_chunk :][:both] + 1
    assert torch.equal(y, expected)


def test_a_floor_never_falls_where_more_is_moved() -> None:
    noisy = [[1.0, 1.3, 1.2], [1.6, 1.4, 1.5], [1.5, 1.9, 2.0]]
    floor = calibrate.never_falling(noisy)
    assert floor == [[1.0, 1.2, 1.2], [1.4, 1.4, 1.5], [1.5, 1.9, 2.0]]


def test_the_axis_is_fine_where_rows_are() -> None:
    steps = [n for n in calibrate.AXIS if 256 << 10 <= n <= 64 << 20]
    assert all(1.38 < b / a < 1.45 for a, b in pairwise(steps))
    assert steps[0] == 256 << 10 and steps[-1] == 64 << 20
    assert all(n % (4 * calibrate.LINE_WORDS) == 0 for n in calibrate.AXIS)


def test_samples_of_a_call_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each is not counted; dropped records are an error after the last attempt."""
    done: list[str] = []
    monkeypatch.setattr(calibrate, "recorded", lambda out: nullcontext())
    monkeypatch.setattr(calibrate, "mark", lambda: None)
    times = iter([9000, 2000, 3000, 4000, 9000, 7000, 8000, 6000])
    spans = [Span(t, 1) for t in times]
    monkeypatch.setattr(calibrate, "attribute", lambda *_: spans)
    calls = [lambda: done.append("a"), lambda: done.append("b")]
    assert calibrate.in_turn(lambda: done.append("flush"), calls, 3) == [3.0, 7.0]
    assert done == ["flush", "a"] * 4 + ["flush", "b"] * 4
    spans[2] = MeasureError("nothing launched")
    with pytest.raises(MeasureError, match="nothing launched"):
        calibrate.in_turn(lambda: None, calls, 3)


def test_the_fastest_streams_of_a_point_are_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Screened times fall with the number of the shape: the last two go on."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=SMS)
    )
    monkeypatch.setattr(calibrate, "AXIS", [0, 1 << 20])
    monkeypatch.setattr(calibrate, "stream", lambda x, y, words, shape, sms: (words, shape))

    def in_turn(flush: object, calls: list[tuple], samples: int) -> list[float]:
        if samples == calibrate.SCREEN_SAMPLES:
            return [float(len(calibrate.SHAPES) - calibrate.SHAPES.index(c[1])) for c in calls]
        assert samples == 40
        assert [c[1] for c in calls] == [*reversed(calibrate.SHAPES[-2:])] * 2
        assert [c[0][1] for c in calls] == [0, 0, 1 << 18, 1 << 18]
        return [2.0, 1.5, 4.0, 5.0]

    monkeypatch.setattr(calibrate, "in_turn", in_turn)
    x = torch.empty(4, dtype=torch.int32)
    assert calibrate.floor_row(None, x, x, 4096, 40) == [1.5, 4.0]
