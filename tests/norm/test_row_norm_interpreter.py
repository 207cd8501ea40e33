"""rms_norm and layer_norm against the spec's reference in float64, every branch of the kernel.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from norm.row_cases import BF16, DEVICE, F16, F32, only_tiling, random
from norm.row_cases import run as run_case
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_norm import row_plan
from opkiln_norm.plugin import supports_row_norm
from opkiln_norm.row_norm import prepare, row_norm_kernel
from opkiln_norm.row_plan import RowPlan, Tiling, plan_for, rule


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def run(op: str, tensors: list[Any], shape: tuple[int, ...], eps: float = 1e-5, **how) -> RowPlan:
    return run_case(op, tensors, {"normalized_shape": shape, "eps": eps}, **how)


def affine(op: str, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [random(n, dtype=dtype) for _ in range(1 if op == "rms_norm" else 2)]


@pytest.fixture
def use_tiling(monkeypatch):
    return partial(only_tiling, monkeypatch)


OPS = pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])

RESIDENT_F32 = row_plan.RESIDENT_BYTES // 4
RULE = {  # id: (rows, n, dtype, what the plan must be)
    "several-rows-a-warp": (3, 8, F32, {"block_m": 256, "chunks": 1, "even": True}),
    "one-column": (3, 1, F32, {"block_m": 2048, "block_n": 1, "even": True}),
    "few-rows-short": (2, 20, F16, {"block_n": 32, "preload": True, "even": False}),
    "warp-a-row-chunks-tail": (9, 300, F16, {"block_n": 256, "chunks": 2, "even": False}),
    "warp-a-row-bf16": (9, 256, BF16, {"block_m": 16, "chunks": 1, "even": True}),
    "few-rows-long": (2, 1030, F32, {"block_m": 1, "block_n": 2048, "preload": True}),
    "many-rows-long": (3, 1100, F32, {"block_n": 512, "chunks": 3, "preload": False}),
    "head": (2, RESIDENT_F32 + 9, F32, {"head": True, "even": False, "packed": False}),
    "head-packed": (1, 2 * RESIDENT_F32 + 8, F16, {"head": True, "packed": True}),
    "head-even": (1, RESIDENT_F32 + 4096, F32, {"head": True, "even": True}),
}


@OPS
@pytest.mark.parametrize("case", RULE.values(), ids=RULE)
def test_rule(op, case, monkeypatch):
    monkeypatch.setattr(row_plan, "FEW_ROWS", 2)
    rows, n, dtype, expected = case
    plan = run(op, [random(rows, n, dtype=dtype), *affine(op, n, dtype)], (n,))
    chosen = dataclasses.asdict(plan.tiling) | {"even": plan.even}
    assert expected.items() <= chosen.items()
    assert plan.source == "rule"


SHIFTED = {  # id: (rows, n, dtype)
    "f32": (5, 259, F32),
    "f32-chunks": (4, 1030, F32),
    "f16": (9, 515, F16),
    "bf16-block-that-the-shift-fills": (9, 1017, BF16),
    "bf16-block-that-the-shift-overflows": (9, 1023, BF16),
}


@OPS
@pytest.mark.parametrize("case", SHIFTED.values(), ids=SHIFTED)
def test_rows_that_start_between_vectors(op, case, monkeypatch):
    monkeypatch.setattr(row_plan, "FEW_ROWS", 2)
    rows, n, dtype = case
    x = random(rows, n, dtype=dtype)
    plan = run(op, [x, *affine(op, n, dtype)], (n,))
    assert plan.shift == 16 // dtype.itemsize and not plan.even
    assert plan.tiling.chunks * plan.tiling.block_n >= n + plan.shift - 1
    run(op, [x + 4, *affine(op, n, F32)], (n,), needs_grad=False, atol=2**-18)


NOT_SHIFTED = {  # id: input of 6 rows
    "whole-vectors": lambda: random(6, 264),
    "gaps": lambda: random(6, 300)[:, :259],
    "two-leading-dims": lambda: random(4, 3, 259)[:2].transpose(0, 1),
    "unaligned": lambda: random(6 * 259 + 1)[1:].view(6, 259),
    "short": lambda: random(6, 255),
    "head": lambda: random(6, RESIDENT_F32 + 1),
}


@pytest.mark.parametrize("make", NOT_SHIFTED.values(), ids=NOT_SHIFTED)
def test_rows_read_by_columns(make, monkeypatch):
    monkeypatch.setattr(row_plan, "FEW_ROWS", 2)
    x = make()
    given = {"normalized_shape": x.shape[-1:], "eps": 1e-5}
    assert plan_for(Call.of(CATALOGUE["rms_norm"], [x, None], given)).shift == 0


def test_a_batch_invariant_row_is_not_shifted(monkeypatch):
    monkeypatch.setattr(row_plan, "FEW_ROWS", 2)
    call = [CATALOGUE["rms_norm"], [random(6, 259), None], {"normalized_shape": (259,), "eps": 0}]
    assert plan_for(Call.of(*call)).shift == 4
    assert plan_for(Call.of(*call, policy=Policy(batch_invariant=True))).shift == 0


STATIC = Tiling(32, 1, chunks=0, head=True, evict="evict_first", static=True)
TABLE = {  # id: (itemsize, rows, n, tiling)
    "persistent": (4, 7, 40, Tiling(64, 1, block_m=2, programs_per_sm=2, stages=2)),
    "persistent-preload": (2, 5, 64, Tiling(64, 1, programs_per_sm=1, preload=True)),
    "packed-chunks": (2, 3, 80, Tiling(32, 1, block_m=2, chunks=3, packed=True)),
    "packed-masked-block": (2, 2, 100, Tiling(128, 1, packed=True, evict="evict_first")),
    "streaming-store": (4, 2, 64, Tiling(64, 1, store_cache=".cs")),
    "head-alone": (2, 2, 128, Tiling(64, 1, chunks=0, head=True, evict="evict_first")),
    "head-alone-of-one-block": (4, 2, 64, Tiling(64, 1, chunks=0, head=True)),
    "head-pipelined": (2, 2, 150, Tiling(32, 1, chunks=2, head=True, stages=3, packed=True)),
    "head-static": (2, 2, 96, STATIC),
    "head-static-tail": (4, 2, 150, Tiling(32, 1, chunks=2, head=True, static=True)),
    "head-forward": (2, 2, 96, dataclasses.replace(STATIC, forward=True)),
}


@OPS
@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_table(op, case, use_tiling):
    itemsize, rows, n, tiling = case
    use_tiling(op, itemsize, n, tiling)
    dtype = F32 if itemsize == 4 else BF16
    plan = run(op, [random(rows, n, dtype=dtype), *affine(op, n, dtype)], (n,))
    assert plan.source == "test"
    assert plan.tiling == tiling


def test_constexprs_are_in_the_kernels_order():
    """They are passed by position."""
    names = list(row_norm_kernel.arg_names)
    call = Call.of(
        CATALOGUE["rms_norm"], [random(2, 8), None], {"normalized_shape": (8,), "eps": 0}
    )
    constexprs = plan_for(call).constexprs(call)
    assert names[-len(constexprs) :] == list(constexprs)


def test_table_is_valid():
    for row in row_plan.tuning_rows():
        tiling, label = row_plan.tuned(row["op"], row["itemsize"], row["n"], row["rows"][0])
        assert (tiling, label) == (Tiling(**row["use"]), row["label"])
        resident = tiling.block_n * tiling.chunks
        assert resident < row["n"] if tiling.head else resident >= row["n"]


@pytest.mark.parametrize("bias", [None, F16, F32], ids=str)
@pytest.mark.parametrize("weight", [None, BF16, F32], ids=str)
def test_affine_absent_or_of_another_dtype(weight, bias):
    w = None if weight is None else random(48, dtype=weight)
    b = None if bias is None else random(48, dtype=bias)
    run("layer_norm", [random(5, 48, dtype=F16), w, b], (48,))
    run("rms_norm", [random(5, 48, dtype=F16), w], (48,), needs_grad=False)


def transposed(*shape: int) -> torch.Tensor:
    return random(*shape).transpose(-1, -2)


STRIDES = {  # id: (input, number of normalized dims, inner sizes, column stride, alignment)
    "row-slice": (lambda: random(6, 64)[::2], 1, (), None, 16),
    "column-slice": (lambda: random(6, 72)[:, 4:44], 1, (), None, 8),
    "odd-pitch": (lambda: random(6, 41)[:, :40], 1, (), None, 1),
    "heads-before-tokens": (lambda: random(2, 3, 4, 16).transpose(1, 2), 1, (4, 3), None, 16),
    "two-strides": (lambda: random(3, 6, 16)[:, :4], 1, (4,), None, 16),
    "expanded-rows": (lambda: random(1, 24).expand(4, 24), 1, (), None, 8),
    "expanded-columns": (lambda: random(4, 1).expand(4, 24), 1, (), 0, 8),
    "column-stride": (lambda: transposed(24, 5), 1, (), 5, 8),
    "two-normalized-dims": (lambda: random(2, 3, 4, 6), 2, (), None, 8),
    "normalized-dims-one-stride": (lambda: random(3, 4, 6, 2)[..., 0], 2, (), 2, 8),
    "size-1-dims": (lambda: random(1, 3, 1, 16), 2, (), None, 16),
    "no-leading-dim": (lambda: random(33), 1, (), None, 1),
    "no-rows": (lambda: random(0, 16), 1, (), None, 16),
}


@OPS
@pytest.mark.parametrize("case", STRIDES.values(), ids=STRIDES)
def test_strides(op, case):
    make, trailing, inner, stride_xn, align = case
    x = make()
    shape = tuple(x.shape[x.ndim - trailing :])
    w = [t.view(shape) for t in affine(op, math.prod(shape), F32)]
    plan = run(op, [x, *w], shape)
    assert (plan.inner_sizes, plan.operands[0].stride_n, plan.align) == (inner, stride_xn, align)


@OPS
def test_strided_head(op):
    x = transposed(RESIDENT_F32 + 9, 2)
    plan = run(op, [x, *affine(op, x.shape[1], F32)], (x.shape[1],))
    assert plan.tiling.head and plan.operands[0].stride_n == 2


@OPS
def test_rows_beyond_2_31_elements(op, monkeypatch):
    """Row 2 starts 2^31 elements in. The 4 GiB are reserved; only the three rows are touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    x = torch.empty(2**31 + 64, dtype=F16, device=DEVICE).as_strided((3, 64), (2**30, 1))
    x.copy_(random(3, 64))
    monkeypatch.undo()
    spec = CATALOGUE[op]
    params = {"normalized_shape": (64,), "eps": 1e-5}
    tensors = [x, *affine(op, 64, F16)]
    y = prepare(Call.of(spec, tensors, params))(*tensors)
    dense = [x.contiguous(), *tensors[1:]]
    assert torch.equal(y, prepare(Call.of(spec, dense, params))(*dense))


