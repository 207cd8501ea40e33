"""Rows of FFT, MHC and the top-k selector."""

from __future__ import annotations

from typing import Any

import torch

from opkiln.conformance.cases import ALL, BF16, F32, F64, Row, row
from opkiln.conformance.tensors import T, t

COMPLEX = torch.complex64

FFT = (
    row("n64", ALL, input=t(5, 64)),
    row("n1", ALL, input=t(4, 1)),
    row("n2", ALL, input=t(4, 2)),
    row("n8", ALL, input=t(3, 2, 8)),
    row("n1024", ALL, input=t(2, 1024)),
    row("n4096", (COMPLEX,), input=t(1, 4096)),
    row("n100", ALL, input=t(3, 100)),
    row("prime", (COMPLEX,), input=t(3, 97)),
    row("vector", (COMPLEX,), input=t(32)),
    row("cut", ALL, input=t(3, 40), n=32),
    row("zero_padded", ALL, input=t(3, 20), n=32),
    row("first_dim", ALL, input=t(16, 5), dim=0),
    row("middle_dim", (COMPLEX,), input=t(2, 8, 5), dim=1),
    row("ortho", ALL, input=t(3, 16), norm="ortho"),
    row("forward_norm", ALL, input=t(3, 16), norm="forward"),
    row("transposed", ALL, input=t(8, 32, layout="transposed"), upstream="transposed"),
    row("strided", ALL, input=t(3, 32, layout="strided"), upstream="strided"),
    row("padded", ALL, input=t(3, 32, layout="padded"), upstream="padded"),
    row("shifted", ALL, input=t(3, 32, layout="shifted")),
    row("expanded", ALL, input=t(3, 32, layout="expanded"), upstream="constant"),
    row("empty", ALL, input=t(0, 32)),
    row("large", (COMPLEX,), input=t(3, 64, fill="large")),
    row("zeros", (COMPLEX,), input=t(3, 64, fill="zeros")),
    # NaN in both parts: in one, a sum without products would leave the other finite.
    row("nan", ALL, input=t(3, 64, fill="one nan")),
)


def mhc_pre(
    label: str,
    dtypes: tuple[torch.dtype, ...] = ALL,
    batch: int = 3,
    n: int = 4,
    c: int = 24,
    fill: str = "normal",
    layout: str = "contiguous",
    repeat: int = 5,
    **options: Any,
) -> Row:
    """One row; phi is scaled so that the logits stay near 1."""
    return row(
        label,
        dtypes,
        phi=t(n * c, n * n + 2 * n, fill="small", wide=True),
        x=t(batch, n * c, fill=fill, layout=layout),
        b=t(n * n + 2 * n, fill="small", wide=True),
        alpha_pre=0.7,
        alpha_post=1.1,
        alpha_res=0.9,
        sinkhorn_repeat=repeat,
        **options,
    )


# Sinkhorn divides by sums near 1 `repeat` times, each adding a rounding error: condition 20.
MHC_PRE = (
    mhc_pre("odd", condition=20.0),
    mhc_pre("h_post", condition=20.0, return_h_post=True),
    mhc_pre("width1000", batch=2, c=250, condition=20.0),
    mhc_pre("one_expansion", n=1, condition=20.0),
    mhc_pre("two_expansions", n=2, c=33, condition=20.0),
    mhc_pre("no_iteration", repeat=0, condition=20.0),
    mhc_pre("twenty_iterations", repeat=20, condition=40.0),
    mhc_pre("eps", condition=20.0, sinkhorn_eps=0.25),
    mhc_pre("zero_token", fill="zeros", condition=20.0),
    mhc_pre("padded", layout="padded", condition=20.0),
    mhc_pre("transposed", layout="transposed", condition=20.0),
    mhc_pre("shifted", layout="shifted", condition=20.0),
    mhc_pre("strided", layout="strided", condition=20.0),
    mhc_pre("expanded", layout="expanded", condition=20.0),
    mhc_pre("large", fill="large", condition=20.0),
    mhc_pre("nan", fill="one nan", condition=20.0),
    mhc_pre("inf", fill="one inf", condition=20.0),
    mhc_pre("empty", batch=0),
)


