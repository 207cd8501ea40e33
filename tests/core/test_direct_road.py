"""A call that is like the last one is recognised, any other one is not.

Other roads: test_road.py; what a launch does: test_direct_launch.py.
"""

from __future__ import annotations

import threading

import numpy as np
import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln import dispatch, recent, road
from opkiln.registry import REGISTRY
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

N = 8


def norm(x, weight=None, **kwargs):
    return F.rms_norm(x, (N,), weight, **kwargs)


def expected(x, weight=None, eps=None):
    return torch.nn.functional.rms_norm(x, (N,), weight, eps)


@pytest.fixture
def served(monkeypatch):
    """How many calls were not recognised."""
    calls = []
    real, plans = road.serve, {}
    monkeypatch.setattr(road, "SITES", {})
    monkeypatch.setattr(road, "PLANS", plans)
    monkeypatch.setattr(dispatch, "PLANS", plans)
    monkeypatch.setattr(road, "serve", lambda *args: calls.append(args) or real(*args))
    return calls


@pytest.fixture
def x():
    return torch.randn(3, N)


@pytest.fixture
def weight():
    return torch.randn(N)


@pytest.fixture
def warm(x, weight, served):
    """norm(x, weight) is recognised from now on; nothing was counted."""
    for _ in range(2):
        norm(x, weight)
    served.clear()
    norm(x, weight)
    assert not served
    return served


def test_this_torch_has_guards():
    assert recent.guards_work()


def test_a_repeated_call_is_recognised(x, weight, served):
    outs = [norm(x, weight) for _ in range(4)]
    assert len(served) == 2
    assert len({out.data_ptr() for out in outs}) == 4
    for out in outs:
        torch.testing.assert_close(out, expected(x, weight))


def test_other_values_of_like_tensors_are_recognised(x, weight, warm):
    other = torch.randn(5, N)[1:4].clone()
    torch.testing.assert_close(norm(other, weight), expected(other, weight))
    x.add_(1)
    torch.testing.assert_close(norm(x, weight), expected(x, weight))
    assert not warm


def test_keywords_and_positions_are_one_call(x, weight, warm):
    F.rms_norm(normalized_shape=(N,), weight=weight, input=x)
    F.rms_norm(x, weight.shape, weight)
    assert not warm
    F.rms_norm(x, [N], weight)
    assert len(warm) == 1


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class HiddenDispatches(Dispatches):
    """Of the kind that torch.compile, and so its guards, are to take no notice of."""

    @classmethod
    def ignore_compile_internals(cls):
        return True


