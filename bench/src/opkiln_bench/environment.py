"""Where a number was taken: versions, device, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
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
    """SM clock and throttle reasons of one GPU; silent where NVML is absent."""

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

    def sample(self) -> dict[str, Any] | None:
        """sm_mhz, reasons (bit mask) and throttled; None where the GPU does not say."""
        if self.handle is None:
            return None
        import pynvml

        try:
            mhz = pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM)
            reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        except pynvml.NVMLError:
            return None
        return {"sm_mhz": mhz, "reasons": reasons, "throttled": bool(reasons & self.THROTTLED)}
