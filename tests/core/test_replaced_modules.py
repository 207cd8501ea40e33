"""opkiln.replace: which modules are served, and how a served module behaves."""

from __future__ import annotations

import copy
import io
import random

import opkiln
import pytest
import torch
from opkiln import policy
from opkiln.replacing.match import NAMES, TorchWay
from serving import Calls, compiled_by_a_spy, small_model
from torch.nn.utils import parametrizations


@pytest.fixture(autouse=True)
def kernels_of_torch():
    """Who computes is no matter here, and Triton's interpreter is slow."""
    with opkiln.use("torch"):
        yield


OPS = {"conv2d", "batch_norm", "max_pool2d", "layer_norm", "rms_norm"}
IMAGE = (2, 3, 12, 12)


MODULES = {
    "LayerNorm": (8,),
    "RMSNorm": (8,),
    "GroupNorm": (2, 4),
    **{f"{kind}{n}d": (4,) for kind in ("BatchNorm", "InstanceNorm") for n in (1, 2, 3)},
    **{f"Conv{n}d": (4, 4, 1) for n in (1, 2, 3)},
    **{f"{kind}Pool{n}d": (2,) for kind in ("Avg", "Max") for n in (1, 2, 3)},
    "AdaptiveAvgPool2d": (2,),
    "AdaptiveMaxPool2d": (2,),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_module_of_torch(name: str) -> None:
    """The values are opkiln.nn's, which tests/core/test_nn.py compares."""
    module = getattr(torch.nn, name)(*MODULES[name])
    model = torch.nn.Sequential(module)
    dims = 4 if name[-2:] not in ("1d", "3d") else 2 + int(name[-2])
    x = torch.randn(2, 4, *[8] * (dims - 2), requires_grad=True)
    expected = copy.deepcopy(model)(x)
    (row,) = opkiln.replace(model, dry_run=False).replaced
    assert row.way == TorchWay(name) and isinstance(module, getattr(torch.nn, name))
    with Calls() as calls:
        out = model(x)
    assert sum(calls.values()) == 1
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert out.grad_fn is not None


class SameConv(torch.nn.Conv2d):
    """A class of its own that computes the same."""

    def describe(self) -> str:
        return super().__repr__()


class OtherConv(torch.nn.Conv2d):
    def _conv_forward(self, *args):  # type: ignore[no-untyped-def]
        return super()._conv_forward(*args) + 1


class OtherNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class LaxNorm(torch.nn.BatchNorm2d):
    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def patched() -> torch.nn.Module:
    module = torch.nn.LayerNorm(4)
    module.forward = lambda input: input  # type: ignore[method-assign]
    return module


STAYS = {
    "own-conv": (lambda: OtherConv(2, 2, 1), "OtherConv has its own _conv_forward"),
    "own-forward": (lambda: OtherNorm(4), "OtherNorm has its own forward"),
    "own-check": (lambda: LaxNorm(4), "LaxNorm has its own _check_input_dim"),
    "patched": (patched, "has a forward of its own, set on the module"),
    "parametrized": (
        lambda: parametrizations.weight_norm(torch.nn.Conv2d(2, 2, 1)),
        "is parametrized",
    ),
    "lazy": (lambda: torch.nn.LazyConv2d(4, 1), "has parameters without a shape yet"),
    "script": (lambda: torch.jit.script(torch.nn.LayerNorm(4)), None),
    "sync": (lambda: torch.nn.SyncBatchNorm(4), None),
    "ours": (lambda: opkiln.nn.LayerNorm(4), "is opkiln's already"),
    "served": (lambda: opkiln.replace(torch.nn.LayerNorm(4), False).model, "is opkiln's already"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", STAYS)
def test_what_stays_and_why(kind: str) -> None:
    make, reason = STAYS[kind]
    plan = opkiln.replace(torch.nn.ModuleList([make()]))
    assert not plan.replaced
    assert [row.reason for row in plan.rows] == ([reason] if reason else [])
    assert reason is None or "stays" in str(plan)


def test_a_subclass_that_computes_the_same_is_served() -> None:
    model = torch.nn.Sequential(SameConv(3, 4, 3))
    x = torch.randn(IMAGE)
    expected, described = model(x), model[0].describe()
    plan = opkiln.replace(model, dry_run=False)
    assert isinstance(model[0], SameConv) and model[0].describe() == described
    with Calls() as calls:
        torch.testing.assert_close(model(x), expected)
    assert calls == {"conv2d": 1}
    plan.revert()
    assert type(model[0]) is SameConv


@pytest.mark.parametrize("how", ["copy", "save"])
def test_a_copy_is_served_and_independent(how: str) -> None:
    model = small_model().eval()
    plan = opkiln.replace(model, dry_run=False)
    if how == "copy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    x = torch.randn(IMAGE)
    assert torch.equal(other(x), model(x))
    assert other[0].weight is not model[0].weight
    plan.revert()
    with Calls() as calls:
        other(x)
    assert calls == dict.fromkeys(OPS, 1)
    assert other.load_state_dict(model.state_dict()).missing_keys == []


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
def test_what_opkiln_does_not_have_goes_to_the_modules_own_forward() -> None:
    model = torch.nn.Sequential(
        torch.nn.MaxPool2d(2), torch.nn.Conv2d(2, 2, 1), torch.nn.LayerNorm(4)
    )
    pool, conv, norm = model
    whole = torch.arange(32).view(1, 2, 4, 4)
    wave = torch.randn(1, 2, 4, 4, dtype=torch.complex64)
    conv.to(torch.complex64)
    expected = [pool(whole), conv(wave)]
    opkiln.replace(model, dry_run=False)
    with Calls() as calls:
        found = [pool(whole), conv(wave)]
        assert type(norm(torch.randn(3, 4).as_subclass(Subclass))) is Subclass
        assert norm.to(device="meta")(torch.empty(3, 4, device="meta")).device.type == "meta"
    assert not calls
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_torchs_errors_stay_and_a_refused_batch_is_not_counted() -> None:
    norm = torch.nn.BatchNorm2d(4)
    own = copy.deepcopy(norm)
    opkiln.replace(torch.nn.Sequential(norm), dry_run=False)
    for module in (own, norm):
        with pytest.raises(RuntimeError):
            module(torch.randn(2, 5, 3, 3))
    assert torch.equal(norm.num_batches_tracked, own.num_batches_tracked)
    nobody = opkiln.Policy(prefer=(("*", ("no-such",)),), strict=True)
    with pytest.raises(opkiln.BackendError), policy.active(nobody):
        norm(torch.randn(2, 4, 3, 3))


def test_fullgraph_one_compilation_for_all_numbers_of_rows() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(2), torch.nn.RMSNorm(36)
    )
    opkiln.replace(model, dry_run=False)
    compiled, graphs = compiled_by_a_spy(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (7, 11, 14):  # unlike any other size
            x = torch.randn(rows, 3, 8, 8)
            torch.testing.assert_close(compiled(x), copy.deepcopy(model)(x))
    (code,) = graphs
    assert all(f"opkiln.{op}" in code for op in ("conv2d", "batch_norm", "rms_norm"))


@pytest.mark.parametrize("strict", [False, True])
def test_export_records_our_operators(strict: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.LayerNorm(6)).eval()
    opkiln.replace(model, dry_run=False)
    x = torch.randn(2, 3, 8, 8)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=strict)
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"opkiln.conv2d.default", "opkiln.layer_norm.default"} <= targets
    more = torch.randn(random.randint(3, 9), 3, 8, 8)
    torch.testing.assert_close(program.module()(more), model(more))