def mhc_post(
    label: str,
    dtypes: tuple[torch.dtype, ...] = ALL,
    batch: int = 3,
    n: int = 4,
    c: int = 24,
    **how: str,
) -> Row:
    return row(
        label,
        dtypes,
        upstream=how.get("layout", "contiguous"),
        x_layer_out=t(batch, c, **how),
        h_post=t(batch, n, wide=True),
        x_res=t(batch, n * c, **how),
    )


MHC_POST = (
    mhc_post("odd"),
    mhc_post("width1000", c=1000),
    mhc_post("one_expansion", n=1, c=33),
    mhc_post("three_expansions", n=3, c=17),
    mhc_post("padded", layout="padded"),
    mhc_post("strided", layout="strided"),
    mhc_post("transposed", layout="transposed"),
    mhc_post("shifted", layout="shifted"),
    mhc_post("expanded", layout="expanded"),
    mhc_post("nan", fill="nan"),
    mhc_post("inf", fill="one inf"),
    mhc_post("large", (BF16, F32, F64), fill="large"),  # a product overflows float16
    mhc_post("empty", batch=0),
)


def topk(
    label: str,
    scores: T,
    k: int,
    starts: list[int],
    ends: list[int],
    dtypes: tuple[torch.dtype, ...] = (F32,),
) -> Row:
    batch, queries = scores.shape[:2]

    def bounds(values: list[int]) -> T:
        repeated = [values[i % len(values)] for i in range(batch * queries)]
        return T((batch, queries), dtype=torch.int32, values=repeated)

    return row(label, dtypes, scores=scores, starts=bounds(starts), ends=bounds(ends), topk=k)


TOPK = (
    topk("odd", t(2, 3, 45, 2), 7, [0, 3], [45, 40], ALL),
    topk("one_head", t(1, 4, 256, 1), 16, [0], [256]),
    topk("k1", t(1, 3, 33, 2), 1, [0], [33]),
    topk("all", t(1, 3, 12, 2), 12, [0], [12]),
    topk("more_than_there_are", t(1, 3, 12, 2), 20, [2], [9]),
    topk("empty_windows", t(1, 4, 32, 1), 8, [0, 0, 9, 0], [-1, 0, 3, 2]),
    topk("clamped", t(1, 3, 20, 1), 8, [-5, 0, 4], [99, 12, 21]),
    topk("exactly_k", t(1, 2, 96, 1), 64, [0, 32], [64, 96]),
    topk("ties", t(1, 4, 60, 2, fill="ties"), 9, [0, 5], [60, 55]),
    topk("zeros", t(1, 2, 300, 1, fill="zeros"), 50, [0, 7], [300]),
    topk("negative", t(1, 3, 64, 1, fill="negative"), 10, [0], [64]),
    topk("inf", t(1, 3, 120, 1, fill="inf"), 6, [0, 1], [120]),
    topk("nan", t(1, 3, 120, 1, fill="nan"), 6, [0, 1], [120]),
    topk("large", t(1, 3, 64, 1, fill="large"), 10, [0], [64]),
    topk("wide", t(1, 2, 5000, 1), 1000, [0, 11], [5000, 4990]),
    topk("transposed", t(1, 3, 20, 4, layout="transposed"), 5, [0], [20]),
    topk("strided", t(1, 3, 20, 4, layout="strided"), 5, [0], [20]),
    topk("padded", t(1, 3, 20, 4, layout="padded"), 5, [0], [20]),
    topk("shifted", t(1, 3, 20, 4, layout="shifted"), 5, [0], [20]),
    topk("expanded", t(2, 3, 20, 4, layout="expanded"), 5, [0, 3], [20]),
    topk("empty_batch", t(0, 3, 20, 4), 5, [0], [20]),
)

TABLES = {
    "fft": ("fft", FFT),
    "mhc_pre": ("mhc_pre", MHC_PRE),
    "mhc_post": ("mhc_post", MHC_POST),
    "topk_selector": ("topk_selector", TOPK),
}
