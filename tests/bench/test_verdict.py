"""Ratio, interval, noise and verdict."""

from __future__ import annotations

import random

import pytest
from opkiln_bench.verdict import compare_ours, median_us, ratio_interval, spread


def around(center: float, relative: float, seed: int, count: int = 20) -> list[float]:
    rng = random.Random(seed)
    return [center * (1 + rng.uniform(-relative, relative)) for _ in range(count)]


@pytest.mark.parametrize(
    ("alternative", "verdict"),
    [(13.0, "ahead"), (10.3, "ahead"), (10.0, "level"), (9.95, "level"), (9.5, "behind")],
)
def test_verdict(alternative: float, verdict: str) -> None:
    ours = around(10.0, 0.004, 1), around(10.0, 0.004, 2)
    found = compare_ours(*ours, around(alternative, 0.004, 3, 40))
    assert found.verdict == verdict
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(alternative / 10.0, rel=0.005)


def test_noise_of_ours_against_ours_shields_from_behind() -> None:
    alternative = around(9.7, 0.001, 3, 40)
    steady = compare_ours(around(10.0, 0.001, 1), around(10.0, 0.001, 2), alternative)
    drifting = compare_ours(around(9.75, 0.001, 1), around(10.25, 0.001, 2), alternative)
    assert steady.verdict == "behind"
    assert drifting.noise == pytest.approx(0.05, abs=0.003)
    assert drifting.verdict == "level"


def test_noise_is_at_least_one_percent() -> None:
    assert compare_ours([10.0] * 20, [10.0] * 20, [10.0] * 20).noise == 0.01


def test_interval_covers_the_truth_and_repeats() -> None:
    a, b = around(12.0, 0.05, 5, 40), around(10.0, 0.05, 6, 40)
    low, high = ratio_interval(a, b)
    assert low < 1.2 < high
    assert high - low < 0.1
    assert (low, high) == ratio_interval(a, b)


def test_samples_without_variance_have_a_point() -> None:
    assert ratio_interval([3.0] * 20, [2.0] * 20) == (1.5, 1.5)


def test_median_and_spread() -> None:
    assert median_us([1.0, 9.0, 2.0]) == 2.0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)
