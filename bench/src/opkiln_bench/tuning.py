"""How long the autotuners of Triton peers measure a candidate, which is most of their first call.

They all end in `triton.testing.do_bench`: 25 ms of warm-up, 100 ms of calls. FlagGems has up to 40
candidates a row.
"""

from __future__ import annotations

from typing import Any

WARMUP_MS = 5
MEASURE_MS = 20


def measure_briefly() -> None:
    """From now on a candidate is measured for 20 ms in this process: 200 calls of 100 us."""
    import triton.testing

    measure = triton.testing.do_bench

    def do_bench(fn: Any, warmup: float = 25, rep: float = 100, **options: Any) -> Any:
        return measure(fn, min(warmup, WARMUP_MS), min(rep, MEASURE_MS), **options)

    triton.testing.do_bench = do_bench


def only_compile() -> None:
    """From now on a candidate is called once in this process: its code is in the cache then."""
    import triton.testing

    def do_bench(fn: Any, quantiles: Any = None, **options: Any) -> Any:
        fn()
        return [1.0] * len(quantiles) if quantiles else 1.0

    triton.testing.do_bench = do_bench
