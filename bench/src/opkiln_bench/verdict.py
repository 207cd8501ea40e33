"""From samples to a verdict: who is faster, by how much, and whether that is more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

MIN_NOISE = 0.01
RESAMPLES = 2000
SEED = 20261130  # the same record always gives the same interval


def median_us(samples: Sequence[float]) -> float:
    return float(np.median(samples))


def spread(samples: Sequence[float]) -> float:
    """Interquartile range over the median."""
    low, mid, high = np.percentile(samples, [25, 50, 75])
    return float((high - low) / mid)


@dataclass(frozen=True)
class Ratio:
    """alternative / ours with its 95 % interval, and what it means."""

    value: float
    low: float
    high: float
    noise: float

    @property
    def verdict(self) -> str:
        """ahead, level or behind."""
        if self.low > 1.0:
            return "ahead"
        return "behind" if self.high < 1.0 - self.noise else "level"


def ratio_interval(alternative: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the ratio of medians, by resampling both sides."""

    def ratio(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    if (
        np.ptp(alternative) == 0 and np.ptp(ours) == 0
    ):  # the timer's resolution: nothing to resample
        point = median_us(alternative) / median_us(ours)
        return point, point
    found = bootstrap(
        (np.asarray(alternative), np.asarray(ours)),
        ratio,
        n_resamples=RESAMPLES,
        vectorized=True,
        method="percentile",
        random_state=np.random.default_rng(SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def a_a_noise(forward: Sequence[float], backward: Sequence[float]) -> float:
    """How far the same code is from itself: forward rounds against reversed ones, at least 1 %."""
    return max(MIN_NOISE, abs(median_us(forward) / median_us(backward) - 1.0))


def compare_ours(
    ours_forward: Sequence[float], ours_reversed: Sequence[float], alternative: Sequence[float]
) -> Ratio:
    """The ratio of a row. Its A/A noise: ours in forward rounds against ours in reversed ones."""
    ours = [*ours_forward, *ours_reversed]
    low, high = ratio_interval(alternative, ours)
    value = median_us(alternative) / median_us(ours)
    return Ratio(value, low, high, a_a_noise(ours_forward, ours_reversed))
