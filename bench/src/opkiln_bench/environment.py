"""Where a number was taken: versions, device, commit."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from operator import or_
from pathlib import Path
from typing import Any

import torch

DISTRIBUTIONS = (
    "opkiln",
    "opkiln-norm",
    "opkiln-conv",
    "opkiln-pool",
    "opkiln-rope",
    "opkiln-misc",
    "opkiln-bench",
    "triton",
    "numpy",
    "quack-kernels",
    "flashinfer-python",
    "liger-kernel",
    "flag-gems",
)


def environment(device: torch.device) -> dict[str, Any]:
    """Everything a reader needs to judge or repeat a number."""
    return {
        "device": device_name(device),
        "driver": driver_version() if device.type == "cuda" else None,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {d: v for d in DISTRIBUTIONS if (v := installed(d))},
    }


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.processor() or platform.machine()}".strip()


def driver_version() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no library or no permission: the record says None
        return None


def commit() -> str:
    """OPKILN_COMMIT where set (a copied tree has no git), else git's HEAD, -dirty if changed."""
    stated = os.environ.get("OPKILN_COMMIT")
    if stated:
        return stated
    here = Path(__file__).resolve().parent
    head = _git(here, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return f"{head}-dirty" if _git(here, "status", "--porcelain") else head


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


class ClockSampler:
    """SM clock and throttle reasons of one GPU while something runs; silent where NVML is absent.

    A thread asks, so that a dip of the clock between two kernels is seen: one look after the timing
    read 1980 MHz on 420 rows out of 420. The driver's clock query launches nothing, and the device
    time of a kernel does not hold what the host does.
    """

    PERIOD_S = 0.02
    # software power cap, hardware slowdown, software and hardware thermal, power brake
    THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:  # the clocks are a remark on a number, never a reason to have none
            self.handle = None

    @contextmanager
    def watching(self) -> Iterator[list[tuple[int, int]]]:
        """Clock in MHz and reasons (a bit mask) every PERIOD_S of the block, and at its end."""
        seen: list[tuple[int, int]] = []
        if self.handle is None:
            yield seen
            return
        over = threading.Event()

        def watch() -> None:
            ended = False
            while not ended:  # a short block is looked at once, as it ends
                ended = over.wait(self.PERIOD_S)
                sample = self._sample()
                if sample is None:
                    return
                seen.append(sample)

        thread = threading.Thread(target=watch, name="clocks", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()

    def _sample(self) -> tuple[int, int] | None:
        import pynvml

        try:
            mhz = pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
            return mhz, pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        except pynvml.NVMLError:
            return None

    @classmethod
    def summary(cls, seen: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
        """Median and lowest clock, every reason that was given; None where the GPU says nothing."""
        if not seen:
            return None
        clocks = [mhz for mhz, _ in seen]
        reasons = reduce(or_, (given for _, given in seen))
        return {
            "sm_mhz": statistics.median_low(clocks),
            "sm_mhz_min": min(clocks),
            "samples": len(seen),
            "reasons": reasons,
            "throttled": bool(reasons & cls.THROTTLED),
        }