MODES = {
    "function_mode": Functions,
    "dispatch_mode": Dispatches,
    "hidden_dispatch_mode": HiddenDispatches,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default_device": lambda: torch.device("cpu"),
    "inference_mode": torch.inference_mode,
    "dual_level": forward_ad.dual_level,
    "fake_mode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_seen(x, weight, warm, mode):
    with MODES[mode]():
        norm(x, weight)
    assert len(warm) == 1
    torch.testing.assert_close(norm(x, weight), expected(x, weight))
    assert len(warm) == 1


class Subclass(torch.Tensor):
    pass


OTHERS = {
    "rows": lambda x: x[:2],
    "ndim": lambda x: x[None],
    "strides": lambda x: x.t().contiguous().t(),
    "dtype": lambda x: x.double(),
    "alignment": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(3, N),
    "subclass": lambda x: x.as_subclass(Subclass),
    "negated": lambda x: torch._neg_view(-x),
    "gradient": lambda x: x.clone().requires_grad_(),
    "inference": lambda x: torch.inference_mode()(torch.clone)(x),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_tensor_is_seen(x, weight, warm, kind):
    other = OTHERS[kind](x)
    out = norm(other, weight)
    assert len(warm) == 1
    want = expected(other.detach().float().as_subclass(torch.Tensor), weight)
    torch.testing.assert_close(out.detach().float().as_subclass(torch.Tensor), want)
    assert out.requires_grad == other.requires_grad and out.dtype == other.dtype
    assert out.is_contiguous()


REFUSED = {
    "sparse": (lambda x: x.to_sparse(), opkiln.ArgumentError),
    "none": (lambda x: None, TypeError),
    "numpy": (lambda x: x.numpy(), TypeError),
    "width": (lambda x: x[:, :4].contiguous(), opkiln.ArgumentError),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_allowed_is_refused_after_a_call_that_is(x, weight, warm, kind):
    make, error = REFUSED[kind]
    with pytest.raises(error):
        norm(make(x), weight)


def test_a_meta_tensor_is_no_cpu_tensor(x, weight, warm):
    assert norm(x.to("meta"), weight.to("meta")).device.type == "meta"


def test_a_conjugate_tensor_is_seen(served):
    x = torch.randn(3, N, dtype=torch.complex64)
    for _ in range(3):
        F.fft(x)
    assert len(served) == 2
    torch.testing.assert_close(F.fft(x.conj()), torch.fft.fft(x.conj()))
    assert len(served) == 3


def test_a_missing_and_a_present_weight_are_two_calls(x, weight, warm):
    for _ in range(3):
        torch.testing.assert_close(norm(x), expected(x))
        torch.testing.assert_close(norm(x, weight), expected(x, weight))
    bias = torch.randn(N)
    for w, b in ((None, bias), (weight, None), (weight, bias), (None, None)) * 3:
        want = torch.nn.functional.layer_norm(x, (N,), w, b)
        torch.testing.assert_close(F.layer_norm(x, (N,), w, b), want)


def test_one_tensor_in_two_places_is_served(served):
    x = torch.randn(N)
    for _ in range(4):
        torch.testing.assert_close(norm(x, x), expected(x, x))
    other = torch.randn(N)
    for _ in range(4):
        torch.testing.assert_close(norm(x, other), expected(x, other))


def test_parameters_are_recognised_without_gradient_mode_only(x, served):
    weight = torch.nn.Parameter(torch.randn(N))
    with torch.no_grad():
        for _ in range(3):
            assert not norm(x, weight).requires_grad
    assert len(served) == 2
    assert norm(x, weight).requires_grad
    assert len(served) == 3


def test_transforms_are_seen(x, weight, warm):
    want = expected(x, weight)
    rows = torch.func.vmap(lambda row: norm(row, weight))(x)
    torch.testing.assert_close(rows, want)
    inside = torch.func.vmap(lambda row: row + norm(x, weight).sum())(x)
    torch.testing.assert_close(inside, x + want.sum())
    torch.func.grad(lambda t: norm(t, weight).sum())(x)
    _, tangent = torch.func.jvp(lambda t: norm(t, weight), (x,), (torch.ones_like(x),))
    _, want_tangent = torch.func.jvp(lambda t: expected(t, weight), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, want_tangent)
    assert len(warm) == 4


def test_tracers_are_seen(x, weight, warm):
    assert "opkiln.rms_norm" in make_fx(lambda a, b: norm(a, b))(x, weight).code
    torch._dynamo.reset()
    seen = []
    compiled = torch.compile(norm, backend=lambda graph, _: seen.append(graph.code) or graph)
    torch.testing.assert_close(compiled(x, weight), expected(x, weight))
    assert "opkiln.rms_norm" in seen[0]
    assert "rms_norm" in str(opkiln.explain(F.rms_norm, x, (N,), weight))


def test_parameters_that_are_equal_are_not_the_same(x, weight, served):
    image = torch.randn(1, 2, 6, 6)
    for _ in range(3):
        F.max_pool2d(image, (1, 1))
        F.max_pool2d(image, 1)
    for wrong in (True, 1.0, (1, True), (1.0, 1), [1, 1.0]):
        with pytest.raises(TypeError):
            F.max_pool2d(image, wrong)
    with pytest.raises(TypeError):
        F.max_pool2d(image, (1, 1), ceil_mode=0)


def test_a_number_of_numpy_is_not_its_bytes(x, weight, served):
    small = np.float32(1e-5)
    large = np.frombuffer(small.tobytes(), np.int32)[0]
    for _ in range(3):
        torch.testing.assert_close(norm(x, eps=small), expected(x, eps=float(small)))
        torch.testing.assert_close(norm(x, eps=large), expected(x, eps=float(large)))
    with pytest.raises(TypeError):
        norm(x, eps=small.tobytes())


def test_a_tensor_argument_is_read_each_time(x, served):
    eps = torch.tensor(1e-5)
    for value in (1e-5, 1.0, 2.0):
        eps.fill_(value)
        torch.testing.assert_close(norm(x, eps=eps), expected(x, eps=value))


def test_a_changed_list_is_another_argument(served):
    image, kernel = torch.randn(1, 2, 6, 6), [2, 2]
    for _ in range(3):
        F.max_pool2d(image, kernel)
    kernel[0] = 3
    assert F.max_pool2d(image, kernel).shape == (1, 2, 2, 3)


def test_policies_and_backends_have_plans_of_their_own(x, weight, warm):
    for enter in (
        lambda: opkiln.use("torch-ref"),
        lambda: opkiln.use(deterministic=True),
        lambda: opkiln.use(strict=True),
    ):
        before = len(warm)
        with enter():
            norm(x, weight)
        assert len(warm) == before + 1
        with enter():
            norm(x, weight)
            norm(x, weight)
        assert len(warm) == before + 2
        norm(x, weight)
        assert len(warm) == before + 2
    with pytest.raises(opkiln.BackendError):
        norm(x, weight, backend="no such backend")


def test_a_new_plugin_is_asked(x, weight, warm):
    class Plugin:
        OPKILN_API = 1

        @staticmethod
        @opkiln.hookimpl
        def opkiln_implementations():
            return []

    with REGISTRY.temporarily(Plugin, "nothing"):
        norm(x, weight)
    norm(x, weight)
    assert len(warm) >= 2


def test_sizes_that_alternate(served):
    xs = [torch.randn(rows, N) for rows in range(1, 8)]
    for _ in range(4):
        for x in xs:
            torch.testing.assert_close(norm(x), expected(x))
    (site,) = road.SITES.values()
    assert len(site.recent) == 1
    for x in xs:
        for _ in range(3):
            norm(x)
    assert len(site.recent) == recent.MAX_RECENT


def test_sites_are_bounded(x, served, monkeypatch):
    monkeypatch.setattr(recent, "MAX_SITES", 4)
    for i in range(8):
        for _ in range(3):
            torch.testing.assert_close(norm(x, eps=1.0 + i), expected(x, eps=1.0 + i))
    assert len(road.SITES) <= 4


def test_without_guards_every_call_is_named_in_full(x, weight, served, monkeypatch):
    monkeypatch.setattr(recent, "guards_work", lambda: False)
    for _ in range(4):
        torch.testing.assert_close(norm(x, weight), expected(x, weight))
    assert len(served) == 4


def test_in_place_results_and_versions(served):
    weight = torch.randn(N)
    for _ in range(4):
        x, residual = torch.randn(3, N), torch.randn(3, N)
        want = expected(x + residual, weight, 1e-6)
        version = x._version, residual._version
        out, _ = F.fused_add_rms_norm(x, residual, (N,), weight, inplace=True)
        assert out is x
        torch.testing.assert_close(x, want)
        assert x._version > version[0] and residual._version > version[1]
    assert len(served) == 2
    both = torch.randn(5, N)
    for _ in range(2):
        with pytest.raises(opkiln.ArgumentError, match="share memory"):
            F.fused_add_rms_norm(both[:3], both[2:], (N,), weight, inplace=True)


def test_threads(served):
    """Calls of several threads, with policies and tensors of their own."""
    failures = []

    def work(number):
        x, weight = torch.randn(2 + number % 2, N), torch.randn(N)
        want = expected(x, weight)
        for i in range(300):
            # Triton's interpreter is not for several threads.
            with opkiln.use("torch-ref" if number % 2 else "torch"):
                out = norm(x, weight, eps=None if i % 3 else torch.finfo(torch.float32).eps)
            if not torch.allclose(out, want, atol=1e-6):
                failures.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
