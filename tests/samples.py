"""One or more small calls of every public function, for tests that go through all of them.

`SAMPLES[name]` -> Sample: `build(dtype)` returns (args, kwargs) of `opkiln.functional.<function>`.
Inputs are drawn with distinct values, so that no maximum is tied and every gradient exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import opkiln.functional as F
import torch
from opkiln import road


@dataclass(frozen=True)
class Sample:
    function: str
    build: Callable[[torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]]

    def bound(self, dtype: torch.dtype) -> road.Bound:
        """The canonical call."""
        args, kwargs = self.build(dtype)
        try:
            with road.capturing():
                getattr(F, self.function)(*args, **kwargs)
        except road.Captured as found:
            return found.bound
        raise AssertionError(f"{self.function} did not reach road.run")


def rand(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def distinct(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A shuffled ramp: no two elements are equal or close."""
    n = math.prod(shape)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    return ((order.double() - n / 2) / 8).view(shape).to(dtype)


def complex_of(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


CU = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
IDS = torch.tensor([0, 7, 3, 100], dtype=torch.int64)


def norm_samples() -> dict[str, Sample]:
    def rows(d: torch.dtype) -> tuple[Any, ...]:
        return rand(d, 3, 5, 12), (12,), rand(d, 12, seed=1)

    def stats(d: torch.dtype) -> tuple[Any, ...]:
        return torch.zeros(6, dtype=d), torch.ones(6, dtype=d)

    def affine(d: torch.dtype, n: int) -> tuple[Any, ...]:
        return rand(d, n, seed=2), rand(d, n, seed=3)

    def x(d: torch.dtype) -> torch.Tensor:
        return rand(d, 4, 6, 5, 3)

    def fused(d: torch.dtype) -> tuple[Any, ...]:
        return rand(d, 4, 12), rand(d, 4, 12, seed=5), (12,), rand(d, 12, seed=6)

    def ada(d: torch.dtype, n: int) -> tuple[Any, ...]:
        return rand(d, 2, 5, 12), *[rand(d, 2, 1, 12, seed=i) for i in range(1, n)]

    return {
        "layer_norm": Sample("layer_norm", lambda d: ((*rows(d), rand(d, 12, seed=4)), {})),
        "rms_norm": Sample("rms_norm", lambda d: (rows(d), {"eps": 1e-6})),
        "fused_add_layer_norm": Sample(
            "fused_add_layer_norm", lambda d: ((*fused(d), rand(d, 12, seed=7)), {})
        ),
        "fused_add_rms_norm": Sample("fused_add_rms_norm", lambda d: (fused(d), {})),
        "ada_layer_norm": Sample("ada_layer_norm", lambda d: (ada(d, 3), {"scale_offset": 1.0})),
        "ada_layer_norm_zero": Sample("ada_layer_norm_zero", lambda d: (ada(d, 4), {})),
        "batch_norm-train": Sample(
            "batch_norm", lambda d: ((x(d), *stats(d), *affine(d, 6)), {"training": True})
        ),
        "batch_norm-eval": Sample("batch_norm", lambda d: ((x(d), *stats(d), *affine(d, 6)), {})),
        "batch_norm_backward": Sample(
            "batch_norm_backward",
            lambda d: (
                (rand(d, 4, 6, 5), rand(d, 4, 6, 5, seed=8), *affine(d, 6), stats(d)[1]),
                {},
            ),
        ),
        "group_norm": Sample("group_norm", lambda d: ((x(d), 3, *affine(d, 6)), {})),
        "instance_norm": Sample("instance_norm", lambda d: ((x(d), None, None, *affine(d, 6)), {})),
    }


def conv_samples() -> dict[str, Sample]:
    found = {}
    for n in (1, 2, 3):
        size = (7, 6, 5)[:n]
        kwargs = {"padding": 1, "stride": 2, "groups": 2}
        found[f"conv{n}d"] = Sample(
            f"conv{n}d",
            lambda d, size=size, n=n, kwargs=kwargs: (
                (rand(d, 2, 4, *size), rand(d, 6, 2, *(3,) * n), rand(d, 6)),
                kwargs,
            ),
        )
    found["conv2d-same"] = Sample(
        "conv2d", lambda d: ((rand(d, 1, 3, 5, 6), rand(d, 2, 3, 2, 3)), {"padding": "same"})
    )
    return found


def pool_samples() -> dict[str, Sample]:
    found = {}
    for n in (1, 2, 3):
        size = (9, 8, 7)[:n]
        found[f"avg_pool{n}d"] = Sample(
            f"avg_pool{n}d",
            lambda d, size=size: ((rand(d, 2, 3, *size), 3, 2, 1), {"ceil_mode": True}),
        )
        for indices in (False, True):
            found[f"max_pool{n}d" + "-indices" * indices] = Sample(
                f"max_pool{n}d",
                lambda d, size=size, indices=indices: (
                    (distinct(d, 2, 3, *size), 3, 2, 1),
                    {"ceil_mode": True, "return_indices": indices},
                ),
            )
    found["adaptive_avg_pool2d"] = Sample(
        "adaptive_avg_pool2d", lambda d: ((rand(d, 2, 3, 7, 8), (3, 5)), {})
    )
    for indices in (False, True):
        found["adaptive_max_pool2d" + "-indices" * indices] = Sample(
            "adaptive_max_pool2d",
            lambda d, indices=indices: (
                (distinct(d, 2, 3, 7, 8), (3, 5)),
                {"return_indices": indices},
            ),
        )
    found["mean_pooling-dense"] = Sample("mean_pooling", lambda d: ((rand(d, 2, 9, 2, 3), 4), {}))
    found["mean_pooling-varlen"] = Sample(
        "mean_pooling", lambda d: ((rand(d, 1, 9, 2, 3), 4, CU), {"num_chunks": 3})
    )
    return found


def rope_samples() -> dict[str, Sample]:
    def x(d: torch.dtype) -> torch.Tensor:
        return rand(d, 2, 5, 3, 8)

    found = {
        name: Sample(name, lambda d: ((x(d),), {"rotary_dim": 6, "offset": 2}))
        for name in ("rope_neox", "rope_non_neox", "rope_llama31", "rope_yarn")
    }
    factors = [1.0, 2.0, 3.0, 4.0]
    found["rope_longrope"] = Sample(
        "rope_longrope",
        lambda d: ((x(d),), {"rescale_factors": factors, "max_position_embeddings": 8192}),
    )
    found["rope_neox_position_ids"] = Sample(
        "rope_neox_position_ids", lambda d: ((rand(d, 4, 3, 8), IDS), {"max_position": 128})
    )
    return found


def misc_samples() -> dict[str, Sample]:
    def mhc_pre(d: torch.dtype) -> tuple[Any, ...]:
        n, c = 3, 4
        phi, b = rand(d, n * c, n * n + 2 * n), rand(d, n * n + 2 * n, seed=1)
        return phi, rand(d, 2, n * c), b, 0.7, -0.4, 1.3, 2

    def scores(d: torch.dtype) -> tuple[Any, ...]:
        starts = torch.tensor([[0, 3, 5]], dtype=torch.int32)
        ends = torch.tensor([[20, 12, 5]], dtype=torch.int32)
        return distinct(d, 1, 3, 20, 2), starts, ends, 6

    return {
        "fft": Sample("fft", lambda d: ((rand(complex_of(d), 3, 8),), {"norm": "ortho"})),
        "mhc_pre": Sample("mhc_pre", lambda d: (mhc_pre(d), {})),
        "mhc_pre-h_post": Sample("mhc_pre", lambda d: (mhc_pre(d), {"return_h_post": True})),
        "mhc_post": Sample(
            "mhc_post", lambda d: ((rand(d, 2, 4), rand(d, 2, 3), rand(d, 2, 12)), {})
        ),
        "topk_selector": Sample("topk_selector", lambda d: (scores(d), {})),
    }


SAMPLES: dict[str, Sample] = {
    **norm_samples(),
    **conv_samples(),
    **pool_samples(),
    **rope_samples(),
    **misc_samples(),
}
