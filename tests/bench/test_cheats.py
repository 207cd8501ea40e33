"""Known cheats do not get a time: a result kept from an earlier call, one that beats the roofline.

Work on another stream: test_intervals.py. The conformance kit's own: tests/conformance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import opkiln
import pytest
import torch
import yaml
from bench.conftest import DEVICE
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY, Implementation, accepts_everything
from opkiln_bench import cheats
from opkiln_bench.catalogue import Row, load_rows
from opkiln_bench.limits import Limits, limits_of
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.sweep import Sweep
from opkiln_bench.timing.wall import WallTimer

CPU = torch.device("cpu")
ROWS = {r.key: r for r in load_rows(["opkiln_bench.conf"], mode="all")}
RMS = ROWS["RMSNormFwd", "llama-8b-decode", "bf16"]
TOPK = ROWS["TopkSelectorFwd", "topk1024-s32k-kv64k", "f32"]
CONV = ROWS["Conv2dFwd", "classifier-1x1", "f16"]
SETTINGS = TimerSettings(min_samples=2, max_samples=2, host_calls=1)


class Keeper:
    """A backend that returns copies of its first result."""

    OPKILN_API = 1

    def prepare(self, call: Any) -> Any:
        right = REGISTRY.of(call.spec.name)["torch-ref"].loader()(call)
        kept: list[torch.Tensor] = []

        def launch(*tensors: Any) -> Any:
            if not kept:
                kept.append(right(*tensors))
            return kept[0].clone()

        return launch

    @opkiln.hookimpl
    def opkiln_implementations(self) -> list[Implementation]:
        version = CATALOGUE["rms_norm"].version
        return [
            Implementation(
                "rms_norm", "keeper", "0", version, accepts_everything, lambda: self.prepare
            )
        ]


def measured(row: Row, backends: list[str], limits: Limits | None = None) -> dict[str, Any]:
    sweep = Sweep(CPU, WallTimer(SETTINGS), SETTINGS, backends, "test", limits)
    return sweep.measure(row)["backends"]


def test_a_result_of_an_earlier_call_is_wrong_and_has_no_time() -> None:
    with REGISTRY.temporarily(Keeper(), "test:keeper"):
        found = measured(RMS, ["keeper", "torch"])
    assert found["keeper"]["status"] == "wrong"
    assert "the result of an earlier call" in found["keeper"]["reason"]
    assert "forward_us" not in found["keeper"]
    assert found["torch"]["status"] == "ok"


@pytest.mark.parametrize("row", [r for r in ROWS.values() if r.input_bytes < 4e5], ids=str)
def test_no_sound_result_is_taken_for_an_earlier_one(row: Row) -> None:
    found = measured(row, ["torch-ref"])
    assert found["torch-ref"]["status"] == "ok", found["torch-ref"]


@pytest.fixture
def limits() -> Limits:
    found = limits_of(yaml.safe_load(Path(DEVICE).read_text()))
    assert found is not None
    return found


def cost(flops: int = 0, read: int = 0, written: int = 0) -> dict[str, int]:
    return {"flops": flops, "bytes_read": read, "bytes_written": written}


def test_nothing_beats_the_roofline(limits: Limits) -> None:
    least_us = limits.memory_us(2 * 10**8)
    moved = cost(0, 10**8, 10**8)
    assert cheats.too_fast(RMS, moved, least_us, limits) is None
    reason = cheats.too_fast(RMS, moved, 0.9 * least_us, limits)
    assert reason is not None and reason.startswith("faster than the roofline: ")
    flops = cost(10**9)
    least_us = limits.arithmetic_us(10**9, CONV.peak, CONV.dtype)
    assert cheats.too_fast(CONV, flops, 0.3 * least_us, limits) is None  # Winograd can
    assert cheats.too_fast(CONV, flops, 0.2 * least_us, limits) is not None
    assert cheats.too_fast(RMS, flops, 0.3 * limits.arithmetic_us(10**9, "vector", "bf16"), limits)


def test_a_search_in_a_part_may_read_less(limits: Limits) -> None:
    moved = cost(0, 10**8, 0)
    assert cheats.too_fast(TOPK, moved, 1.0, limits) is not None
    part = replace(TOPK.tensors["starts"], fill=5)
    row = replace(TOPK, tensors=TOPK.tensors | {"starts": part})
    assert cheats.too_fast(row, moved, 1.0, limits) is None


def test_a_time_below_the_roofline_is_no_time() -> None:
    slow = Limits(1e-3, {"vector_f32": 1e-9, "tensor_f16": 1e-9, "vector_f64": 1e-9}, {})
    found = measured(RMS, ["torch"], slow)
    assert found["torch"]["status"] == "failed"
    assert found["torch"]["reason"].startswith("faster than the roofline")
    assert "forward_us" not in found["torch"]
