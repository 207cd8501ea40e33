"""The checks of torch.compile, torch.export, autocast and second derivatives catch what is wrong.

That every op passes them is tested with backends torch and torch-ref (test_mutants).
"""

from __future__ import annotations

from typing import Any

import opkiln.autograd
import pytest
import torch
from conformance.mutants import BACKEND, Mutant, sound
from opkiln import Refusal, functional
from opkiln.conformance.torch_checks import torch_checks
from opkiln.registry import REGISTRY
from opkiln.torch_backend import torch_formula

CPU = torch.device("cpu")
rms_norm = functional.rms_norm


def outcomes(op: str = "rms_norm", backend: str = "torch") -> dict[str, Any]:
    return {o.features[0]: o for o in [task() for task in torch_checks(op, backend, CPU)]}


def broken(*args: Any, **kwargs: Any) -> Any:
    torch._dynamo.graph_break()
    return rms_norm(*args, **kwargs)


def other_when_compiled(*args: Any, **kwargs: Any) -> Any:
    return rms_norm(*args, **kwargs) + (1 if torch.compiler.is_compiling() else 0)


def other_strides_when_compiled(*args: Any, **kwargs: Any) -> Any:
    out = rms_norm(*args, **kwargs)
    return out.mT.contiguous().mT if torch.compiler.is_compiling() else out


def without_operator(input: Any, normalized_shape: Any, weight: Any, **rest: Any) -> Any:
    if torch.compiler.is_exporting():
        return torch.nn.functional.rms_norm(input, normalized_shape, weight)
    return rms_norm(input, normalized_shape, weight, **rest)


def without_autocast(*args: Any, **kwargs: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return rms_norm(*args, **kwargs)


@pytest.mark.parametrize(
    ("check", "function", "message"),
    [
        ("compile", broken, "raised"),
        ("compile", other_when_compiled, "result 0 compiled differs"),
        ("compile", other_strides_when_compiled, "with strides"),
        ("export", without_operator, "does not hold the operator"),
        ("autocast", without_autocast, "under autocast is torch.float16"),
    ],
)
def test_a_wrong_function_is_caught(
    check: str, function: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "rms_norm", function)
    found = outcomes()[check]
    assert found.status == "failed"
    assert message in found.message
    assert found.case.endswith(f"-{check}")


def test_wrong_second_derivatives_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(*args: Any) -> Any:
        return 1.001 * torch_formula(*args)

    assert outcomes()["double_backward"].status == "passed"
    monkeypatch.setattr(opkiln.autograd, "torch_formula", scaled)
    found = outcomes()["double_backward"]
    assert found.status == "failed"
    assert "second derivative by input" in found.message


def test_a_backend_that_refuses_is_no_failure() -> None:
    mutant = Mutant("refusing", "rms_norm", sound, supports=lambda call: Refusal("not today"))
    with REGISTRY.temporarily(mutant, "test:refusing"):
        found = outcomes(backend=BACKEND)
    assert {o.status for o in found.values()} == {"refused"}
    assert {o.message for o in found.values()} == {"not today"}


def test_what_is_checked_of_which_op() -> None:
    everything = {"compile", "export", "autocast", "double_backward"}
    assert set(outcomes("mean_pooling")) == everything
    assert set(outcomes("topk_selector")) == everything - {"double_backward"}
    assert outcomes("rms_norm_backward") == {}
