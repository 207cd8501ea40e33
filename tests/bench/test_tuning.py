"""Autotuners of peers: once a candidate in the processes that compile ahead, briefly when timed."""

from __future__ import annotations

from typing import Any

import pytest
import triton.testing
from opkiln_bench.tuning import MEASURE_MS, WARMUP_MS, measure_briefly, only_compile


def test_compiling_ahead_calls_a_candidate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.testing, "do_bench", None)
    only_compile()
    calls: list[int] = []
    found = triton.testing.do_bench(lambda: calls.append(1), quantiles=(0.5, 0.2, 0.8))
    assert (len(calls), len(found)) == (1, 3)
    assert isinstance(triton.testing.do_bench(lambda: calls.append(1), warmup=25, rep=100), float)


def test_a_candidate_is_measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float, dict[str, Any]]] = []

    def do_bench(fn: Any, warmup: float, rep: float, **options: Any) -> float:
        asked.append((warmup, rep, options))
        return 1.0

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    measure_briefly()
    triton.testing.do_bench(print, warmup=25, rep=100, quantiles=[0.5])
    triton.testing.do_bench(print, warmup=1, rep=2)
    assert asked == [(WARMUP_MS, MEASURE_MS, {"quantiles": [0.5]}), (1, 2, {})]
