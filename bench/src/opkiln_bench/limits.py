"""What the device can do at best: floor, speed of light, and which of its limits binds a row."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.interpolate import RegularGridInterpolator

LATENCY_SHARE = 0.5  # a row whose roofline time is less than this part of its floor waits


@dataclass(frozen=True)
class Limits:
    """A device's limits, as its profile (conf/device/<name>.yaml) states them.

    floor: read_bytes, write_bytes (ascending axes from 0) and us, the time of a streaming kernel
    that reads and writes as much, L2 cold. peaks_tflops: by unit and dtype: tensor_f16, vector_f32.
    """

    bandwidth_gbps: float
    peaks_tflops: Mapping[str, float]
    floor: Mapping[str, Any]

    def floor_us(self, bytes_read: int, bytes_written: int) -> float:
        """Streaming kernel's time: linear between the table's points, beyond it by proportion.

        Not in logarithms: reads and writes add up, and 1 GB each way came out 10 % too slow.
        """
        axes = [np.asarray(self.floor[k], dtype=float) for k in ("read_bytes", "write_bytes")]
        point = np.array([bytes_read, bytes_written], dtype=float)
        scale = max(1.0, point[0] / axes[0][-1], point[1] / axes[1][-1])
        table = RegularGridInterpolator(axes, np.asarray(self.floor["us"], dtype=float))
        return float(table(point / scale)[0] * scale)

    def arithmetic_us(self, flops: int, peak: str, dtype: str) -> float:
        return flops / (self.peaks_tflops[peak_key(peak, dtype)] * 1e6)

    def memory_us(self, nbytes: int) -> float:
        return nbytes / (self.bandwidth_gbps * 1e3)


def peak_key(peak: str, dtype: str) -> str:
    """The calibrated rate of a unit: half types share the tensor rate, other arithmetic is f32."""
    if dtype in ("f64", "c128"):
        return "vector_f64"
    return "tensor_f16" if peak == "tensor" and dtype in ("f16", "bf16") else "vector_f32"


@dataclass(frozen=True)
class Ceiling:
    """Floor, roofline time and binding limit of a row: mem, comp or lat."""

    floor_us: float
    roofline_us: float
    bound: str


def ceiling(limits: Limits, cost: Mapping[str, int], peak: str, dtype: str) -> Ceiling:
    """cost: flops, bytes_read, bytes_written."""
    read, written = cost["bytes_read"], cost["bytes_written"]
    arithmetic = limits.arithmetic_us(cost["flops"], peak, dtype)
    memory = limits.memory_us(read + written)
    streaming = limits.floor_us(read, written)
    roofline = max(arithmetic, memory)
    if roofline < LATENCY_SHARE * streaming:
        bound = "lat"
    else:
        bound = "comp" if arithmetic > memory else "mem"
    return Ceiling(max(streaming, arithmetic), roofline, bound)


def user_profiles() -> Path:
    """Where `opkiln-bench calibrate` writes."""
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "opkiln" / "device"


def find_profile(gpu: str) -> dict[str, Any] | None:
    """The profile of a GPU: the user's own first, then the shipped ones."""
    own = user_profiles()
    texts = [p.read_text() for p in sorted(own.glob("*.yaml"))] if own.is_dir() else []
    shipped = files("opkiln_bench.conf") / "device"
    texts += [p.read_text() for p in shipped.iterdir() if p.name.endswith(".yaml")]
    for text in texts:
        profile = yaml.safe_load(text)
        if profile.get("gpu") == gpu:
            return dict(profile)
    return None


def limits_of(profile: Mapping[str, Any]) -> Limits | None:
    """The limits in a device configuration; None where it states none (an unknown device)."""
    if not profile.get("bandwidth_gbps"):
        return None
    return Limits(profile["bandwidth_gbps"], profile["peaks_tflops"], profile["floor"])
