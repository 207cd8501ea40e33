"""Synthetic records: a row as the sweep writes it, with chosen times."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from measured_calls import call_of
from opkiln.measured import bucket_of
from opkiln_bench.records import Recorder, Run, read_run

DEVICE = Path(__file__).parent / "device.yaml"


def jitter(center_us: float, seed: int, count: int = 20) -> list[float]:
    """Times around a center, within half a percent."""
    rng = random.Random(seed)
    return [round(center_us * (1 + rng.uniform(-0.005, 0.005)), 4) for _ in range(count)]


def timed(center_us: float, seed: int) -> dict[str, Any]:
    return {
        "status": "ok",
        "reason": "",
        "version": "1",
        "error_ratio": 0.6,
        "first_call_ms": 1.5,
        "forward_us": jitter(center_us, seed),
        "reversed_us": jitter(center_us, seed + 1),
        "kernels": 1,
        "host_us": 5.0,
        "peak_bytes": 2_000_000,
    }


@pytest.fixture
def make_row() -> Callable[..., dict[str, Any]]:
    """A row's record. times_us: backend -> center; a string instead of a time is a failure."""

    def build(
        label: str = "llama-8b-prefill",
        dtype: str = "bf16",
        op: str = "RMSNormFwd",
        family: str = "normalization",
        times_us: dict[str, Any] | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        times_us = times_us or {"opkiln": 10.8, "torch": 65.0, "torch-compile": 13.1}
        backends = {
            name: timed(t, 17 * i) if isinstance(t, float) else {"status": "failed", "reason": t}
            for i, (name, t) in enumerate(times_us.items())
        }
        tensors = {
            "input": {"shape": [2048, 4096], "dtype": dtype, "dims": "*B, *normalized_shape"},
            "weight": {"shape": [4096], "dtype": dtype, "dims": "*normalized_shape"},
        }
        row = {
            "op": op,
            "name": "rms_norm",
            "label": label,
            "dtype": dtype,
            "family": family,
            "pages": {"all": label, "norm": label},
            "model": None,
            "note": None,
            "peak": "vector",
            "tensors": {n: {**t, "fixed_dtype": False} for n, t in tensors.items()},
            "args": {"normalized_shape": [4096], "eps": 1e-6},
            "shown_args": {"eps": 1e-6},
            "cost": {"flops": 33554432, "bytes_read": 16785408, "bytes_written": 16777216},
            "timer": {"name": "cupti", "title": "GPU device time"},
            "gpu": "NVIDIA H200",
            "clocks": {"sm_mhz": 1980, "reasons": 0, "throttled": False},
            "date": "2026-11-30T12:00:00Z",
            "commit": "abc",
            "backends": backends,
        }
        return {**row, **changes}

    return build


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """A record on disk, read back."""

    def build(
        name: str, rows: list[dict[str, Any]], known_device: bool = True, **changes: Any
    ) -> Run:
        device = yaml.safe_load(DEVICE.read_text()) if known_device else {"kind": "cpu"}
        recorder = Recorder(tmp_path / name)
        header = {
            "schema_version": 1,
            "date": "2026-11-30T12:00:00Z",
            "commit": "abc",
            "timer": "cupti",
            "environment": {
                "device": "NVIDIA H200",
                "driver": "580",
                "torch": "2.11.0",
                "python": "3.12.3",
                "versions": {"opkiln": "0.1.0"},
            },
            "config": {
                "device": device,
                "timer": {
                    "min_samples": 20,
                    "max_samples": 60,
                    "warmup_calls": 3,
                    "l2_flush_factor": 2.0,
                },
            },
        }
        recorder.write("header", {**header, **changes})
        for row in rows:
            recorder.write("row", row)
        return read_run(tmp_path / name)

    return build


@pytest.fixture
def rows(make_row: Callable[..., Any]) -> list[dict[str, Any]]:
    """Of rms_norm: with both contestants, with one, and of a record without buckets."""

    def row(label: str, bucket: Any, **changes: Any) -> dict[str, Any]:
        return make_row(label, bucket={"kind": bucket.kind, "sizes": list(bucket.sizes)}, **changes)

    return [
        row("a", bucket_of(call_of())),
        row("b", bucket_of(call_of(rows=1)), times_us={"opkiln": "refused", "torch": 3.0}),
        row("c", bucket_of(call_of(rows=2)), times_us={"opkiln": "refused", "liger": 3.0}),
        make_row("old"),
    ]
