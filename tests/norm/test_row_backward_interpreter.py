"""Backward of the row norms against the spec's reference in float64, every branch.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

import dataclasses
from typing import Any

import pytest
import torch
from norm.row_backward_cases import ADA, FUSED, GRADIENTS, NORMS, OPS, params_of, tensors_of
from norm.row_cases import BF16, F16, F32, RTOL, random
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import row_backward_plan
from opkiln_norm.plugin import opkiln_implementations, supports_row_backward
from opkiln_norm.row_backward import row_backward_kernel
from opkiln_norm.row_backward_launch import prepare
from opkiln_norm.row_backward_plan import BackwardPlan, Tiling, plan_for

ALL = pytest.mark.parametrize("op", OPS)


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def use(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Change what the rule says."""
    rule = row_backward_plan.rule
    changed = lambda *args: dataclasses.replace(rule(*args), **changes)  # noqa: E731
    monkeypatch.setattr(row_backward_plan, "rule", changed)


def run(op: str, tensors: list[Any], params: dict[str, Any]) -> BackwardPlan:
    """Launch, compare every gradient with float64, return the plan that ran."""
    spec = CATALOGUE[f"{op}_backward"]
    call = Call.of(spec, tensors, params)
    assert supports_row_backward(call) is None
    before = [None if t is None else t.clone() for t in tensors]
    results = prepare(call)(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    wide = [None if t is None else t.double() for t in tensors]
    wanted = [t for t in spec.reference(*wide, **params) if t is not None]
    for got, want, meta in zip(results, wanted, call.outputs, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
        torch.testing.assert_close(got.double(), want, rtol=RTOL[got.dtype], atol=2**-15)
    for t, copy in zip(tensors, before, strict=True):
        assert t is None or torch.equal(t, copy)
    return plan_for(call)


def run_shape(
    op: str, shape: tuple[int, ...], dtype: torch.dtype = F32, mask: Any = (), **options: Any
) -> BackwardPlan:
    shapes = options.get("modulation", ())
    return run(
        op, tensors_of(op, random, shape, dtype, **options), params_of(op, shape, mask, shapes)
    )


RULE = {  # id: (rows, n, dtype, what the plan must be)
    "one-column": (5, 1, F32, {"block_n": 1, "even": True}),
    "several-rows-a-warp": (70, 24, F16, {"block_n": 32, "block_m": 32, "even": False}),
    "warp-a-row": (9, 300, F16, {"block_n": 256, "block_m": 4, "chunks": 2}),
    "program-a-row": (3, 1100, F16, {"block_m": 1, "num_warps": 4, "chunks": 2}),
    "bf16": (3, 1024, BF16, {"block_m": 1, "chunks": 1, "even": True}),
    "read-again": (2, 9001, F16, {"num_warps": 16, "again": True, "kept": False}),
    "wide": (3, 8200, F32, {"wide": True}),
    "wide-f16": (1, 16392, F16, {"wide": True, "even": False}),
}


@ALL
@pytest.mark.parametrize("case", RULE.values(), ids=RULE)
def test_rule(op, case):
    rows, n, dtype, expected = case
    plan = run_shape(op, (rows, n), dtype)
    even = plan.constexprs(True)["EVEN"]
    assert expected.items() <= (dataclasses.asdict(plan.tiling) | {"even": even}).items()


TILINGS = {
    "wide-blocks": {"wide": True, "block_n": 16, "chunks": 2, "block_m": 2},
    "rows-of-several-programs": {"block_n": 16, "chunks": 3, "programs_per_sm": 3},
    "tail-rows": {"block_n": 64, "chunks": 1, "block_m": 4, "programs_per_sm": 2, "stages": 2},
    "not-kept": {"block_n": 64, "chunks": 1, "kept": False},
    "again": {"block_n": 32, "chunks": 2, "kept": False, "again": True},
    "packed": {"block_n": 32, "chunks": 2, "packed": True},
}


@ALL
@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_tilings(op, tiling, monkeypatch):
    use(monkeypatch, **{"block_m": 1, **tiling})
    run_shape(op, (7, 45), F16)


@pytest.mark.parametrize("op", ADA)
@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_tilings_of_groups(op, tiling, monkeypatch):
    use(monkeypatch, **{"block_m": 1, **tiling})
    run_shape(op, (2, 5, 45), F16, modulation=[(2, 1, 45)] * 3)


def masks() -> list[tuple[str, tuple[bool, ...]]]:
    found = []
    for op in OPS:
        count = GRADIENTS[op]
        found += [(op, tuple(i == k for i in range(count))) for k in range(count)]
        found += [(op, tuple(i != k for i in range(count))) for k in range(count)]
    return found


@pytest.mark.parametrize("op, mask", masks())
@pytest.mark.parametrize("wide", [False, True])
def test_masks(op, mask, wide, monkeypatch):
    if wide:
        use(monkeypatch, wide=True, block_n=16, chunks=1, block_m=1)
    run_shape(op, (4, 40), mask=mask)
    if op in ADA:
        run_shape(op, (2, 3, 40), mask=mask, modulation=[(2, 1, 40)] * 3)


@pytest.mark.parametrize("op", [*NORMS, *FUSED])
@pytest.mark.parametrize("dtypes", [(F16, F32), (F32, F16), (F16, BF16)], ids=str)
def test_weight_of_another_dtype(op, dtypes):
    run_shape(op, (5, 48), dtypes[0], weight=dtypes[1])


@pytest.mark.parametrize("op", [*NORMS, *FUSED])
@pytest.mark.parametrize("weight", [None, "strided"])
def test_weight_absent_or_strided(op, weight):
    tensors = tensors_of(op, random, (5, 48), F32)
    place = CATALOGUE[f"{op}_backward"].tensor_names.index("weight")
    tensors[place] = None if weight is None else random(48, 3)[:, 1]
    run(op, tensors, params_of(op, (5, 48)))


def strided(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Leading dims swapped in memory, rows padded."""
    if len(shape) < 2:
        return random(*shape, dtype=dtype)
    if len(shape) == 2:
        return random(shape[0], shape[1] + 3, dtype=dtype)[:, : shape[1]]
    return random(shape[1], shape[0], *shape[2:], dtype=dtype).transpose(0, 1)


def columns(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Columns apart in memory."""
    if len(shape) < 2:
        return random(*shape, dtype=dtype)
    return random(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)


def skipped(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    """Every second element, the statistics' too."""
    return random(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2] if shape else random()


def expanded(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return random(*[1] * (len(shape) - 1), shape[-1], dtype=dtype).expand(shape)


@ALL
@pytest.mark.parametrize("make", [strided, columns, skipped, expanded])
def test_strides(op, make):
    run(op, tensors_of(op, make, (2, 3, 24), F16), params_of(op, (2, 3, 24)))


@ALL
def test_strides_of_one(op):
    """Only the gradient that comes in lies otherwise."""
    tensors = tensors_of(op, random, (2, 3, 24), F32)
    tensors[0] = columns(2, 3, 24)
    run(op, tensors, params_of(op, (2, 3, 24)))


@pytest.mark.parametrize("op", NORMS)
def test_several_normalized_dims(op):
    x = random(3, 4, 10)
    tensors = [random(3, 4, 10), x, random(4, 10), random(3), random(3).abs()]
    if op == "rms_norm":
        del tensors[3]
    run(op, tensors, {"normalized_shape": (4, 10), "output_mask": [True] * GRADIENTS[op]})


BROADCAST = {  # id: shapes of scale, shift and gate beside an input [2, 3, 24]; groups
    "per-sample": ([(2, 1, 24)] * 3, 2),
    "per-column": ([(24,)] * 3, 1),
    "per-position": ([(3, 24), (1, 3, 24), (3, 24)], 3),
    "own-and-shared": ([(2, 3, 24), (24,), (2, 3, 24)], 1),
    "nested": ([(2, 1, 24), (24,), (2, 3, 24)], 2),
    "nested-inside": ([(24,), (2, 1, 24), (1, 1, 24)], 2),
}


@pytest.mark.parametrize("op", ADA)
@pytest.mark.parametrize("case", BROADCAST.values(), ids=BROADCAST)
@pytest.mark.parametrize("programs", [1, 4])
def test_modulation_of_groups(op, case, programs, monkeypatch):
    shapes, groups = case
    use(monkeypatch, block_n=32, block_m=1, programs_per_sm=programs)
    plan = run_shape(op, (2, 3, 24), modulation=shapes)
    assert plan.groups == groups


def test_four_dims(monkeypatch):
    """Two kept dims with a shared one between them."""
    use(monkeypatch, block_n=16, block_m=2)
    plan = run_shape("ada_layer_norm", (2, 3, 2, 9), modulation=[(2, 1, 2, 9)] * 2)
    assert plan.groups == 4 and plan.group_rows == 3


@ALL
@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16)])
def test_no_rows(op, shape):
    run_shape(op, shape)


@ALL
def test_one_row(op):
    run_shape(op, (1, 33))


@pytest.mark.parametrize("op", ADA)
def test_no_rows_of_groups(op):
    run_shape(op, (2, 0, 16), modulation=[(2, 1, 16)] * 3)


@ALL
def test_more_than_2_31_elements_apart(op, monkeypatch):
    """Rows of the incoming gradient 2^30 elements apart; only these are touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    far = torch.empty(2**31 + 64, dtype=F16, device=random(1).device)
    far = far.as_strided((3, 64), (2**30, 1))
    far.copy_(random(3, 64))
    monkeypatch.undo()
    tensors = tensors_of(op, random, (3, 64), F16)
    params = params_of(op, (3, 64))
    found = []
    for tensors[0] in (far, far.contiguous()):
        call = Call.of(CATALOGUE[f"{op}_backward"], tensors, params)
        found.append(prepare(call)(*tensors))
    assert all(map(torch.equal, *found))


@ALL
def test_two_runs_are_equal(op, monkeypatch):
    use(monkeypatch, programs_per_sm=3)
    tensors = tensors_of(op, random, (20, 130), F16)
    launch = prepare(Call.of(CATALOGUE[f"{op}_backward"], tensors, params_of(op, (20, 130))))
    assert all(map(torch.equal, launch(*tensors), launch(*tensors)))


REFUSED = {  # id: (op, input's shape, dtype, shapes of the modulations, words of the refusal)
    "f64": ("rms_norm", (2, 8), torch.float64, (), "torch.float64"),
    "empty-rows": ("layer_norm", (2, 0), F32, (), "no elements"),
    "scalar": ("ada_layer_norm", (2, 3, 8), F32, [(2, 3, 1), (8,)], "over columns"),
    "not-nested": ("ada_layer_norm", (2, 3, 8), F32, [(2, 1, 8), (3, 8)], "do not nest"),
    "other-order": (
        "ada_layer_norm", (2, 3, 4, 8), F32, [(2, 3, 1, 8), (1, 3, 1, 8)], "do not nest",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    op, shape, dtype, shapes, words = case
    tensors = tensors_of(op, random, shape, dtype, modulation=shapes)
    params = params_of(op, shape, (), shapes)
    refusal = supports_row_backward(Call.of(CATALOGUE[f"{op}_backward"], tensors, params))
    assert words in refusal.reason and "\n" not in refusal.reason


def test_a_refused_shape_is_served_where_its_gradient_is_not_wanted():
    shapes = [(2, 3, 1), (3, 8)]
    run_shape("ada_layer_norm", (2, 3, 8), mask=(True, False, True), modulation=shapes)


def test_registered():
    found = {i.op: i for i in opkiln_implementations()}
    assert all("deterministic" in found[f"{op}_backward"].traits for op in OPS)


def test_constexprs_are_in_the_kernels_order():
    """They are passed by position."""
    tensors = tensors_of("layer_norm", random, (2, 8), F32)
    call = Call.of(CATALOGUE["layer_norm_backward"], tensors, params_of("layer_norm", (2, 8)))
    constexprs = plan_for(call).constexprs(True)
    assert list(row_backward_kernel.arg_names)[-len(constexprs) :] == list(constexprs)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("sums", [0, 1, 2, 3])
@pytest.mark.parametrize("streams", [2, 3, 6])
def test_rule_covers_every_length(itemsize, sums, streams):
    lengths = {2**k + d for k in range(21) for d in (-1, 0, 1)} | {1152, 5120, 12289}
    for n in sorted(lengths - {0}):
        t: Tiling = row_backward_plan.rule(itemsize, n, sums, streams)
        tile = t.block_m * t.block_n * t.chunks * itemsize
        assert t.num_warps in (4, 8, 16)
        assert t.wide or t.block_n * (t.chunks - 1) < n <= t.block_n * t.chunks
        copies = (t.stages - 1) * tile * streams * t.programs_per_sm
        assert copies <= row_backward_plan.SHARED_BYTES
