"""opkiln.replace: what the plan says and does, and what stays as it was."""

from __future__ import annotations

import opkiln
import pytest
import torch
from opkiln import measured
from serving import Calls, small_model
from torch.nn.utils import parametrize


@pytest.fixture(autouse=True)
def kernels_of_torch():
    """Who computes is no matter here, and Triton's interpreter is slow."""
    with opkiln.use("torch"):
        yield


OPS = {"conv2d", "batch_norm", "max_pool2d", "layer_norm", "rms_norm"}
IMAGE = (2, 3, 12, 12)


def test_the_dry_run_changes_nothing_and_the_plan_is_a_table() -> None:
    model = small_model()
    plan = opkiln.replace(model)
    assert not plan.applied and type(model[0]) is torch.nn.Conv2d
    assert {row.way.op for row in plan.replaced} == OPS
    lines = str(plan).splitlines()
    assert lines[0] == "Sequential: 5 modules can be served by opkiln"
    assert lines[1].split()[:3] == ["0", "Conv2d", "conv2d"]
    assert lines[1].endswith("unknown: shapes come with example=")
    assert len(lines) == 6


def test_served_and_reverted() -> None:
    model = small_model().train()
    x = torch.randn(IMAGE)
    plan = opkiln.replace(model, dry_run=False)
    assert plan.applied and str(plan).startswith("Sequential: 5 modules served")
    with Calls() as calls:
        model(x)
    assert calls == dict.fromkeys(OPS, 1)
    plan.revert()
    with Calls() as calls:
        model(x)
    assert not calls
    plan.apply()
    with Calls() as calls:
        model(x)
    assert calls == dict.fromkeys(OPS, 1)


def snapshot(model: torch.nn.Module) -> dict[str, object]:
    """All that may be seen of a model: objects by identity, values by their bits."""
    everything = list(model.named_modules(remove_duplicate=False))
    return {
        "modules": [(name, id(m), type(m)) for name, m in everything],
        "attributes": [[(k, id(v)) for k, v in vars(m).items()] for _, m in everything],
        "hooks": [
            [(k, id(v)) for k, v in getattr(m, kind).items()]
            for _, m in everything
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        ],
        "training": [m.training for _, m in everything],
        "tensors": [
            (name, id(t), t.data_ptr(), t.requires_grad)
            for found in (model.named_parameters, model.named_buffers)
            for name, t in found(remove_duplicate=False)
        ],
        "state": [(k, v.tolist()) for k, v in model.state_dict().items()],
        "repr": repr(model),
    }


def test_apply_and_revert_leave_the_model_as_it_was() -> None:
    model = torch.nn.ModuleDict({"a": small_model(), "b": small_model().eval()})
    model["a"][0].weight = model["b"][0].weight  # tied
    model["again"] = model["a"]  # one module under two names
    seen: list[str] = []
    model["b"][6].register_forward_hook(lambda m, args, out: seen.append("after"))
    model["b"][6].register_forward_pre_hook(lambda m, args: seen.append("before"))
    model["a"][1].weight.requires_grad_(False)
    before = snapshot(model)
    plan = opkiln.replace(model)
    assert snapshot(model) == before
    plan.apply()
    served = snapshot(model)
    assert {k for k in before if served[k] != before[k]} == {"modules"}  # their class
    assert [m[:2] for m in served["modules"]] == [m[:2] for m in before["modules"]]
    model["b"](torch.randn(IMAGE))
    assert seen == ["before", "after"]
    plan.revert()
    assert snapshot(model) == before


def test_an_example_leaves_statistics_and_random_numbers_alone() -> None:
    model = small_model().train()
    before, state = snapshot(model), torch.get_rng_state()
    plan = opkiln.replace(model, example=torch.randn(IMAGE, generator=torch.Generator()))
    assert snapshot(model) == before and torch.equal(torch.get_rng_state(), state)
    assert [c.spec.name for row in plan.replaced for c in row.calls] == [
        "conv2d", "batch_norm", "max_pool2d", "layer_norm", "rms_norm",
    ]  # fmt: skip
    shapes = [c.tensors.input.shape for row in plan.replaced for c in row.calls]
    assert shapes == [IMAGE, (2, 8, 12, 12), (2, 8, 12, 12), (2, 8, 36), (2, 8, 36)]
    assert all(c.needs_grad for row in plan.replaced for c in row.calls if row.name == "0")
    with pytest.raises(RuntimeError):
        opkiln.replace(model, example=torch.randn(2, 5, 12, 12))
    assert snapshot(model) == before


def test_examples_by_position_and_by_keyword() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)
            self.unused = torch.nn.LayerNorm(4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.norm(a) + self.norm(input=b)

    x = torch.randn(3, 8)
    for example in ((x, x), {"a": x, "b": x}):
        norm, unused = opkiln.replace(Model(), example=example).replaced
        assert [len(norm.calls), len(unused.calls)] == [2, 0]
        assert unused.gain == "unknown: not called on the example"
        assert norm.gain == "unknown: no times were measured on cpu"


def test_gain_from_the_shipped_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of the H200, looked up for calls on a CPU where there is no GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr(measured, "arch_of", lambda device: "sm90")
    monkeypatch.setattr(measured, "tables", measured.shipped)
    model = torch.nn.Sequential(torch.nn.RMSNorm(4096), torch.nn.RMSNorm(4096)).half()
    model.append(torch.nn.LayerNorm(3, dtype=torch.float16)).append(torch.nn.Softmax(-1))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[2](self.parts[0](self.parts[1](x))[:, :3])

    example = torch.ones(2048, 4096, dtype=torch.float16, device=device)
    with opkiln.use("opkiln"):
        plan = opkiln.replace(Model().to(device), example=example)
    first, second, other = plan.replaced
    (call,) = first.calls
    entry = measured.entry_of(call)
    assert entry is not None
    assert (first.gain.torch_us, first.gain.chosen_us) == (entry.us["torch"], entry.us["opkiln"])
    assert other.gain == "unknown: no such call was measured"
    text = str(plan)
    assert f"{entry.us['torch']:.4g} -> {entry.us['opkiln']:.4g} us" in text
    total = f"{2 * entry.us['torch']:.4g} -> {2 * entry.us['opkiln']:.4g} us"
    assert f"device time of the forward of 2 of 3: {total}" in text and entry.source in text
    assert second.gain == first.gain


def test_applied_twice_reverted_twice_and_a_changed_class() -> None:
    model = small_model()
    plan = opkiln.replace(model)
    with pytest.raises(RuntimeError, match="not applied"):
        plan.revert()
    plan.apply()
    with pytest.raises(RuntimeError, match="applied already"):
        plan.apply()
    parametrize.register_parametrization(model[0], "weight", torch.nn.Identity())
    classes = [type(m) for m in model]
    with pytest.raises(RuntimeError, match="the class of 0 has been changed"):
        plan.revert()
    assert [type(m) for m in model] == classes and plan.applied
    parametrize.remove_parametrizations(model[0], "weight")
    plan.revert()
    assert type(model[0]) is torch.nn.Conv2d


def test_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a Module, got function"):
        opkiln.replace(lambda x: x)  # type: ignore[arg-type]
