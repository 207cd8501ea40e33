"""mean_pooling against the spec's reference in float64, every layout and tiling of the kernel."""

from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool import mean_plan
from opkiln_pool.mean_plan import MeanPlan, MeanTiling, plan_for, rule
from opkiln_pool.mean_pooling import mean_kernel, prepare
from opkiln_pool.plugin import supports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# The interpreter truncates f32 to bf16 (one ulp) where the GPU rounds (half an ulp).
RTOL = {F16: 2**-11, BF16: 2**-7 if DEVICE == "cpu" else 2**-8, F32: 2**-21}


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def run(x: torch.Tensor, chunk_size: int, offsets: Any = None, room: int = 0) -> MeanPlan:
    """Launch, compare with float64, return the plan that ran."""
    spec = CATALOGUE["mean_pooling"]
    params: dict[str, Any] = {"chunk_size": chunk_size, "num_chunks": None}
    if offsets is not None:
        offsets = offsets.to(DEVICE)
        lengths = offsets.diff().tolist()
        params["num_chunks"] = sum(-(-n // chunk_size) for n in lengths) + room
    call = Call.of(spec, [x, offsets], params)
    assert supports(call) is None
    got = prepare(call)(x, offsets)
    want = spec.reference(x.double(), offsets, **params)
    meta = call.outputs[0]
    assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
    torch.testing.assert_close(got.double(), want, rtol=RTOL[x.dtype], atol=2**-20)
    return plan_for(call)


LAYOUTS = {  # id: (input, what the plan's constexprs must hold)
    "flat": (lambda: random(2, 9, 2, 16, dtype=F16), {"FLAT": True, "ALIGN": 8}),
    "bf16": (lambda: random(1, 9, 3, 5, dtype=BF16), {"FLAT": True, "ALIGN": 1}),
    "one-head": (lambda: random(2, 9, 1, 8), {"FLAT": True, "ALIGN": 4}),
    "one-column": (lambda: random(2, 9, 3, 1), {"FLAT": True}),
    "heads-before-tokens": (lambda: random(2, 2, 9, 8).transpose(1, 2), {"FLAT": False}),
    "column-slice": (lambda: random(2, 9, 2, 12)[..., 2:10], {"FLAT": False, "ALIGN": 1}),
    "strided-columns": (lambda: random(2, 9, 2, 16)[..., ::2], {"FLAT": False, "ALIGN": 1}),
    "expanded-batch": (lambda: random(1, 9, 2, 8).expand(3, 9, 2, 8), {"FLAT": True}),
    "no-tokens": (lambda: random(2, 0, 2, 8), {"FLAT": True}),
}


@pytest.mark.parametrize("chunk_size", [1, 4, 9, 100])
@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_dense(case, chunk_size):
    make, expected = case
    assert expected.items() <= run(make(), chunk_size).constexprs.items()


SEQUENCES = {  # id: (offsets, chunks beyond those needed)
    "one": ([0, 20], 0),
    "tails": ([0, 7, 9, 20], 0),
    "empty-ones": ([0, 0, 7, 7, 7, 20, 20], 0),
    "room": ([0, 13, 20], 3),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", SEQUENCES.values(), ids=SEQUENCES)
def test_sequences(case, dtype):
    values, room = case
    run(random(1, 20, 2, 8, dtype=F16), 4, torch.tensor(values, dtype=dtype), room)


def test_strided_offsets():
    run(random(1, 20, 1, 8), 6, torch.tensor([0, 99, 9, 99, 20, 99])[::2])


def test_more_sequences_than_a_program_looks_at_together(monkeypatch):
    monkeypatch.setattr(mean_plan, "MAX_SEQUENCES", 2)
    plan = run(random(1, 20, 1, 4), 3, torch.tensor([0, 4, 4, 11, 12, 20]))
    assert plan.constexprs["BLOCK_S"] == 2


@pytest.mark.parametrize("tiling", [MeanTiling(8, 1, 1), MeanTiling(64, 2, 16, 3, "evict_first")])
def test_tilings(tiling, monkeypatch):
    monkeypatch.setattr(mean_plan, "tuned", lambda call: tiling)
    plan = run(random(2, 19, 3, 8, dtype=F16), 7)
    assert plan.tiling == tiling


def test_the_table_serves_columns_that_lie_together(monkeypatch):
    row = {"op": "mean_pooling", "itemsize": 2, "columns": 24, "chunk_size": 7, "varlen": False}
    use = {"block_n": 16, "num_warps": 1, "step": 4, "stages": 2}
    monkeypatch.setattr(mean_plan, "tuning_rows", lambda: ({"op": "x"}, row | {"use": use}))
    assert run(random(2, 19, 3, 8, dtype=F16), 7).tiling == MeanTiling(**use)
    others = (
        (random(2, 19, 3, 8, dtype=F16), 6, True),
        (random(2, 3, 19, 8, dtype=F16).transpose(1, 2), 7, False),
        (random(2, 19, 3, 8), 7, True),
        (random(2, 19, 3, 9, dtype=F16)[..., :8], 7, False),
    )
    for x, chunk_size, whole in others:
        assert run(x, chunk_size).tiling == rule(x.dtype.itemsize, 24, chunk_size, whole)


def test_tokens_beyond_2_31_elements(monkeypatch):
    """Token 2 starts 2^31 elements in. The 4 GiB are reserved; only three tokens are touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    room = torch.empty(2**31 + 64, dtype=F16, device=DEVICE)
    x = room.as_strided((1, 3, 1, 8), (0, 2**30, 8, 1))
    x.copy_(random(1, 3, 1, 8))
    monkeypatch.undo()
    run(x, 2)


def test_constexprs_are_in_the_kernels_order():
    """They are passed by position."""
    params = {"chunk_size": 4, "num_chunks": None}
    call = Call.of(CATALOGUE["mean_pooling"], [random(1, 8, 2, 4), None], params)
    plan = plan_for(call)
    names = list(mean_kernel.arg_names)
    assert names[-len(plan.constexprs) :] == list(plan.constexprs)
    assert len(names) == 3 + len(plan.arguments)


def test_rule_gives_a_thread_one_vector():
    for itemsize, columns in ((2, 8192), (2, 64), (4, 100), (4, 1), (2, 1)):
        t = rule(itemsize, columns, 64, whole=True)
        assert t.num_warps in (1, 2, 4)
        assert t.block_n <= 32 * t.num_warps * (16 // itemsize)
