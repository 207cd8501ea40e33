"""What training does to every op: autocast, activation checkpoints; and torch.export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln.watch import observed
from samples import SAMPLES
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
WITHOUT_GRADIENT = {"topk_selector", "batch_norm_backward"}
DIFFERENTIABLE = [n for n, s in SAMPLES.items() if s.function not in WITHOUT_GRADIENT]


@pytest.fixture(autouse=True)
def kernels_of_torch():
    """On a CPU; who computes is no matter here, and Triton's interpreter is slow."""
    if DEVICE == "cuda":
        yield
        return
    with opkiln.use("torch"):
        yield


def leaf(value: Any, grad: bool = True) -> Any:
    """A tensor of its own on the device, which requires a gradient where it can."""
    if not isinstance(value, torch.Tensor):
        return value
    new = value.detach().to(DEVICE).clone(memory_format=torch.preserve_format)
    return new.requires_grad_(grad and (new.is_floating_point() or new.is_complex()))


def arguments(name: str, dtype: torch.dtype, grad: bool) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = SAMPLES[name].build(dtype)
    grad = grad and SAMPLES[name].function != "batch_norm"  # of its running statistics: refused
    return [leaf(a, grad) for a in args], {k: leaf(v, grad) for k, v in kwargs.items()}


def outputs(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def in_order(name: str, out: Any) -> list[torch.Tensor]:
    """A top-k's set has no order of its own."""
    return [o.sort(-1).values for o in outputs(out)] if "topk" in name else outputs(out)


def tensors(args: list[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]


def backward(out: Any) -> None:
    scored = [o for o in outputs(out) if o.requires_grad]
    torch.manual_seed(0)
    torch.autograd.backward(scored, [torch.randn_like(o) for o in scored])


def documented_rules() -> dict[str, str]:
    """Function -> what docs/numerics.md says of it under autocast."""
    text = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
    table = text[text.index("| inputs are cast to") :].split("\n\n")[0].splitlines()[2:]
    rows = [line.strip("| ").split(" | ") for line in table]
    return {fn: rule for rule, functions in rows for fn in re.findall(r"`(\w+)`", functions)}


RULES = documented_rules()
CAST_TO = {"float32": F32, "the autocast dtype": BF16}


def test_every_function_has_an_autocast_rule() -> None:
    assert set(RULES) == set(F.__all__)
    for name, sample in SAMPLES.items():
        rule = {"fp32": "float32", "lower": "the autocast dtype"}
        spec = sample.bound(F32).spec
        assert RULES[sample.function].startswith(rule.get(spec.autocast, "nothing")), name


def cast(value: Any, rule: str) -> Any:
    dtype = CAST_TO.get(rule)
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating and dtype and value.dtype != F64 else value


@pytest.mark.parametrize("name", SAMPLES)
def test_autocast(name: str) -> None:
    """As the call on inputs that were cast by hand, and gradients in the tensors' own dtypes."""
    sample = SAMPLES[name]
    fn, rule = getattr(F, sample.function), RULES[sample.function]
    allowed = sample.bound(F32).spec.tensors[0].dtypes
    for dtype in (F16, F32, F64):
        if dtype != F32 and (dtype not in allowed or name == "batch_norm_backward"):
            continue  # of float32 statistics
        args, kwargs = arguments(name, dtype, grad=name in DIFFERENTIABLE)
        plain, named = arguments(name, dtype, grad=False)
        expected = fn(
            *[cast(a, rule) for a in plain], **{k: cast(v, rule) for k, v in named.items()}
        )
        with torch.autocast(DEVICE, BF16):
            found = fn(*args, **kwargs)
        for a, b in zip(in_order(name, found), in_order(name, expected), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, equal_nan=True)
        if name in DIFFERENTIABLE and sample.function != "batch_norm":
            backward(found)
            graded = [t for t in tensors(args, kwargs) if t.grad is not None]
            assert graded and all(t.grad.dtype == t.dtype for t in graded)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-hooks", "reentrant"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_activation_checkpointing(name: str, reentrant: bool) -> None:
    """The forward runs again in the backward where that reads what it saved; the gradients are
    those without checkpoints: on a CPU to the bit; cuDNN's differ from run to run.
    """
    fn = getattr(F, SAMPLES[name].function)
    forward = SAMPLES[name].bound(F32).spec.name
    grads, packed = [], []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        return t

    for recomputed in (False, True):
        args, kwargs = arguments(name, F32, grad=True)
        args[0].requires_grad_()

        def call(first: Any, more: Any = args[1:], kwargs: Any = kwargs) -> Any:
            return fn(first, *more, **kwargs)

        seen: list[str] = []
        with observed(lambda call, tensors, seen=seen: seen.append(call.spec.name)):
            if recomputed:
                out = checkpoint(call, args[0], use_reentrant=reentrant)
            else:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    out = call(args[0])
            backward(out)
        assert seen.count(forward) == 1 + (recomputed and bool(packed or reentrant))
        grads.append([t.grad for t in tensors(args, kwargs)])
    assert grads[0][0] is not None
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b) if DEVICE == "cpu" else torch.allclose(a, b, 1e-3, 1e-4)


class Calling(torch.nn.Module):
    """A module that calls one function, for torch.export."""

    def __init__(self, fn: Any, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.fn, self.kwargs = fn, kwargs

    def forward(self, *args: Any) -> Any:
        return self.fn(*args, **self.kwargs)


@pytest.mark.parametrize("name", SAMPLES)
def test_export(name: str) -> None:
    sample = SAMPLES[name]
    fn = getattr(F, sample.function)
    args, kwargs = arguments(name, F32, grad=False)
    program = torch.export.export(Calling(fn, kwargs), tuple(args))
    targets = {str(node.target) for node in program.graph.nodes}
    assert f"opkiln.{sample.bound(F32).spec.name}.default" in targets
    found, expected = program.module()(*args), fn(*arguments(name, F32, False)[0], **kwargs)
    for a, b in zip(in_order(name, found), in_order(name, expected), strict=True):
        torch.testing.assert_close(a, b)
