"""The formula's road owes what the others owe: checks, policy, autocast. Under vmap, jvp and a
functional gradient, and for a gradient of an op that has no backward."""

from __future__ import annotations

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln import road
from samples import SAMPLES

BATCH = 4


def vmapped(fn, x):
    return torch.func.vmap(fn)(x.expand(BATCH, *x.shape))


def pushed(fn, x):
    return torch.func.jvp(fn, (x,), (torch.ones_like(x),))


def differentiated(fn, x):
    def total(t):
        outs = fn(t)
        return (outs[0] if isinstance(outs, tuple) else outs).float().sum()

    return torch.func.grad(total)(x)


TRANSFORMS = {"vmap": vmapped, "jvp": pushed, "grad": differentiated}

IMAGE = torch.randn(2, 4, 6, 6)
ROW = torch.randn(8)
TOKENS = torch.randn(1, 9, 2, 3)
IDS = torch.tensor([0, 5, 2])
WEIGHT = torch.randn(6, 4, 3, 3)
WRONG = {
    "layer_norm-shape": (lambda t: F.layer_norm(t, (7,)), ROW, "input has shape"),
    "rms_norm-weight": (lambda t: F.rms_norm(t, (8,), torch.ones(1)), ROW, "weight has shape"),
    "rms_norm-dtype": (lambda t: F.rms_norm(t, (8,), IDS.new_ones(8)), ROW, "weight has dtype"),
    "fused_add-broadcast": (
        lambda t: F.fused_add_rms_norm(t, torch.ones(3, 8), (8,)),
        ROW,
        "residual has shape",
    ),
    "batch_norm-sizes": (
        lambda t: F.batch_norm(t, torch.zeros(3), torch.ones(3)),
        IMAGE,
        "running_mean has shape",
    ),
    "group_norm-groups": (lambda t: F.group_norm(t, 3), IMAGE, "num_groups"),
    "conv2d-groups": (lambda t: F.conv2d(t, WEIGHT, groups=3), IMAGE, "conv2d"),
    "conv2d-dtype": (lambda t: F.conv2d(t, WEIGHT.double()), IMAGE, "weight has dtype"),
    "max_pool2d-padding": (lambda t: F.max_pool2d(t, 2, padding=2), IMAGE, "padding"),
    "avg_pool2d-kernel": (lambda t: F.avg_pool2d(t, 9), IMAGE, "no window"),
    "mean_pooling-chunk": (lambda t: F.mean_pooling(t, 0), TOKENS, "chunk_size must be at least"),
    "mean_pooling-offsets": (
        lambda t: F.mean_pooling(t, 4, torch.tensor([0, 5, 3, 9])),
        TOKENS,
        "cu_seqlens must rise",
    ),
    "mean_pooling-num_chunks": (
        lambda t: F.mean_pooling(t, 4, torch.tensor([0, 3, 9]), num_chunks=1),
        TOKENS,
        "num_chunks is 1",
    ),
    "rope-odd": (lambda t: F.rope_neox(t, rotary_dim=5), torch.randn(3, 8), "rotary_dim"),
    "rope-ids": (
        lambda t: F.rope_neox_position_ids(t, IDS, max_position=4),
        torch.randn(3, 1, 8),
        r"position_ids must be in \[0, 4\)",
    ),
    "fft-n": (lambda t: F.fft(t, 0).real, ROW.cfloat(), "number of points, must be"),
    "mhc_post": (
        lambda t: F.mhc_post(t, torch.ones(2, 3), torch.ones(2, 10)),
        torch.randn(2, 4),
        "x_res has shape",
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_eagerly_is_refused_under_transforms(name, transform):
    fn, x, message = WRONG[name]
    with pytest.raises(opkiln.ArgumentError, match=message) as eager:
        fn(x)
    with pytest.raises(opkiln.ArgumentError, match=message) as transformed:
        TRANSFORMS[transform](fn, x)
    assert "\n" not in str(transformed.value)
    assert str(transformed.value) == str(eager.value)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_is_no_tensor_is_refused_under_transforms(transform):
    with pytest.raises(TypeError, match="weight must be a Tensor or None, got list"):
        TRANSFORMS[transform](lambda t: F.rms_norm(t, (8,), [1.0] * 8), ROW)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_strict_backend_other_than_torch_is_refused(transform):
    def named(backend):
        return lambda t: F.rms_norm(t, (8,), backend=backend)

    for backend in ("nope", "torch-compile", "opkiln"):
        with pytest.raises(opkiln.BackendError, match=f"backend {backend} cannot serve function"):
            TRANSFORMS[transform](named(backend), ROW)
    for backend in ("torch", "torch-ref"):
        TRANSFORMS[transform](named(backend), ROW)
    with (
        opkiln.use("nope", strict=True),
        pytest.raises(opkiln.BackendError, match="backend nope"),
    ):
        TRANSFORMS[transform](named(None), ROW)
    with opkiln.use("nope", "max_pool2d:nope"):  # a preference goes on to what works
        TRANSFORMS[transform](named(None), ROW)
    with opkiln.use("nope", "torch", strict=True):
        TRANSFORMS[transform](named(None), ROW)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_property_that_torch_does_not_promise_is_refused(transform):
    with (
        opkiln.use(batch_invariant=True),
        pytest.raises(opkiln.BackendError, match="torch: does not promise batch_invariant"),
    ):
        TRANSFORMS[transform](lambda t: F.rms_norm(t, (8,)), ROW)
    with opkiln.use(deterministic=True):
        TRANSFORMS[transform](lambda t: F.rms_norm(t, (8,)), ROW)


def first(outs):
    return outs[0] if isinstance(outs, tuple) else outs


AUTOCAST = {
    "fp32": (lambda t: F.rms_norm(t, (8,)), ROW.bfloat16(), torch.float32),
    "lower": (lambda t: F.conv2d(t, WEIGHT), IMAGE, torch.bfloat16),
    "alone": (lambda t: F.avg_pool2d(t, 2), IMAGE, torch.float32),
    "float64": (lambda t: F.conv2d(t, WEIGHT.double()), IMAGE.double(), torch.float64),
}


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_is_the_operators(name, transform):
    fn, x, dtype = AUTOCAST[name]
    with torch.autocast("cpu", torch.bfloat16):
        eager = fn(x)
        out = first(TRANSFORMS[transform](fn, x))
    assert eager.dtype == out.dtype == dtype
    close = {"rtol": 2**-7, "atol": 2**-6} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, eager.expand_as(out), **close)


def test_autocast_mixes_what_the_operator_mixes():
    """conv2d refuses mixed dtypes, but not under autocast, which casts both."""
    with torch.autocast("cpu", torch.bfloat16):
        out = vmapped(lambda t: F.conv2d(t, WEIGHT.half()), IMAGE)
    assert out.dtype == torch.bfloat16


def test_vmap_of_channels_last_and_of_every_rank():
    for x in (IMAGE, IMAGE.to(memory_format=torch.channels_last)):
        out = vmapped(lambda t: F.batch_norm(t, torch.zeros(4), torch.ones(4)), x)
        torch.testing.assert_close(out[0], F.batch_norm(x, torch.zeros(4), torch.ones(4)))


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_the_number_of_chunks_is_read_from_plain_offsets(transform):
    offsets = torch.tensor([0, 3, 3, 9])
    out = first(TRANSFORMS[transform](lambda t: F.mean_pooling(t, 4, offsets), TOKENS))
    torch.testing.assert_close(out, F.mean_pooling(TOKENS, 4, offsets).expand_as(out))


def test_vmap_over_offsets_needs_their_number():
    offsets = torch.tensor([[0, 3, 9], [0, 4, 9]])
    out = torch.func.vmap(lambda c: F.mean_pooling(TOKENS, 5, c, num_chunks=3))(offsets)
    for i in range(2):
        torch.testing.assert_close(out[i], F.mean_pooling(TOKENS, 5, offsets[i], num_chunks=3))
    with pytest.raises(opkiln.ArgumentError, match="num_chunks must be at least 0, got None"):
        torch.func.vmap(lambda c: F.mean_pooling(TOKENS, 5, c))(offsets)


@pytest.mark.parametrize("checks", [False, True])
def test_vmap_over_position_ids_computes(checks):
    x = torch.randn(2, 3, 1, 8)
    ids = torch.tensor([[0, 1, 2], [3, 2, 1]])
    with opkiln.use(checks=checks):
        out = torch.func.vmap(lambda t, i: F.rope_neox_position_ids(t, i, max_position=4))(x, ids)
    for i in range(2):
        want = F.rope_neox_position_ids(x[i], ids[i], max_position=4)
        torch.testing.assert_close(out[i], want)


@pytest.fixture
def no_formula(monkeypatch):
    def refuse(*args):
        raise AssertionError("took the formula's road")

    monkeypatch.setattr(road, "checked_formula", refuse)


def test_topk_of_scores_that_require_a_gradient_is_an_ordinary_call(no_formula):
    (scores, starts, ends, k), _ = SAMPLES["topk_selector"].build(torch.float32)
    want = F.topk_selector(scores, starts, ends, k)
    scores.requires_grad_()
    got = F.topk_selector(scores, starts, ends, k)
    assert torch.equal(got, want) and not got.requires_grad
    assert torch.equal(F.topk_selector(scores, starts, ends, k, backend="torch-ref"), want)
    with pytest.raises(opkiln.BackendError, match="no backend of that name"):
        F.topk_selector(scores, starts, ends, k, backend="nope")
    with pytest.raises(opkiln.ArgumentError, match="topk must not be negative"):
        F.topk_selector(scores, starts, ends, -1)
    with pytest.raises(opkiln.ArgumentError, match="starts has dtype float32"):
        F.topk_selector(scores, starts.float(), ends, k)
    with pytest.raises(opkiln.ArgumentError, match="starts has shape"):
        F.topk_selector(scores, starts[:, :1], ends, k)
    with pytest.raises(opkiln.ArgumentError, match="scores has dtype float16"):
        F.topk_selector(scores.half(), starts, ends, k)


def test_topk_under_vmap_is_validated():
    (scores, starts, ends, k), _ = SAMPLES["topk_selector"].build(torch.float32)
    out = vmapped(lambda t: F.topk_selector(t, starts, ends, k), scores)
    assert torch.equal(out[1], F.topk_selector(scores, starts, ends, k))
    with pytest.raises(opkiln.ArgumentError, match="topk must not be negative"):
        vmapped(lambda t: F.topk_selector(t, starts, ends, -1), scores)


def test_batch_norm_backward_with_a_gradient_is_validated():
    grad_out = torch.randn(2, 4, 6, requires_grad=True)
    x, stats = torch.randn(2, 4, 6), (torch.zeros(4), torch.ones(4))
    assert F.batch_norm_backward(grad_out, x, None, *stats)[0].requires_grad
    for backend in ("torch", "torch-ref"):
        F.batch_norm_backward(grad_out, x, None, *stats, backend=backend)
    with pytest.raises(opkiln.BackendError, match="backend nope cannot serve"):
        F.batch_norm_backward(grad_out, x, None, *stats, backend="nope")
    with pytest.raises(opkiln.ArgumentError, match="input has shape"):
        F.batch_norm_backward(grad_out, x[:1], None, *stats)
    with pytest.raises(opkiln.ArgumentError, match="mean has shape"):
        F.batch_norm_backward(grad_out, x, None, stats[0][:3], stats[1])
