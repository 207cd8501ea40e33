"""The rotation kernel against the specs' references in float64, every branch of it.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_rope.angles import turns
from opkiln_rope.plugin import FORMS, OPS, supports
from opkiln_rope.rotation import RULES, prepare, rotation_kernel
from opkiln_rope.rotation_plan import Tiling, plan_for, rule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# The interpreter truncates f32 to bf16 (one ulp) where the GPU rounds (half an ulp).
RTOL = {F16: 2**-11, BF16: 2**-7 if DEVICE == "cpu" else 2**-8, F32: 2**-21}
ATOL = 2**-19  # two products of cosines that are off by 2^-22 and values up to 4
IDS = "rope_neox_position_ids"
NUMBERS: dict[str, dict[str, Any]] = {
    "rope_llama31": dict(
        scale_factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
    ),
    "rope_yarn": dict(
        scale=4.0, original_max_position=64, beta_fast=32.0, beta_slow=1.0, attn_factor=1.25
    ),
    "rope_longrope": dict(max_position_embeddings=8192, original_max_position_embeddings=1024),
}


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def params_of(op: str, rotary_dim: int, **given: Any) -> dict[str, Any]:
    """Canonical parameters, in the spec's order."""
    base = op.removesuffix("_inplace").removesuffix("_backward")
    numbers = {"base": 10000.0, "rotary_dim": rotary_dim, "offset": 0, **NUMBERS.get(base, {})}
    if base == "rope_longrope":
        numbers["rescale_factors"] = tuple(1.0 + i / 4 for i in range(rotary_dim // 2))
    numbers |= given
    return {n: numbers[n] for n in CATALOGUE[op].param_names if n in numbers}


def run(
    op: str, x: torch.Tensor, *ids: torch.Tensor, tiling: Tiling | None = None, **params: Any
) -> Any:
    """Launch, compare with float64, return the plan that ran."""
    spec = CATALOGUE[op]
    tensors = [x, *ids]
    numbers = params_of(op, params.pop("rotary_dim", x.shape[-1]), **params)
    call = Call.of(spec, tensors, numbers)
    assert supports(call) is None
    before = x.clone()
    wide = [x.to(torch.float64, copy=True), *ids]
    result = prepare(call, tiling)(*tensors)
    want = spec.reference(*wide, **numbers)
    if spec.mutates(call):
        assert result == ()
        result, want = x, wide[0]
    else:
        assert torch.equal(x, before)
        (meta,) = call.outputs
        assert (result.shape, result.stride()) == (meta.shape, meta.stride)
        want = want[0] if isinstance(want, tuple) else want
    torch.testing.assert_close(result.double(), want, rtol=RTOL[x.dtype], atol=ATOL)
    return plan_for(call, tiling)


def backward_params(x: torch.Tensor) -> dict[str, Any]:
    return {"x_shape": tuple(x.shape), "output_mask": (True,)}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("form", FORMS)
def test_every_op(op, form):
    x = random(*((7, 3, 24) if op == IDS else (2, 7, 3, 24)), dtype=F16)
    ids = [torch.tensor([0, 5, 1, 1, 99, 63, 64], device=DEVICE)] if op == IDS else []
    params = {"max_position": 100} if op == IDS else {}
    if form == "_backward":
        params |= backward_params(x)
    plan = run(op + form, x, *ids, **params)
    assert plan.back == (form == "_backward")
    assert plan.interleaved == (op == "rope_non_neox")


TILINGS = {  # id: (shape, tiling, what the plan must be)
    "steps": ((2, 3, 8, 16), Tiling(1, 2, 4, 1), {"even_h": True, "batched": True}),
    "ragged-heads": ((1, 3, 5, 16), Tiling(1, 2, 2, 1), {"even_h": False, "batched": False}),
    "ragged-tokens": ((1, 5, 2, 16), Tiling(4, 2, 1, 1), {"even_h": True}),
    "tokens-across-sequences": ((3, 3, 2, 16), Tiling(4, 2, 1, 1), {"batched": True}),
    "pairs-not-a-power-of-two": ((1, 3, 2, 24), Tiling(2, 2, 1, 1), {"even_p": False}),
    "streaming": ((5, 64), Tiling(4, 1, 1, 1, "evict_first", ".cs"), {"rest": 0}),
}


@pytest.mark.parametrize("op", ["rope_neox", "rope_non_neox"])
@pytest.mark.parametrize("case", TILINGS.values(), ids=TILINGS)
def test_tilings(op, case):
    shape, tiling, expected = case
    plan = run(op, random(*shape), tiling=tiling)
    assert expected.items() <= {f: getattr(plan, f) for f in expected}.items()


@pytest.mark.parametrize("op", ["rope_neox", "rope_non_neox", "rope_neox_inplace"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_partial(op, dtype):
    """The rest is copied, or stays where it is."""
    plan = run(op, random(2, 5, 2, 32, dtype=dtype), rotary_dim=12, offset=4000)
    assert plan.rest == (0 if op.endswith("_inplace") else 32)


STRIDES = {  # id: (x, alignment in elements)
    "contiguous": (lambda: random(2, 5, 4, 32), 16),
    "heads-before-tokens": (lambda: random(2, 4, 5, 32).transpose(1, 2), 16),
    "one-of-qkv": (lambda: random(2, 5, 3, 4, 32)[:, :, 1], 16),
    "padded": (lambda: random(2, 5, 4, 40)[..., :32], 8),
    "odd-pitch": (lambda: random(2, 5, 4, 33)[..., :32], 1),
    "column-stride": (lambda: random(2, 5, 4, 64)[..., ::2], 1),
    "channels-first": (lambda: random(2, 5, 32, 4).transpose(2, 3), 1),
    "expanded": (lambda: random(1, 5, 4, 32).expand(3, 5, 4, 32), 16),
}


@pytest.mark.parametrize("op", ["rope_neox", "rope_non_neox", "rope_neox_inplace"])
@pytest.mark.parametrize("case", STRIDES.values(), ids=STRIDES)
def test_strides(op, case):
    make, align = case
    x = make()
    if op.endswith("_inplace") and 0 in x.stride():
        pytest.skip("an expanded tensor cannot be written")
    assert run(op, x).align == align


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [1, 2])
def test_position_ids(dtype, step):
    ids = torch.tensor([3, 9, 0, 9, 131071, 2, 64, 1, 8, 8], dtype=dtype, device=DEVICE)[::step]
    x = random(len(ids), 3, 32)
    assert run(IDS, x, ids, max_position=131072).sizes[4] == step


def test_wrong_ids_read_nothing_outside():
    """Unchecked on a GPU; clamped."""
    ids = torch.tensor([-5, 10**6], device=DEVICE)
    x = random(2, 1, 16)
    call = Call.of(CATALOGUE[IDS], [x, ids], params_of(IDS, 16, max_position=8))
    out = prepare(call)(x, ids)
    clamped = prepare(call)(x, ids.clamp(0, 7))
    assert torch.equal(out, clamped)


@pytest.mark.parametrize("op", [op for op in OPS if op != IDS])
@pytest.mark.parametrize("offset", [131070, 2**20 - 1, 2**30])
def test_far_positions(op, offset):
    """As exact as near ones. [1, 2, 1, 128]: a token a program; [2, 128]: several."""
    run(op, random(1, 2, 1, 128), offset=offset, tiling=Tiling(1, 1, 1, 1))
    run(op, random(2, 128), offset=offset, tiling=Tiling(2, 1, 1, 1))


def test_far_ids():
    ids = torch.tensor([2**31 - 2**17, 2**20, 2**24 + 1], device=DEVICE)
    run(IDS, random(3, 2, 128), ids, max_position=2**31 - 2**16)


def test_position_zero_turns_nothing():
    x = random(1, 1, 3, 64)
    call = Call.of(CATALOGUE["rope_neox"], [x], params_of("rope_neox", 64))
    assert torch.equal(prepare(call)(x), x)


def test_frequencies_are_shared():
    """Calls of one rule read one tensor, of all lengths; its words give the reference's angle."""
    rule = RULES["rope_llama31"]
    numbers = params_of("rope_llama31", 64)
    del numbers["offset"]
    device = torch.device(DEVICE)
    (words,) = turns(rule, device, **numbers)
    assert turns(rule, device, **numbers)[0] is words
    assert words.shape == (2, 32)
    high, low = (words.to(torch.int64) & 0xFFFFFFFF).double()
    freq, _ = rule(device=device, **numbers)
    found = (high + low * 2**-32) * 2**-32
    torch.testing.assert_close(found, freq / math.tau, rtol=2**-52, atol=2**-63)


def test_gradient_turns_back():
    x = random(1, 6, 2, 32)
    turned = prepare(Call.of(CATALOGUE["rope_neox"], [x], params_of("rope_neox", 32)))(x)
    op = "rope_neox_backward"
    call = Call.of(CATALOGUE[op], [turned], params_of(op, 32, **backward_params(x)))
    torch.testing.assert_close(prepare(call)(turned), x, rtol=0, atol=1e-6)


def test_gradient_that_nobody_wants():
    x = random(1, 6, 2, 32)
    op = "rope_neox_backward"
    params = params_of(op, 32, x_shape=tuple(x.shape), output_mask=(False,))
    assert prepare(Call.of(CATALOGUE[op], [x], params))(x) == ()


def test_constexprs_are_in_the_kernels_order():
    """They are passed by position."""
    call = Call.of(CATALOGUE["rope_neox"], [random(2, 8)], params_of("rope_neox", 8))
    plan = plan_for(call)
    names = list(rotation_kernel.arg_names)
    constexprs = list(plan.constexprs())
    assert names[-len(constexprs) :] == constexprs
    assert len(names) == 5 + len(plan.sizes) + len(constexprs)


def test_every_op_has_a_rule():
    assert set(RULES) == set(OPS)


REFUSED = {
    "f64": (lambda: random(2, 8).double(), 8, "torch.float64"),
    "nothing-turns": (lambda: random(2, 8), 0, "no channel"),
    "meta-device": (lambda: torch.empty(2, 8, device="meta"), 8, "meta"),
    "wide": (lambda: torch.empty(1, 2**14, device="meta"), 2**14, "do not fit"),
}


def test_positions_that_do_not_fit_are_refused():
    params = params_of("rope_neox", 8, offset=2**31)
    refusal = supports(Call.of(CATALOGUE["rope_neox"], [random(2, 8)], params))
    assert "positions" in refusal.reason


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    make, rotary_dim, words = case
    call = Call.of(CATALOGUE["rope_neox"], [make()], params_of("rope_neox", rotary_dim))
    refusal = supports(call)
    assert words in refusal.reason and "\n" not in refusal.reason


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("heads", [1, 3, 8, 32, 128])
@pytest.mark.parametrize("pairs", [1, 3, 32, 64, 128, 4096])
def test_rule_fits_registers(itemsize, heads, pairs):
    """At most 32 elements of a and of b a thread, but for rows longer than that."""
    for tokens in (1, 1000, 10**6):
        t = rule(tokens, heads, pairs, itemsize)
        assert dataclasses.astuple(t)[:3] >= (1, 1, 1)
        per_thread = t.block_t * t.block_h * t.steps * pairs / (32 * t.num_warps)
        assert per_thread <= 32 or t.block_t * t.block_h == 1


@pytest.mark.parametrize("op", OPS)
def test_a_batch_invariant_policy_takes_one_tiling(op):
    """Few tokens have a tiling of their own without it."""

    def tilings(invariant: bool) -> set[Tiling]:
        found = set()
        for tokens in (1, 2, 255, 4096):
            x = torch.empty(tokens, 8, 128, dtype=F16, device="meta")
            ids = torch.empty(tokens, dtype=torch.int64, device="meta")
            tensors = [x, ids] if op == IDS else [x[None]]
            params = params_of(op, 128, **({"max_position": 4096} if op == IDS else {}))
            policy = Policy(batch_invariant=invariant)
            call = Call.of(CATALOGUE[op], tensors, params, policy, real=False)
            found.add(plan_for(call).tiling)
        return found

    assert len(tilings(True)) == 1 < len(tilings(False))
