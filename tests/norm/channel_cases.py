"""What the channel norm tests share: random operands, and a launch held against float64."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import channel_norm, channel_plan
from opkiln_norm.channel_plan import ChannelPlan, Tiling, backward_plan, forward_plan
from opkiln_norm.plugin import supports_channel_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# The interpreter truncates f32 to bf16 (one ulp) where the GPU rounds (half an ulp).
RTOL = {F16: 2**-11, BF16: 2**-7 if DEVICE == "cpu" else 2**-8, F32: 2**-19}


def nan_filled_memory() -> Iterator[None]:
    """Outputs and workspaces start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def only_tiling(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    """Every call gets this tiling, where its view can have it."""

    def plan_of(op: str, view: Any, itemsize: int, tensors: int, given: bool = False) -> Any:
        whole = view.per_group if view.segment else 1
        rows = max(min(tiling.block_m, channel_plan.power_of_two(view.rows)), whole)
        used = dataclasses.replace(tiling, block_m=channel_plan.power_of_two(rows))
        if given:
            used = dataclasses.replace(used, stream=0, slices=tiling.slices or 1)
        return ChannelPlan(view, used, "test", given)

    monkeypatch.setattr(channel_plan, "plan_of", plan_of)
    if tiling.slices:
        monkeypatch.setattr(channel_plan, "resident", lambda *args: False)


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def run(
    op: str,
    tensors: list[torch.Tensor | None],
    *,
    needs_grad: bool = True,
    rtol: float | None = None,
    atol: float = 2**-17,
    **params: Any,
) -> ChannelPlan:
    """Launch, compare outputs, saved and running statistics with float64; return the plan."""
    spec = CATALOGUE[op]
    backward = op == "batch_norm_backward"
    call = Call.of(spec, tensors, params, needs_grad=needs_grad)
    assert supports_channel_norm(call) is None
    plan = backward_plan(call) if backward else forward_plan(call)
    wide = [None if t is None else t.double() for t in tensors]
    before = [None if t is None else t.clone() for t in tensors]
    prepare = channel_norm.prepare_backward if backward else channel_norm.prepare_forward
    results = prepare(call)(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    expected = [w for w in spec.reference(*wide, **params) if w is not None]
    for got, want, meta in zip(results, expected, call.outputs, strict=False):
        assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
        torch.testing.assert_close(got.double(), want, rtol=rtol or RTOL[got.dtype], atol=atol)
    assert len(results) == len(call.outputs)
    for name, t, old, want in zip(spec.tensor_names, tensors, before, wide, strict=True):
        if t is not None and name in spec.mutates(call):
            assert not torch.equal(t, old)
            bound = {"rtol": rtol or RTOL[t.dtype], "atol": atol}
            torch.testing.assert_close(t.double(), want, **bound)
        else:
            assert t is None or torch.equal(t, old)
    return plan


def running(c: int, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    return [random(c, dtype=dtype), random(c, dtype=dtype).abs() + 0.5]


def affine(c: int, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    return [random(c, dtype=dtype), random(c, dtype=dtype)]


def batch_norm(x: torch.Tensor, *params: torch.Tensor | None, **options: Any) -> ChannelPlan:
    """params: running mean and variance, weight, bias; by default all of them."""
    given = params or (*running(x.shape[1]), *affine(x.shape[1]))
    options = {"training": True, "momentum": 0.2, "eps": 1e-5} | options
    return run("batch_norm", [x, *given], **options)


def instance_norm(x: torch.Tensor, *params: torch.Tensor | None, **options: Any) -> ChannelPlan:
    given = params or (*running(x.shape[1]), *affine(x.shape[1]))
    options = {"use_input_stats": True, "momentum": 0.2, "eps": 1e-5} | options
    return run("instance_norm", [x, *given], **options)


def group_norm(x: torch.Tensor, groups: int, *params: Any, **options: Any) -> ChannelPlan:
    given = params or affine(x.shape[1])
    return run("group_norm", [x, *given], num_groups=groups, **({"eps": 1e-5} | options))


def backward(
    x: torch.Tensor,
    g: torch.Tensor | None = None,
    weight: bool = True,
    training: bool = True,
    output_mask: tuple[bool, ...] = (True, True, True),
    **options: Any,
) -> ChannelPlan:
    c = x.shape[1]
    tensors = [
        torch.empty_like(x).copy_(random(*x.shape)) if g is None else g,
        x,
        random(c) if weight else None,
        random(c),
        random(c).abs() + 0.5,
    ]
    options = {"training": training, "output_mask": output_mask} | options
    return run("batch_norm_backward", tensors, **options)


X = (3, 6, 5, 7)
