"""csrc/topk.cu itself, run on the CPU, against the stable sort: every input that could fool it."""

import math

import pytest
import torch
from misc.on_cpu import conformance, needs_compiler
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_misc import topk
from opkiln_misc.topk import Tiling

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]
KV = 20000  # several times what is collected, so that the bound is guessed
SMALL = Tiling(threads=128, blocks=1, unroll=4, ring=3)


@pytest.mark.parametrize("case", conformance("topk_selector", torch.float32))
def test_conformance(case, monkeypatch):
    monkeypatch.setattr(topk, "rule", lambda capacity: SMALL)
    assert case.run() == ""


def with_values(**places: float) -> torch.Tensor:
    """Normal scores with special ones from a position on: first=(value, start, stop, step)."""
    x = torch.randn(KV)
    for value, start, stop, step in places.values():
        x[start:stop:step] = value
    return x


def shifted_at_the_sample() -> torch.Tensor:
    """Large only where the sample looks: the guessed bound is too high."""
    x = torch.randn(KV)
    for i in range(16):
        start = (KV - 256) * i // 15
        x[start : start + 256] += 100
    return x


INPUTS = {
    "normal": lambda: torch.randn(KV),
    "uniform": lambda: torch.rand(KV),
    "three-values": lambda: torch.randint(0, 3, (KV,)).float(),
    "constant": lambda: torch.full((KV,), 2.5),
    "all-minus-inf": lambda: torch.full((KV,), -math.inf),
    "all-nan": lambda: torch.full((KV,), math.nan),
    "ascending": lambda: torch.arange(KV).float(),
    "descending": lambda: -torch.arange(KV).float(),
    "third-nan": lambda: with_values(a=(math.nan, 0, KV, 3)),
    "inf-and-nan": lambda: with_values(a=(math.inf, 5, 900, 1), b=(math.nan, 9000, 9005, 1)),
    "negative-nan": lambda: with_values(a=(-math.nan, 7, 70, 1)),
    "signed-zeros": lambda: with_values(a=(0.0, 0, KV, 2), b=(-0.0, 1, KV, 2)),
    "sample-lies": shifted_at_the_sample,
    "denormal": lambda: torch.randn(KV) * 1e-42,
}


def check(
    scores: torch.Tensor, starts, ends, k: int, ordered: bool = False, tiling: Tiling = SMALL,
    vector: int = 4,
) -> None:  # fmt: skip
    """vector: scores that are loaded at once."""
    starts, ends = torch.as_tensor(starts), torch.as_tensor(ends)
    call = Call.of(
        CATALOGUE["topk_selector"], [scores, starts, ends], {"topk": k},
        Policy(deterministic=ordered),
    )  # fmt: skip
    assert topk.plan_for(call).macros["VECTOR"] == vector
    got = topk.prepare(call, tiling)(scores, starts, ends)
    want = call.spec.reference(scores, starts, ends, k)
    if not ordered:
        last = torch.iinfo(torch.int32).max
        got = got.masked_fill(got == -1, last).sort(-1).values
        got = got.masked_fill(got == last, -1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("k", [1, 1000, 2048])
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_exact(make, k):
    torch.manual_seed(0)
    check(make().view(1, 1, KV, 1), [[0]], [[KV]], k)


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_ordered(make):
    torch.manual_seed(0)
    check(make().view(1, 1, KV, 1), [[0]], [[KV]], 300, ordered=True)


NO_SECOND_PASS = ("stream_exactly(c, row.scores, row.stride, row.start, row.end, topk);", "")


def test_the_guess_serves_what_it_is_made_for(monkeypatch):
    """A usual row needs no second pass, one that fools the sample does."""
    text = topk.source("topk")
    assert text.count(NO_SECOND_PASS[0]) == 1
    monkeypatch.setattr(topk, "source", lambda name: text.replace(*NO_SECOND_PASS))
    torch.manual_seed(0)
    for make in (INPUTS["normal"], INPUTS["uniform"]):
        check(make().view(1, 1, KV, 1), [[0]], [[KV]], 1000)
    with pytest.raises(AssertionError):
        check(shifted_at_the_sample().view(1, 1, KV, 1), [[0]], [[KV]], 2048)


TILINGS = {
    "rule": topk.rule(topk.LEAST_CAPACITY),
    "long-rounds": Tiling(threads=128, blocks=1, unroll=8, ring=2),
    "many-rounds": Tiling(threads=256, blocks=1, unroll=1, ring=7),
}


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
@pytest.mark.parametrize("k", [7, 1024])
def test_windows(k, tiling):
    """Odd ends, clamped ends, one element more than k, exactly k, fewer, none."""
    scores = torch.randn(1, 7, KV, 1)
    starts = [[3, 4001, -7, 0, 11, 500, 9]]
    ends = [[KV - 3, 4002 + k, 10**12, k, 11 + k // 2, 500, 2]]
    check(scores, torch.tensor(starts), torch.tensor(ends), k, tiling=tiling)


@pytest.mark.parametrize("layout", ["groups", "offset", "reversed-rows", "column-stride"])
def test_layouts(layout):
    scores = {
        "groups": lambda: torch.randn(1, 2, 9000, 2),
        "offset": lambda: torch.randn(1, 2, KV + 1, 1)[:, :, 1:],
        "reversed-rows": lambda: torch.randn(2, 3, KV, 1).transpose(0, 1),
        "column-stride": lambda: torch.randn(1, 2, KV, 3)[..., 1:2],
    }[layout]()
    rows = scores.shape[:2]
    starts = torch.zeros(rows, dtype=torch.int32)
    vector = 4 if layout == "reversed-rows" else 1
    check(scores, starts, torch.full(rows, scores.shape[2]), 500, vector=vector)


def test_largest_topk():
    tiling = topk.rule(topk.capacity_of(topk.MAX_TOPK))
    check(torch.randn(1, 1, 40000, 1), [[0]], [[40000]], topk.MAX_TOPK, tiling=tiling)
    with pytest.raises(ValueError, match="8192"):
        check(torch.randn(1, 1, 9, 1), [[0]], [[9]], topk.MAX_TOPK + 1)


@pytest.mark.parametrize("k", [1, 1024, 2048, 2049, 8192])
def test_the_kept_and_a_chunk_fit(k):
    capacity = topk.capacity_of(k)
    tiling = topk.rule(capacity)
    assert 2 * k <= capacity
    assert capacity % (2 * tiling.threads) == 0
    assert tiling.blocks * (topk.shared_bytes(capacity, tiling, 4) + 1024) <= 228 << 10
