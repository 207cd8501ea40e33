"""The channel norms at the edges: odd parameters, large means, NaN, absent results, refusals."""

import math

import pytest
import torch
from norm.channel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    X,
    affine,
    backward,
    batch_norm,
    channels_last,
    group_norm,
    instance_norm,
    nan_filled_memory,
    only_tiling,
    random,
    running,
)
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import channel_norm
from opkiln_norm.channel_plan import Tiling, forward_plan, rule
from opkiln_norm.plugin import supports_channel_norm


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    yield from nan_filled_memory()


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_parameters_of_another_dtype(dtype):
    x = random(3, 4, 6, dtype=dtype)
    batch_norm(x, *running(4), *affine(4))
    batch_norm(x, *running(4, dtype), *affine(4, dtype), rtol=2**-7)
    batch_norm(random(3, 4, 6), None, None, random(4, dtype=dtype), None)
    group_norm(x, 2, None, random(4))
    instance_norm(x, *running(4), random(4, dtype=dtype), None)


def test_strided_parameters():
    columns = random(6, 4).abs()
    batch_norm(random(*X), *(columns[:, i] for i in range(4)))
    instance_norm(random(*X), *(columns[:, i] for i in range(4)), use_input_stats=False)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True), (True, True, False)])
@pytest.mark.parametrize("slices", [0, 2])
def test_backward_of_some(mask, slices, monkeypatch):
    only_tiling(monkeypatch, Tiling(4, 64, 1, slices=slices))
    backward(random(*X), output_mask=mask)


def test_backward_gradient_of_another_layout():
    backward(channels_last(random(*X)), random(*X))
    backward(random(*X), channels_last(random(*X)))
    backward(random(*X), random(1).expand(X))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("slices", [0, 2])
def test_backward_without_weight(training, slices, monkeypatch):
    only_tiling(monkeypatch, Tiling(4, 64, 1, slices=slices))
    backward(random(*X), weight=False, training=training)


@pytest.mark.parametrize("slices", [0, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_large_mean(slices, layout, monkeypatch):
    """Mean 1e4, deviation 1: E[x^2] - E[x]^2 in f32 has an error of 6 in the variance."""
    only_tiling(monkeypatch, Tiling(4, 32 if slices else 512, 1, slices=slices))
    x = (random(4, 3, 8, 16) + 1e4).contiguous(memory_format=layout)
    rounding = 1e4 * 2**-23  # of the f32 mean itself
    for norm in (batch_norm, instance_norm):
        norm(x, None, None, None, None, atol=4 * rounding, rtol=1e-4)
    group_norm(x, 3, None, None, atol=4 * rounding, rtol=1e-4)


def test_constant_input():
    """Variance exactly 0: eps alone decides."""
    batch_norm(torch.full((3, 5, 40), 3.0, device=DEVICE), eps=1e-6)
    instance_norm(torch.full((3, 5, 40), 3.0, device=DEVICE), eps=1e-6)


@pytest.mark.parametrize("slices", [0, 2])
def test_nan_and_inf_stay_in_their_channel(slices, monkeypatch):
    only_tiling(monkeypatch, Tiling(4, 8, 1, chunks=1 if slices else 4, slices=slices))
    x = random(3, 4, 30)
    x[1, 1, 3] = math.nan
    x[2, 2, 5] = math.inf
    params = {"training": True, "momentum": 0.1, "eps": 1e-5}
    tensors = [x, *running(4), None, None]
    wide = [None if t is None else t.double() for t in tensors]
    call = Call.of(CATALOGUE["batch_norm"], tensors, params)
    y = channel_norm.prepare_forward(call)(*tensors)
    want = CATALOGUE["batch_norm"].reference(*wide, **params)[0]
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert y[:, 1:3].isnan().all() and y[:, [0, 3]].isfinite().all()
    assert tensors[1][[0, 3]].isfinite().all() and tensors[1][1].isnan()


def test_momentum_of_one_and_zero():
    x = random(*X)
    batch_norm(x, momentum=1.0)
    params = {"training": True, "momentum": 0.0, "eps": 1e-5}
    tensors = [x, *running(6), None, None]
    before = tensors[1].clone()
    channel_norm.prepare_forward(Call.of(CATALOGUE["batch_norm"], tensors, params))(*tensors)
    assert torch.equal(tensors[1], before)


@pytest.mark.parametrize("slices", [0, 1])
def test_beyond_2_31_elements(slices, monkeypatch):
    """Sample 2 starts 2^31 elements in. The 4 GiB are reserved; only the samples are touched."""
    only_tiling(monkeypatch, Tiling(4, 16, 1, slices=slices))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    x = torch.empty(2**31 + 64, dtype=F16, device=DEVICE).as_strided((3, 4, 16), (2**30, 16, 1))
    x.copy_(random(3, 4, 16))
    params = {"training": True, "momentum": 0.1, "eps": 1e-5}

    def result(t: torch.Tensor) -> torch.Tensor:
        call = Call.of(CATALOGUE["batch_norm"], [t, *[None] * 4], params)
        return channel_norm.prepare_forward(call)(t, None, None, None, None)

    assert torch.equal(result(x), result(x.contiguous()))


REFUSED = {  # id: (input, weight, words of the refusal)
    "f64": (lambda: random(2, 3, 4).double(), lambda: None, "torch.float64"),
    "f64-weight": (lambda: random(2, 3, 4), lambda: random(3).double(), "weight"),
    "empty": (lambda: random(0, 3, 4), lambda: None, "no elements"),
    "meta-device": (lambda: torch.empty(2, 3, 4, device="meta"), lambda: None, "meta"),
    "2^31-samples": (
        lambda: torch.empty(2**31, 1, 2, dtype=F16, device="meta").transpose(1, 2),
        lambda: None,
        "fit the index",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    make, weight, words = case
    x = make()
    params = {"num_groups": 1, "eps": 1e-5}
    refusal = supports_channel_norm(Call.of(CATALOGUE["group_norm"], [x, weight(), None], params))
    assert words in refusal.reason
    assert "\n" not in refusal.reason


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_rule_covers_every_shape(dtype, layout):
    """Resident tiles hold their set; slices are never more than tiles; at most 32 warps."""
    for n, c, s in ((1, 1, 2), (2, 3, 1), (8, 64, 32), (4, 256, 28), (3, 5, 7), (64, 2048, 7),
                    (4, 128, 1024), (512, 16, 56), (2, 70000, 3), (100000, 4, 1)):  # fmt: skip
        x = torch.empty(n, c, s, s, dtype=dtype, device="meta").to(memory_format=layout)
        params = {"training": True, "momentum": 0.1, "eps": 1e-5}
        call = Call.of(CATALOGUE["batch_norm"], [x, *[None] * 4], params, real=False)
        plan = forward_plan(call)
        t, v = plan.tiling, plan.view
        assert t.num_warps in (1, 2, 4, 8, 16, 32)
        if t.slices:
            assert 1 <= t.slices <= plan.items
        else:
            assert t.block_n * t.chunks >= v.cols and (not v.pool or t.block_m >= v.rows)
        assert rule(v, dtype.itemsize, 1, given=True).slices >= 1
