"""RMSNorm classes by what they compute: which are served, and that they compute the same then."""

from __future__ import annotations

import copy
import re
from typing import Any

import opkiln
import pytest
import torch
from opkiln.replacing.rms import RMSWay
from serving import Calls, compiled_by_a_spy

N = 24
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def kernels_of_torch():
    """Who computes is no matter here, and Triton's interpreter is slow."""
    with opkiln.use("torch"):
        yield


class Llama(torch.nn.Module):
    """As transformers.models.llama writes it; what follows overrides parts of it."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(N))
        self.variance_epsilon = eps

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * self.norm(hidden_states.float()).to(hidden_states.dtype)


class Gemma(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Unweighted(Llama):
    def __init__(self) -> None:
        super().__init__()
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.float()).type_as(x)


class Gated(Llama):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if gate is None else x * gate.sigmoid())


class HalfStatistics(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.norm(x)


class Centred(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class EpsOutside(Llama):
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Summed(Llama):
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.variance_epsilon)


class TwoPlus(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(x.float()) * (2.0 + self.weight.float())).type_as(x)


class NoGradient(Llama):
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * scale.detach()


class InTraining(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.training else 1)


class Wide(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.float() * self.norm(x.float())


class Overwriting(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        x.data.zero_()
        return out


class OfPlanes(Llama):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


SERVED = {
    "llama": (Llama, 0.0, (F32, F16, BF16)),
    "large-eps": (lambda: Llama(1e-3), 0.0, (F32, F16, BF16)),
    "gemma": (Gemma, 1.0, (F32, F16, BF16)),
    "unweighted": (Unweighted, 0.0, (F32, F16, BF16)),
    "gated": (Gated, 0.0, (F32, F16, BF16)),
    "half-statistics": (HalfStatistics, 0.0, (F32, BF16)),  # float16's squares overflow
}
STAYS = {
    "centred": (Centred, "its result is not that of RMSNorm on random float32"),
    "eps-outside": (EpsOutside, "its result is not that of RMSNorm on random float32"),
    "summed": (Summed, "its result is not that of RMSNorm on random float32"),
    "two-plus": (TwoPlus, "its result is not that of RMSNorm on random float32"),
    "no-gradient": (NoGradient, "its gradients are not those of RMSNorm on random float32"),
    "in-training": (InTraining, "its result is not that of RMSNorm on random float32"),
    "half": (lambda: HalfStatistics().half(), "not that of RMSNorm on random float16"),
    "wide": (lambda: Wide().half(), "does not return a tensor of its input's shape and dtype"),
    "overwriting": (Overwriting, "its forward raises ValueError .*: it writes its input"),
    "of-planes": (OfPlanes, "its forward raises RuntimeError on random float32: The size"),
    "double": (lambda: Llama().double(), "has a weight of torch.float64"),
}


@pytest.mark.parametrize("name", SERVED)
def test_served_in_its_dtypes(name: str) -> None:
    make, offset, dtypes = SERVED[name]
    (row,) = opkiln.replace(make()).replaced
    assert isinstance(row.way, RMSWay)
    assert (row.way.offset, row.way.dtypes) == (offset, dtypes)


@pytest.mark.parametrize("name", STAYS)
def test_what_computes_something_else_stays(name: str) -> None:
    make, reason = STAYS[name]
    module = make()
    state, weight = torch.get_rng_state(), module.weight.detach().clone()
    plan = opkiln.replace(module)
    (row,) = plan.rows
    assert not plan.replaced
    assert re.search(reason, row.reason), row.reason
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(module.weight, weight)


def results(module: torch.nn.Module, x: torch.Tensor, *more: Any) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = module(x, *more)
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    return [out.detach(), x.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("name", [n for n in SERVED if n != "half-statistics"])
def test_results_and_gradients_are_the_modules_own(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    own = SERVED[name][0]().to(dtype)
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter)
    ours = copy.deepcopy(own)
    assert opkiln.replace(ours, dry_run=False).replaced
    x = torch.randn(2, 5, N, dtype=dtype)
    with Calls() as calls:
        found = results(ours, x)
    assert calls == {"rms_norm": 1, "rms_norm_backward": 1}
    rtol = 1e-5 if dtype == F32 else 2 * torch.finfo(dtype).eps  # the class rounds twice
    for a, b in zip(found, results(own, x), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=rtol, atol=float(rtol * b.abs().max()))


def test_other_calls_go_to_the_modules_own_forward() -> None:
    """More arguments, a dtype that is not the weight's, float64: each class has its own rule."""
    own, gated = Llama(), Gated()
    x = torch.randn(3, N)
    cases = [(own, (x.half(),)), (own, (x.double(),)), (gated, (x, x)), (gated, (x, None))]
    expected = [module(*args) for module, args in cases]
    assert expected[0].dtype == F32
    opkiln.replace(torch.nn.ModuleList([own, gated]), dry_run=False)
    with Calls() as calls:
        found = [module(*args) for module, args in cases]
    assert not calls
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    with Calls() as calls:
        torch.testing.assert_close(own(hidden_states=x), own(x))
    assert calls == {"rms_norm": 2}


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_autocast_changes_no_dtype(dtype: torch.dtype) -> None:
    own = Llama().to(dtype)
    x = torch.randn(3, N, dtype=dtype)
    with torch.autocast("cpu", BF16):
        expected = own(x)
        opkiln.replace(own, dry_run=False)
        with Calls() as calls:
            found = own(x)
    assert found.dtype == expected.dtype == dtype and calls == {"rms_norm": 1}
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-5)


def test_epsilon_and_weight_are_read_at_each_call() -> None:
    own = Llama()
    opkiln.replace(own, dry_run=False)
    x = torch.randn(3, N)
    own.variance_epsilon = 0.5
    own.weight = torch.nn.Parameter(torch.randn(N))
    expected = torch.nn.functional.rms_norm(x, (N,), own.weight, 0.5)
    torch.testing.assert_close(own(x), expected)


def test_a_kind_of_module_is_tried_once() -> None:
    tried = []

    class Counting(Llama):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tried.append(x.dtype)
            return super().forward(x)

    opkiln.replace(Counting())
    once = len(tried)
    tried.clear()
    plan = opkiln.replace(torch.nn.ModuleList([Counting() for _ in range(5)]))
    assert len(plan.replaced) == 5 and len(tried) == once
    tried.clear()
    opkiln.replace(torch.nn.ModuleList([Counting(), Counting(1e-3)]))
    assert len(tried) == 2 * once


def test_in_compiled_code() -> None:
    model = torch.nn.Sequential(Llama(), Gemma(), Unweighted())
    opkiln.replace(model, dry_run=False)
    compiled, graphs = compiled_by_a_spy(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (7, 11):
            x = torch.randn(rows, 5, N)
            torch.testing.assert_close(compiled(x), model(x))
    (code,) = graphs
    assert code.count("opkiln.rms_norm") == 3
