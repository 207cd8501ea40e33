"""The clock is watched while something is timed, by a thread, through a driver that is made up."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opkiln_bench.environment import ClockSampler

CUDA = torch.device("cuda", 0)
THERMAL, IDLE = 0x20, 0x1
Answer = Callable[[], tuple[int, int]]


class NVMLError(Exception):
    pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], None]:
    """Put a driver in place whose clock and reasons a test chooses, a look at a time."""

    def install(answer: Answer) -> None:
        now = {"reasons": 0}

        def clock(handle: str, which: int) -> int:
            assert (handle, which) == ("GPU-some-uuid", 1)
            mhz, now["reasons"] = answer()
            return mhz

        fake = SimpleNamespace(
            NVML_CLOCK_SM=1,
            NVMLError=NVMLError,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetClockInfo=clock,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: now["reasons"],
        )
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        of_device = SimpleNamespace(uuid="some-uuid")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: of_device)
        monkeypatch.setattr(ClockSampler, "PERIOD_S", 0.002)

    return install


def watched(seconds: float) -> dict[str, Any] | None:
    sampler = ClockSampler(CUDA)
    with sampler.watching() as seen:
        time.sleep(seconds)
    return sampler.summary(seen)


def test_a_dip_in_the_middle_is_seen(driver: Callable[[Answer], None]) -> None:
    looks = iter([(1980, 0), (1410, THERMAL), (1980, IDLE)])
    driver(lambda: next(looks, (1980, 0)))
    found = watched(0.2)
    assert found is not None and found["samples"] > 10
    assert (found["sm_mhz"], found["sm_mhz_min"]) == (1980, 1410)
    assert (found["reasons"], found["throttled"]) == (THERMAL | IDLE, True)


def test_idle_is_no_throttling(driver: Callable[[Answer], None]) -> None:
    driver(lambda: (1980, IDLE))
    found = watched(0.02)
    assert found is not None and not found["throttled"]


def test_a_short_block_is_looked_at_once(
    driver: Callable[[Answer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(lambda: (1700, 0))
    monkeypatch.setattr(ClockSampler, "PERIOD_S", 60.0)
    found = watched(0.0)
    assert found is not None
    assert (found["samples"], found["sm_mhz_min"]) == (1, 1700)


def test_a_block_that_raises_ends_the_watch(driver: Callable[[Answer], None]) -> None:
    looks = []
    driver(lambda: (len(looks.append(0) or looks), 0))
    with pytest.raises(ValueError, match="mine"):
        with ClockSampler(CUDA).watching():
            raise ValueError("mine")
    before = len(looks)
    time.sleep(0.05)
    assert len(looks) == before


def test_a_driver_that_refuses_says_nothing(driver: Callable[[Answer], None]) -> None:
    def refuse() -> tuple[int, int]:
        raise NVMLError("no permission")

    driver(refuse)
    assert watched(0.02) is None


def test_a_cpu_has_no_clock() -> None:
    sampler = ClockSampler(torch.device("cpu"))
    with sampler.watching() as seen:
        pass
    assert sampler.summary(seen) is None
