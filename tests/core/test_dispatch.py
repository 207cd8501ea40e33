"""Who serves a call: strict names, preferences, priorities, traits, failing plugins, plans."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from dataclasses import replace

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln import dispatch, road
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.registry import REGISTRY, Implementation, Refusal, accepts_everything
from opkiln.spec import Call, TensorMeta


def marked(value):
    """A loader whose launch returns ones times `value`, so that a test sees who served."""
    return lambda: lambda call: lambda *tensors: call.outputs[0].empty().fill_(value)


def broken_loader():
    raise ImportError("no compiler here")


def plugin(**overrides):
    fields = dict(
        op="rms_norm",
        backend="probe",
        version="1",
        spec_version=1,
        supports=accepts_everything,
        loader=marked(7.0),
    )
    impl = Implementation(**(fields | overrides))

    @opkiln.hookimpl
    def opkiln_implementations():
        return [impl]

    module = types.ModuleType("probe")
    module.OPKILN_API = 1
    module.opkiln_implementations = opkiln_implementations
    return module


@pytest.fixture
def x():
    return torch.randn(3, 8)


def test_strict_backend_serves(x):
    with REGISTRY.temporarily(plugin(auto=False), "probe:probe"):
        assert F.rms_norm(x, (8,), backend="probe").eq(7).all()
        assert not F.rms_norm(x, (8,)).eq(7).all()
    with pytest.raises(opkiln.BackendError, match="no backend of that name implements rms_norm"):
        F.rms_norm(x, (8,), backend="probe")


def test_strict_backend_that_refuses_raises_its_reason(x):
    refusing = plugin(supports=lambda call: Refusal("only on Sundays"))
    with REGISTRY.temporarily(refusing, "probe:probe"):
        with pytest.raises(opkiln.BackendError, match="probe: only on Sundays"):
            F.rms_norm(x, (8,), backend="probe")


def test_preference_falls_through_and_explain_says_why(x):
    refusing = plugin(supports=lambda call: Refusal("only on Sundays"), priority=990)
    with REGISTRY.temporarily(refusing, "probe:probe"), opkiln.use("probe"):
        assert not F.rms_norm(x, (8,)).eq(7).all()
        rows = {c.backend: c for c in opkiln.explain(F.rms_norm, x, (8,)).candidates}
        assert rows["probe"].status == "refused"
        assert rows["probe"].reason == "only on Sundays"


def test_strict_preference_raises(x):
    refusing = plugin(supports=lambda call: Refusal("only on Sundays"))
    with REGISTRY.temporarily(refusing, "probe:probe"), opkiln.use("probe", strict=True):
        with pytest.raises(opkiln.BackendError, match="only on Sundays"):
            F.rms_norm(x, (8,))


def test_a_preference_for_one_op_leaves_the_others_alone(x):
    with REGISTRY.temporarily(plugin(auto=False), "probe:probe"):
        with opkiln.use("rms_norm:probe", strict=True):
            assert F.rms_norm(x, (8,)).eq(7).all()
            assert F.max_pool2d(x[None], 2).shape == (1, 1, 4)


def test_largest_priority_wins(x):
    with REGISTRY.temporarily(plugin(priority=500), "a:a"):
        better = plugin(backend="better", priority=600, loader=marked(9.0))
        with REGISTRY.temporarily(better, "b:b"):
            assert F.rms_norm(x, (8,)).eq(9).all()
            explanation = opkiln.explain(F.rms_norm, x, (8,))
            assert explanation.chosen == "better"
            assert "priority 600" in str(explanation)


def test_installing_a_plugin_replaces_cached_plans(x):
    F.rms_norm(x, (8,))
    with REGISTRY.temporarily(plugin(priority=500), "probe:probe"):
        assert F.rms_norm(x, (8,)).eq(7).all()
    assert not F.rms_norm(x, (8,)).eq(7).all()


@pytest.mark.parametrize("trait", ["deterministic", "batch_invariant"])
def test_policy_filters_by_trait(x, trait):
    with REGISTRY.temporarily(plugin(priority=500, traits=frozenset()), "probe:probe"):
        with opkiln.use("probe", strict=True, **{trait: True}):
            with pytest.raises(opkiln.BackendError, match=f"does not promise {trait}"):
                F.rms_norm(x, (8,))


def test_supports_that_raises_is_a_refusal_with_a_warning(x):
    def supports(call):
        raise KeyError("sm_999")

    name = "raising"
    with REGISTRY.temporarily(plugin(backend=name, supports=supports, priority=500), "probe:probe"):
        with pytest.warns(UserWarning, match="supports\\(\\) raised KeyError: 'sm_999'"):
            out = F.rms_norm(x, (8,))
        torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,)))


def test_loader_that_fails_falls_back_in_auto_and_raises_when_named(x):
    failing = plugin(backend="failing", loader=broken_loader, priority=500)
    with REGISTRY.temporarily(failing, "probe:probe"):
        with pytest.warns(UserWarning, match="could not prepare a call, ImportError: no compiler"):
            F.rms_norm(x, (8,))
        with pytest.raises(ImportError, match="no compiler here"):
            F.rms_norm(x, (8,), backend="failing")


def test_empty_outputs_reach_no_kernel():
    def explode(call):
        raise AssertionError("a kernel saw an empty grid")

    with REGISTRY.temporarily(plugin(loader=lambda: explode, priority=500), "probe:probe"):
        assert F.rms_norm(torch.empty(3, 0, 8), (8,), backend="probe").shape == (3, 0, 8)


def test_no_kernel_sees_an_empty_batch_in_training():
    """Its statistics are outputs of some size, and it would write the running ones."""

    def explode(call):
        raise AssertionError("a kernel saw an empty grid")

    kernel = plugin(op="batch_norm", loader=lambda: explode, priority=500)
    x, running = torch.empty(0, 3, 4, requires_grad=True), (torch.zeros(3), torch.ones(3))
    with REGISTRY.temporarily(kernel, "probe:probe"):
        F.batch_norm(x, *running, training=True, backend="probe").sum().backward()
    assert x.grad.shape == (0, 3, 4)


IDS = torch.tensor([0, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("device", "checks", "raises"),
    [("cpu", False, True), ("cuda", True, True), ("cuda", False, False)],
)
def test_values_are_checked_on_a_cpu_and_on_a_gpu_only_if_asked(device, checks, raises):
    """The launch that dispatch makes for a call on that device, given tensors with a wrong id."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    spec = CATALOGUE["rope_neox_position_ids"]
    tensors = (torch.zeros(2, 1, 4), IDS)
    metas = [replace(TensorMeta.of(t), device=where) for t in tensors]
    params = {"max_position": 4, "base": 1e4, "rotary_dim": 4}
    call = Call(
        spec,
        types.SimpleNamespace(**dict(zip(spec.tensor_names, metas, strict=True))),
        types.SimpleNamespace(**params),
        Policy(checks=checks),
    )
    launch = dispatch._guard(call, lambda *tensors: "computed")
    if raises:
        with pytest.raises(
            opkiln.ArgumentError, match=r"must be in \[0, 4\), got values from 0 to 9"
        ):
            launch(*tensors)
    else:
        assert launch(*tensors) == "computed"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ask", ["use", "environment"])
