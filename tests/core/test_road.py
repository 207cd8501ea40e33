"""The direct road: every clause of its predicate, and right results on the other roads."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln import road
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = (8,)


def expected(x):
    return torch.nn.functional.rms_norm(x, SHAPE)


@pytest.fixture
def x():
    return torch.randn(3, 8)


@pytest.fixture
def roads(monkeypatch):
    """Which roads calls took: "direct", "operator" or "formula"."""
    taken = []
    for name, label in (("call_operator", "operator"), ("checked_formula", "formula")):
        real = getattr(road, name)

        def spy(*args, real=real, label=label):
            taken.append(label)
            return real(*args)

        monkeypatch.setattr(road, name, spy)
    monkeypatch.setattr(road, "SITES", {})  # a call that is recognised makes no key
    real_key = road.tensor_key
    monkeypatch.setattr(road, "tensor_key", lambda t: taken.append("direct") or real_key(t))
    return lambda: sorted(set(taken))


class Subclass(torch.Tensor):
    pass


class CountingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class CountingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_plain_call_is_direct(x, roads):
    torch.testing.assert_close(F.rms_norm(x, SHAPE), expected(x))
    assert roads() == ["direct"]


def test_parameters_without_gradient_mode_are_direct(x, roads):
    weight = torch.nn.Parameter(torch.randn(8))
    with torch.no_grad():
        F.rms_norm(x, SHAPE, weight)
    assert roads() == ["direct"]


MODES = {
    "torch_function_mode": CountingFunctions,
    "torch_dispatch_mode": CountingDispatch,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default_device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_take_the_operator(x, roads, mode):
    with MODES[mode]():
        assert not road.is_direct((x,))
        torch.testing.assert_close(F.rms_norm(x, SHAPE), expected(x))
    assert roads() == ["operator"]


def test_subclass_takes_the_operator(x, roads):
    out = F.rms_norm(x.as_subclass(Subclass), SHAPE)
    assert type(out) is Subclass
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected(x))
    assert roads() == ["operator"]


def test_gradient_takes_the_operator(x, roads):
    y = F.rms_norm(x.requires_grad_(), SHAPE)
    assert y.requires_grad and y.grad_fn is not None
    assert roads() == ["operator"]


def test_negated_view_takes_the_operator(roads):
    view = torch.randn(3, 8, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    torch.testing.assert_close(F.rms_norm(view, SHAPE), expected(view.clone()))
    assert roads() == ["operator"]


def test_conjugate_view_is_not_plain():
    assert not road.is_plain(torch.randn(3, dtype=torch.complex64).conj())


def test_fake_tensors_take_the_operator(roads):
    with FakeTensorMode():
        out = F.rms_norm(torch.empty(5, 8, dtype=torch.float16), SHAPE)
    assert out.shape == (5, 8) and out.dtype == torch.float16
    assert roads() == ["operator"]


def test_make_fx_records_the_operator(x):
    graph = make_fx(lambda t: F.rms_norm(t, SHAPE))(x)
    assert "opkiln.rms_norm" in graph.code
    torch.testing.assert_close(graph(x), expected(x))


def test_vmap_takes_the_formula(x, roads):
    out = torch.func.vmap(lambda row: F.rms_norm(row, SHAPE))(x)
    torch.testing.assert_close(out, expected(x))
    assert roads() == ["formula"]


def test_functional_grad_takes_the_formula(x, roads):
    got = torch.func.grad(lambda t: F.rms_norm(t, SHAPE).square().sum())(x)
    want = torch.func.grad(lambda t: expected(t).square().sum())(x)
    torch.testing.assert_close(got, want)
    assert roads() == ["formula"]


def test_jvp_takes_the_formula(x, roads):
    tangent = torch.randn_like(x)
    got = torch.func.jvp(lambda t: F.rms_norm(t, SHAPE), (x,), (tangent,))
    want = torch.func.jvp(expected, (x,), (tangent,))
    torch.testing.assert_close(got, want)
    assert roads() == ["formula"]


def test_forward_ad_takes_the_formula(x, roads):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(F.rms_norm(dual, SHAPE)).tangent
        want = forward_ad.unpack_dual(expected(dual)).tangent
    torch.testing.assert_close(tangent, want)
    assert roads() == ["formula"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_records_the_operator(x, dynamic):
    seen = []

    def backend(graph, inputs):
        seen.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    out = torch.compile(lambda t: F.rms_norm(t, SHAPE), backend=backend, dynamic=dynamic)(x)
    torch.testing.assert_close(out, expected(x))
    assert any("opkiln.rms_norm" in code for code in seen)


def test_compile_keeps_the_policy_of_its_trace(x):
    seen = []

    def backend(graph, inputs):
        seen.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    with opkiln.use("torch-ref", deterministic=True):
        torch.compile(lambda t: F.rms_norm(t, SHAPE), backend=backend, fullgraph=True)(x)
    assert "torch-ref" in seen[0] and "deterministic" in seen[0]


def test_backward_runs_under_the_policy_of_its_forward(x, monkeypatch):
    policies = []
    from opkiln import torch_library

    real = torch_library.plan
    monkeypatch.setattr(
        torch_library, "plan", lambda *a: policies.append((a[0].name, a[3])) or real(*a)
    )
    with opkiln.use("torch-ref"):
        y = F.rms_norm(x.requires_grad_(), SHAPE)
    y.sum().backward()
    assert [name for name, _ in policies] == ["rms_norm", "rms_norm_backward"]
    assert all(p.backends_for("rms_norm") == ("torch-ref",) for _, p in policies)


def test_a_strict_backend_of_the_forward_does_not_bind_the_backward(x):
    y = F.rms_norm(x.requires_grad_(), SHAPE, backend="torch-ref")
    y.sum().backward()
    assert x.grad is not None


def test_mutated_input_gets_a_new_version():
    running = torch.zeros(4), torch.ones(4)
    before = running[0]._version
    F.batch_norm(torch.randn(3, 4, 5), *running, training=True)
    assert running[0]._version > before
    evaluated = running[0]._version
    F.batch_norm(torch.randn(3, 4, 5), *running, training=False)
    assert running[0]._version == evaluated


def test_running_statistics_that_require_a_gradient_are_refused():
    running = torch.zeros(4, requires_grad=True), torch.ones(4)
    with pytest.raises(opkiln.ArgumentError, match="running_mean requires a gradient"):
        F.batch_norm(torch.randn(3, 4, 5), *running, training=True)


def test_inference_mode_is_direct(x, roads):
    with torch.inference_mode(), contextlib.nullcontext():
        F.rms_norm(x, SHAPE)
    assert roads() == ["direct"]


def test_sparse_tensor_is_not_plain():
    assert not road.is_plain(torch.eye(3).to_sparse())
    assert road.is_plain(torch.eye(3))
    with pytest.raises(opkiln.ArgumentError, match=r"input has layout torch\.sparse_coo, allowed"):
        F.rms_norm(torch.eye(3).to_sparse(), (3,))


def test_the_first_call_of_a_process_makes_the_plan_of_the_next():
    """Before it the registry has loaded no plugin, so its generation is another one."""
    code = (
        "import torch, opkiln.functional as F; from opkiln.dispatch import PLANS\n"
        "for _ in range(3): F.rms_norm(torch.ones(2, 8), (8,))\n"
        "print(len(PLANS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
