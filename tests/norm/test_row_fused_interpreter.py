"""Fused-add and adaptive row norms against the spec's reference in float64, every branch.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from norm.row_cases import BF16, F16, F32, only_tiling, random, run
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_norm import row_plan
from opkiln_norm.row_norm import prepare
from opkiln_norm.row_plan import Tiling, plan_for

ADD = ("fused_add_rms_norm", "fused_add_layer_norm")
INPLACE = tuple(f"{op}_inplace" for op in ADD)
ADA = {"ada_layer_norm": 2, "ada_layer_norm_zero": 3}
ALL = pytest.mark.parametrize("op", [*ADD, *INPLACE, *ADA])
ADDING = pytest.mark.parametrize("op", [*ADD, *INPLACE])
ADAPTIVE = pytest.mark.parametrize("op", ADA)
RESIDENT_F32 = row_plan.RESIDENT_BYTES // 4


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def params_of(op: str, n: int) -> dict[str, Any]:
    if op in ADA:
        return {"eps": 1e-5, "scale_offset": 1.0}
    return {"normalized_shape": (n,), "eps": 1e-5}


def affine(op: str, n: int, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    """Weight, and bias where the op has one."""
    return [random(n, dtype=dtype) for _ in CATALOGUE[op].tensors[2:]]


def operands(op: str, rows: int, n: int, dtype: torch.dtype) -> list[Any]:
    x = random(rows, n, dtype=dtype)
    if op in ADA:
        return [x, *[random(rows, n, dtype=dtype) for _ in range(ADA[op])]]
    return [x, random(rows, n, dtype=dtype), *affine(op, n, dtype)]


RULE = {  # id: (rows, n, dtype, what the plan must be)
    "several-rows-a-warp": (3, 8, F32, {"block_m": 256, "chunks": 1, "even": True}),
    "warp-a-row-tail": (9, 300, F16, {"block_n": 256, "chunks": 2, "even": False}),
    "few-rows-bf16": (2, 520, BF16, {"block_m": 1, "block_n": 1024, "preload": True}),
    "many-rows-long": (3, 1100, F32, {"block_n": 512, "chunks": 3, "preload": False}),
    "head": (2, RESIDENT_F32 + 9, F32, {"head": True, "even": False, "chunks": 4}),
    "head-f16": (1, 2 * RESIDENT_F32 + 8, F16, {"head": True, "even": False}),
}


@ALL
@pytest.mark.parametrize("case", RULE.values(), ids=RULE)
def test_rule(op, case, monkeypatch):
    monkeypatch.setattr(row_plan, "FEW_ROWS", 2)
    rows, n, dtype, expected = case
    plan = run(op, operands(op, rows, n, dtype), params_of(op, n))
    assert expected.items() <= (dataclasses.asdict(plan.tiling) | {"even": plan.even}).items()
    assert plan.source == "rule"


@ALL
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rows_that_start_between_vectors(op, dtype, monkeypatch):
    monkeypatch.setattr(row_plan, "FEW_ROWS", 2)
    n = 525 if dtype == BF16 else 269
    plan = run(op, operands(op, 5, n, dtype), params_of(op, n))
    assert plan.shift == 16 // dtype.itemsize


def test_a_gate_of_one_row_is_not_shifted(monkeypatch):
    """Its rows do not start where those of the input do."""
    monkeypatch.setattr(row_plan, "FEW_ROWS", 2)
    tensors = operands("ada_layer_norm_zero", 5, 269, F32)
    tensors[3] = random(1, 269)
    plan = run("ada_layer_norm_zero", tensors, params_of("ada_layer_norm_zero", 269))
    assert plan.shift == 0


TABLE = {  # id: (itemsize, rows, n, tiling)
    "persistent": (4, 7, 40, Tiling(64, 1, block_m=2, programs_per_sm=2, stages=2)),
    "persistent-preload": (2, 5, 64, Tiling(64, 1, programs_per_sm=1, preload=True)),
    "chunks-streaming": (2, 3, 80, Tiling(32, 1, block_m=2, chunks=3, store_cache=".cs")),
    "even-rows-left-over": (4, 3, 64, Tiling(32, 1, block_m=2, chunks=2, preload=True)),
    "head-pipelined": (2, 2, 150, Tiling(32, 1, chunks=2, head=True, stages=3)),
    "head-even": (4, 2, 128, Tiling(32, 1, chunks=1, head=True, evict="evict_first")),
    "head-static": (4, 2, 128, Tiling(64, 1, chunks=0, head=True, static=True, forward=True)),
}


@ALL
@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_table(op, case, monkeypatch):
    itemsize, rows, n, tiling = case
    only_tiling(monkeypatch, op.removesuffix("_inplace"), itemsize, n, tiling)
    plan = run(op, operands(op, rows, n, F32 if itemsize == 4 else BF16), params_of(op, n))
    assert (plan.source, plan.tiling) == ("test", tiling)


@ADDING
@pytest.mark.parametrize("weight", [None, BF16, F32], ids=str)
def test_affine_absent_or_of_another_dtype(op, weight):
    w = [None if weight is None else random(48, dtype=weight) for _ in affine(op, 48)]
    tensors = [random(5, 48, dtype=F16), random(5, 48, dtype=F16), *w]
    run(op, tensors, params_of(op, 48), needs_grad=False)


@ADDING
def test_norm_reads_the_sum_before_rounding(op):
    """1 + 2^-11 is 1 in f16; the norm of such a row is not 0."""
    x = torch.ones(2, 32, dtype=F16)
    residual = x * 2.0**-11 * torch.arange(32, dtype=F16)
    tensors = [t.to(random(1).device) for t in (x, residual)]
    none = [None] * len(affine(op, 1))
    run(op, [*tensors, *none], params_of(op, 32) | {"eps": 1e-12}, rstd_rtol=1e-4, atol=2**-9)


def strided(*shape: int) -> torch.Tensor:
    """The last two dims transposed in memory."""
    return random(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


STRIDES = {  # id: (input, residual, inner sizes, column strides of both)
    "both-dense": (lambda: (random(2, 3, 16), random(2, 3, 16)), (), (None, None)),
    "one-row-slice": (lambda: (random(2, 3, 16), random(2, 6, 16)[:, 1:4]), (3,), (None, None)),
    "one-transposed": (lambda: (random(2, 3, 16), strided(2, 3, 16)), (3,), (None, 3)),
    "swapped-rows": (
        lambda: (random(3, 2, 16).transpose(0, 1), random(2, 3, 16)),
        (3,),
        (None, None),
    ),
}


@ADDING
@pytest.mark.parametrize("case", STRIDES.values(), ids=STRIDES)
def test_residual_has_strides_of_its_own(op, case):
    make, inner, columns = case
    plan = run(op, [*make(), *affine(op, 16)], params_of(op, 16))
    assert plan.inner_sizes == inner
    assert tuple(o.stride_n for o in plan.operands[:2]) == columns


@ADDING
def test_head_with_strides(op, monkeypatch):
    tiling = Tiling(32, 1, chunks=1, head=True)
    only_tiling(monkeypatch, op.removesuffix("_inplace"), 4, 150, tiling)
    plan = run(op, [random(4, 150)[::2], strided(2, 150), *affine(op, 150)], params_of(op, 150))
    assert plan.operands[1].stride_n == 2


BROADCAST = {  # id: (shape of scale, shift and gate beside an input [2, 3, 16], strides of scale)
    "per-token": ((2, 3, 16), (16,)),
    "per-sample": ((2, 1, 16), (16, 0)),
    "per-position": ((3, 16), (0, 16)),
    "one-row": ((16,), (0,)),
    "one-row-of-three-dims": ((1, 1, 16), (0,)),
    "per-sample-scalar": ((2, 1, 1), (1, 0)),
    "scalar": ((1,), (0,)),
}


@ADAPTIVE
@pytest.mark.parametrize("case", BROADCAST.values(), ids=BROADCAST)
def test_modulation_broadcasts_by_strides(op, case):
    shape, strides = case
    x = random(2, 3, 16, dtype=F16)
    plan = run(op, [x, *[random(*shape, dtype=F16) for _ in range(ADA[op])]], params_of(op, 16))
    scale = plan.operands[2]
    unit = plan.align if scale.stride_n is None else 1
    assert tuple(s * unit for s in scale.strides) == strides
    assert scale.stride_n == (0 if shape[-1] == 1 else None)


@ADAPTIVE
def test_each_modulation_broadcasts_by_itself(op):
    shapes = [(2, 1, 24), (24,), (2, 3, 1)][: ADA[op]]
    plan = run(op, [strided(2, 3, 24), *[random(*s) for s in shapes]], params_of(op, 24))
    assert plan.inner_sizes == (3,)


@ADAPTIVE
@pytest.mark.parametrize("preload", [False, True])
def test_rows_of_one_modulation_in_one_tile(op, preload, monkeypatch):
    """The tile's rows beyond the last one read no modulation."""
    only_tiling(monkeypatch, op, 4, 20, Tiling(32, 1, block_m=4, preload=preload))
    x = random(3, 2, 20)
    run(op, [x, *[random(3, 1, 20) for _ in range(ADA[op])]], params_of(op, 20))


