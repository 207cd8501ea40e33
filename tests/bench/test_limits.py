"""Floor table, roofline and bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from opkiln_bench.limits import ceiling, find_profile, limits_of

PROFILE = find_profile("NVIDIA H200")
assert PROFILE is not None
LIMITS = limits_of(PROFILE)
assert LIMITS is not None
MIB = 1 << 20


@pytest.mark.parametrize("read_index", range(len(PROFILE["floor"]["read_bytes"])))
def test_floor_is_the_table_at_its_points(read_index: int) -> None:
    floor = PROFILE["floor"]
    for write_index, write in enumerate(floor["write_bytes"]):
        found = LIMITS.floor_us(floor["read_bytes"][read_index], write)
        assert found == pytest.approx(floor["us"][read_index][write_index], rel=1e-6)


def test_floor_between_and_beyond_the_points() -> None:
    assert LIMITS.floor_us(16 * MIB, 16 * MIB) < LIMITS.floor_us(24 * MIB, 24 * MIB)
    assert LIMITS.floor_us(24 * MIB, 24 * MIB) < LIMITS.floor_us(32 * MIB, 32 * MIB)
    double = LIMITS.floor_us(4096 * MIB, 0) / LIMITS.floor_us(2048 * MIB, 0)
    assert double == pytest.approx(2.0)


def test_between_points_reads_and_writes_add_up() -> None:
    """A device of 1 byte a ps either way: its floor is the sum of bytes, whatever the spacing."""
    axis = [0, 4 * MIB, 64 * MIB]
    us = [[1.0 + (read + write) * 1e-6 for write in axis] for read in axis]
    limits = replace(LIMITS, floor={"read_bytes": axis, "write_bytes": axis, "us": us})
    for read, write in ((MIB, 0), (16 * MIB, 16 * MIB), (5 * MIB, 60 * MIB)):
        assert limits.floor_us(read, write) == pytest.approx(1.0 + (read + write) * 1e-6)


def test_reads_cost_less_than_copies_of_the_same_sum() -> None:
    assert LIMITS.floor_us(512 * MIB, 512 * MIB) > LIMITS.floor_us(512 * MIB, 0)


def test_a_rate_above_the_table_would_break_sol() -> None:
    floor = PROFILE["floor"]
    rates = [
        (r + w) / (floor["us"][i][j] * 1e3)
        for i, r in enumerate(floor["read_bytes"])
        for j, w in enumerate(floor["write_bytes"])
    ]
    assert max(rates) == pytest.approx(LIMITS.bandwidth_gbps, rel=1e-3)


@pytest.mark.parametrize(
    ("cost", "peak", "dtype", "bound"),
    [
        ((0, 64 * MIB, 64 * MIB), "vector", "bf16", "mem"),
        ((4096, 8192, 8192), "vector", "bf16", "lat"),
        ((2 * 10**11, MIB, MIB), "tensor", "bf16", "comp"),
        ((10**11, MIB, MIB), "vector", "f32", "comp"),
    ],
    ids=["memory", "latency", "tensor", "vector"],
)
def test_bound(cost: tuple[int, int, int], peak: str, dtype: str, bound: str) -> None:
    named = dict(zip(("flops", "bytes_read", "bytes_written"), cost, strict=True))
    assert ceiling(LIMITS, named, peak, dtype).bound == bound


def test_arithmetic_uses_the_rate_of_the_unit() -> None:
    rates = LIMITS.peaks_tflops
    for peak, dtype, rate in (
        ("tensor", "f16", rates["tensor_f16"]),
        ("tensor", "f32", rates["vector_f32"]),
        ("vector", "c128", rates["vector_f64"]),
    ):
        assert LIMITS.arithmetic_us(10**12, peak, dtype) == pytest.approx(1e6 / rate)
    assert len(set(rates.values())) == len(rates) == 3


def test_an_unknown_gpu_has_no_limits() -> None:
    assert find_profile("NVIDIA B300") is None
    assert limits_of({"kind": "cpu", "bandwidth_gbps": None}) is None


def test_the_users_profile_precedes_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "opkiln" / "device"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(yaml.safe_dump({**PROFILE, "bandwidth_gbps": 1.0}))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert find_profile("NVIDIA H200")["bandwidth_gbps"] == 1.0