@OPS
def test_strided_affine(op):
    w = [random(24, 3)[:, 1] for _ in affine(op, 1, F32)]
    plan = run(op, [random(4, 24), *w], (24,))
    strides = [operand.stride_n for operand in plan.operands]
    assert strides == [None, None, 3, None if op == "rms_norm" else 3, None]


@pytest.mark.parametrize("n", [64, 300, RESIDENT_F32 + 9])
def test_large_mean(n):
    """Mean 1e4, deviation 1: E[x^2] - E[x]^2 in f32 has an error of 6 in the variance."""
    x = random(3, n) + 1e4
    rounding = 1e4 * 2**-23  # of the f32 mean itself
    run("layer_norm", [x, None, None], (n,), atol=4 * rounding, rstd_rtol=1e-5)


@OPS
def test_constant_rows(op):
    """Variance exactly 0: eps alone decides."""
    run(op, [torch.full((3, 40), 3.0, device=DEVICE), *affine(op, 40, F32)], (40,), eps=1e-6)


@OPS
@pytest.mark.parametrize("packed", [False, True])
def test_nan_and_inf_stay_in_their_row(op, packed, use_tiling):
    use_tiling(op, 2, 32, Tiling(32, 1, block_m=4, packed=packed))
    x = random(4, 32, dtype=F16)
    x[1, 3] = math.nan
    x[2, 5] = math.inf
    spec = CATALOGUE[op]
    params = {"normalized_shape": (32,), "eps": 1e-5}
    tensors = [x] + [None] * (len(spec.tensors) - 1)
    y = prepare(Call.of(spec, tensors, params))(*tensors)
    want = spec.reference(*tensors, **params)[0]
    torch.testing.assert_close(y, want, rtol=2**-10, atol=2**-10, equal_nan=True)
    assert y[1].isnan().all() and y[[0, 3]].isfinite().all()