@ADAPTIVE
@pytest.mark.parametrize("offset", [0.0, 1.0, -0.5])
def test_scale_offset(op, offset):
    run(op, operands(op, 3, 32, F32), {"eps": 1e-5, "scale_offset": offset})


@ALL
def test_nan_stays_in_its_row(op):
    tensors = operands(op, 4, 32, F16)
    tensors[0][1, 3] = math.nan
    spec = CATALOGUE[op]
    call = Call.of(spec, tensors, params_of(op, 32))
    y = prepare(call)(*tensors)
    y = tensors[0] if y == () else y[0] if isinstance(y, tuple) else y
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all()


@ALL
def test_no_rows(op):
    run(op, operands(op, 0, 16, F32), params_of(op, 16))


@ALL
def test_batch_invariant_rows(op):
    """One row alone has the bits that it has among many; without the policy the tiling differs."""
    many = operands(op, 130, 520, F16)

    def launch(tensors: list[Any], invariant: bool) -> tuple[torch.Tensor, Tiling]:
        copies = [t.clone() for t in tensors]
        policy = Policy(batch_invariant=invariant)
        call = Call.of(CATALOGUE[op], copies, params_of(op, 520), policy)
        y = prepare(call)(*copies)
        y = copies[0] if y == () else y[0] if isinstance(y, tuple) else y
        return y, plan_for(call).tiling

    one = [t[77:78] if t.ndim == 2 else t for t in many]
    y_many, tiling = launch(many, True)
    y_one, tiling_one = launch(one, True)
    assert torch.equal(y_many[77:78], y_one)
    assert tiling == tiling_one != launch(one, False)[1]