def test_values_are_checked_on_a_gpu_if_asked(ask):
    code = (
        "import torch, opkiln, opkiln.functional as F\n"
        "x, ids = torch.zeros(2, 1, 4, device='cuda'), torch.tensor([0, 9], device='cuda')\n"
        "with opkiln.use(**{flags}):\n"
        "    F.rope_neox_position_ids(x, ids, max_position=4)\n"
        "torch.cuda.synchronize()"
    )
    for on in (False, True):
        flags = {"checks": on} if ask == "use" else {}
        env = os.environ | {"OPKILN_CHECKS": str(int(on and ask == "environment"))}
        run = [sys.executable, "-c", code.format(flags=flags)]
        done = subprocess.run(run, env=env, capture_output=True, text=True)
        assert (done.returncode != 0) == on, done.stderr
        assert ("position_ids must be in [0, 4), got values from 0 to 9" in done.stderr) == on


def test_a_repeated_call_reuses_its_plan(x, monkeypatch):
    made = []
    real = road.make_plan
    monkeypatch.setattr(road, "make_plan", lambda *args: made.append(1) or real(*args))
    for _ in range(3):
        F.rms_norm(x, [8], eps=3e-6)
    assert len(made) == 1
    F.rms_norm(x.double(), [8], eps=3e-6)
    F.rms_norm(x, [8], eps=4e-6)
    F.rms_norm(x.t().contiguous().t(), [8], eps=3e-6)
    with opkiln.use("torch"):
        F.rms_norm(x, [8], eps=3e-6)
    assert len(made) == 5


def test_plans_are_bounded(x, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_PLANS", 4)
    for i in range(8):
        F.rms_norm(x, (8,), eps=1e-3 + i)
    assert len(dispatch.PLANS) <= 4


def test_explain_names_the_package_that_would_serve(x):
    text = str(opkiln.explain(F.rms_norm, x, (8,)))
    assert "RMSNormFwd" in text and "float32[3, 8]" in text


def test_explain_runs_nothing():
    running = torch.zeros(4), torch.ones(4)
    opkiln.explain(F.batch_norm, torch.randn(3, 4, 5), *running, training=True)
    assert running[0].eq(0).all() and running[1].eq(1).all()


def test_explain_of_a_foreign_function_is_refused(x):
    with pytest.raises(opkiln.ArgumentError, match=r"is no function of opkiln\.functional"):
        opkiln.explain(torch.nn.functional.rms_norm, x, (8,))


def test_backends_of_an_unknown_op():
    with pytest.raises(opkiln.ArgumentError, match="no op 'rmsnorm'"):
        opkiln.backends("rmsnorm")
    assert {"torch", "torch-ref"} <= set(opkiln.backends("rms_norm"))