@OPS
def test_batch_invariant_rows(op):
    """One row alone has the bits that it has among many; without the policy the tiling differs."""
    spec = CATALOGUE[op]
    x = random(130, 520, dtype=F16)
    w = affine(op, 520, F32)

    def launch(rows: torch.Tensor, invariant: bool) -> tuple[torch.Tensor, Tiling]:
        params = {"normalized_shape": (520,), "eps": 1e-5}
        call = Call.of(spec, [rows, *w], params, Policy(batch_invariant=invariant))
        return prepare(call)(rows, *w), plan_for(call).tiling

    many, tiling = launch(x, True)
    alone, tiling_alone = launch(x[77:78], True)
    assert torch.equal(many[77:78], alone)
    assert tiling == tiling_alone != launch(x[77:78], False)[1]


REFUSED = {  # id: (tensors, normalized shape, words of the refusal)
    "f64": (lambda: [random(2, 8).double(), None], (8,), "torch.float64"),
    "f64-weight": (lambda: [random(2, 8), random(8).double()], (8,), "weight"),
    "two-column-strides": (lambda: [random(2, 8, 4).transpose(1, 2), None], (4, 8), "one stride"),
    "empty-rows": (lambda: [random(2, 0), None], (0,), "no elements"),
    "meta-device": (lambda: [torch.empty(2, 8, device="meta"), None], (8,), "meta"),
    "2^31-columns": (
        lambda: [torch.empty(1, 2**31, dtype=F16, device="meta"), None],
        (2**31,),
        "fit the index",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    make, shape, words = case
    params: dict[str, Any] = {"normalized_shape": shape, "eps": 1e-5}
    refusal = supports_row_norm(Call.of(CATALOGUE["rms_norm"], make(), params))
    assert words in refusal.reason
    assert "\n" not in refusal.reason


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 4096])
def test_rule_covers_every_length(itemsize, rows):
    """Blocks cover the row, with no block to spare; a program never has more than 32 warps."""
    lengths = {2**k + d for k in range(21) for d in (-1, 0, 1)} | {1152, 5120, 12289}
    for n in sorted(lengths - {0}):
        t = rule(itemsize, n, rows)
        assert t.num_warps in (1, 2, 4, 8, 16, 32)
        if t.head:
            assert t.block_n * t.chunks < n
        else:
            assert t.block_n * (t.chunks - 1) < n <= t.block_n * t.chunks
