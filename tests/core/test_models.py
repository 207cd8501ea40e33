"""Models of transformers and torchvision, built from their configurations, on opkiln and without.

One step: forward, backward, an optimizer's update. On a CPU torch's backend computes, and once the
kernels in Triton's interpreter; on a GPU whatever dispatch picks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import opkiln
import pytest
import torch
from serving import Calls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = dict(rtol=2e-3, atol=2e-4)  # of float32 results through a whole model and its backward


class Case(NamedTuple):
    """A model, inputs of its forward, and how often it calls each op of ours, by how it is served:
    its modules replaced, or its calls of torch.nn.functional overridden.
    """

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    replaced: dict[str, int]
    overridden: dict[str, int]


def llama(name: str = "Llama", **more: Any) -> Case:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **more,
    )
    ids = torch.randint(0, 64, (2, 8), device=DEVICE)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    # Its norms are written out in torch's arithmetic: no functional call to override.
    return Case(model, {"input_ids": ids, "labels": ids}, {"rms_norm": 5}, {})


def resnet() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=3
    )
    inputs = {
        "pixel_values": torch.randn(4, 3, 32, 32, device=DEVICE),
        "labels": torch.tensor([0, 2, 1, 1], device=DEVICE),
    }
    ops = {"conv2d": 8, "batch_norm": 8, "max_pool2d": 1, "adaptive_avg_pool2d": 1}
    return Case(transformers.ResNetForImageClassification(config), inputs, ops, ops)


class WithLoss(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.model(x)
        return {"logits": logits, "loss": logits.square().mean()}


def torchvision_resnet() -> Case:
    torchvision = pytest.importorskip("torchvision")
    model = WithLoss(torchvision.models.resnet18(num_classes=10))
    ops = {"conv2d": 20, "batch_norm": 20, "max_pool2d": 1, "adaptive_avg_pool2d": 1}
    return Case(model, {"x": torch.randn(4, 3, 64, 64, device=DEVICE)}, ops, ops)


CASES: dict[str, Callable[[], Case]] = {
    "llama": llama,
    "gemma": lambda: llama("Gemma", head_dim=8),
    "resnet": resnet,
    "torchvision": torchvision_resnet,
}


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """torch's kernels on a CPU, ours on a GPU, and there torch's convolutions without TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with opkiln.use("torch") if DEVICE == "cpu" else contextlib.nullcontext():
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def made(name: str) -> Case:
    torch.manual_seed(0)
    case = CASES[name]()
    return case._replace(model=case.model.to(DEVICE).train())


def step(case: Case, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """One training step: logits, loss, gradients, and the state after it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    out = model(**case.inputs)
    out["loss"].backward()
    found = {"logits": out["logits"].detach(), "loss": out["loss"].detach()}
    found |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(
            found[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


def forwards(calls: Calls) -> dict[str, int]:
    return {op: n for op, n in calls.items() if not op.endswith("_backward")}


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_the_replaced_model(name: str) -> None:
    case = made(name)
    own, model = copy.deepcopy(case.model), case.model
    with exact():
        expected = step(case, own)
        plan = opkiln.replace(model, example=case.inputs).apply()
        with Calls() as calls:
            found = step(case, model)
    assert forwards(calls) == case.replaced
    assert sum(len(row.calls) for row in plan.replaced) == sum(case.replaced.values())
    backwards = {f"{op}_backward": n for op, n in case.replaced.items()}
    assert {op: n for op, n in calls.items() if op.endswith("_backward")} == backwards
    compare(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_the_reverted_model_computes_the_same_bits(name: str) -> None:
    case = made(name)
    model = case.model
    before = copy.deepcopy(model)
    with exact(), torch.random.fork_rng(), deterministic():
        plan = opkiln.replace(model, example=case.inputs, dry_run=False)
        plan.revert()
        with Calls() as calls:
            torch.manual_seed(1)
            found = step(case, model)
            torch.manual_seed(1)
            expected = step(case, before)
    assert not calls and [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """cuDNN's algorithms for gradients differ from run to run."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("name", CASES)
def test_a_step_under_override_torch(name: str) -> None:
    case = made(name)
    own = copy.deepcopy(case.model)
    with exact():
        expected = step(case, own)
        with opkiln.override_torch() as mode, Calls() as calls:
            found = step(case, case.model)
    assert mode.served == case.overridden and not mode.left
    assert forwards(calls) == case.overridden
    compare(found, expected)


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_a_replaced_model_in_compiled_code(name: str) -> None:
    case = made(name)
    own = copy.deepcopy(case.model).eval()
    model = case.model.eval()
    opkiln.replace(model, dry_run=False)
    codes: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with exact(), torch.no_grad():
        found, expected = compiled(**case.inputs), own(**case.inputs)
    torch.testing.assert_close(found["logits"], expected["logits"], **TOLERANCE)
    (code,) = codes
    assert {op: code.count(f"opkiln.{op}.default(") for op in case.replaced} == case.replaced


@pytest.mark.skipif(DEVICE == "cuda", reason="the tests above run the kernels there")
def test_a_step_of_a_llama_on_our_kernels() -> None:
    pytest.importorskip("opkiln_norm")
    case = made("llama")
    own = copy.deepcopy(case.model)
    expected = step(case, own)
    opkiln.replace(case.model, dry_run=False)
    with opkiln.use("opkiln", strict=True), Calls() as calls:
        found = step(case, case.model)
    assert calls == {"rms_norm": 5, "rms_norm_backward": 5}
    compare(found, expected)