ALONE = {  # id: what makes many rows
    "odd-n": lambda: random(133, 77),
    "half-vector-n": lambda: random(133, 12, dtype=F16),
    "whole-vectors": lambda: random(133, 64, dtype=BF16),
    "odd-pitch": lambda: random(133, 65)[:, :64],
    "three-dims": lambda: random(7, 19, 24, dtype=F16),
}


@pytest.mark.parametrize("op", ADA)
@pytest.mark.parametrize("make", ALONE.values(), ids=ALONE)
def test_one_row_meets_the_binary_of_many(op, make):
    """Triton compiles in whether an int is 1 or a multiple of 16; on the H200 that gave a float32
    row of 77 columns other bits alone (stride 0) than among many (stride 77)."""
    many = [make()] * (1 + ADA[op])
    one = [t[2:3] for t in many]
    if many[0].ndim == 3:
        one = [t[:, 2:3] for t in one]
    policy = Policy(batch_invariant=True)
    calls = [Call.of(CATALOGUE[op], t, params_of(op, 1), policy) for t in (many, one)]
    plans = [plan_for(call) for call in calls]
    assert plans[0].constexprs(calls[0]) == plans[1].constexprs(calls[1])
    for plan, call in zip(plans, calls, strict=True):
        strides = [s for given in plan.arguments(call.params)[1:6] if given for s in given]
        assert len(strides) >= 1 + ADA[op]
        assert all(s > 1 and s % 16 for s in strides)
