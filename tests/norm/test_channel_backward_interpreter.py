"""Backward of group_norm and instance_norm against the spec's reference in float64.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

from typing import Any

import pytest
import torch
from norm.channel_cases import (
    BF16,
    F16,
    F32,
    RTOL,
    channels_last,
    nan_filled_memory,
    only_tiling,
    random,
)
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import channel_plan, channel_planes_launch
from opkiln_norm.channel_plan import ChannelPlan, Tiling, planes_plan
from opkiln_norm.plugin import opkiln_implementations, supports_channel_norm

ALL = (True, True, True)
MASKS = [(True, False, False), (False, True, True), (True, True, False), (False, False, True)]


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    yield from nan_filled_memory()


def sliced(monkeypatch: pytest.MonkeyPatch, block_n: int = 4, slices: int = 3) -> None:
    """Groups never fit registers; small tiles, so that a plane has several slices."""
    only_tiling(monkeypatch, Tiling(4, 8, 1, slices=1))
    tiling = Tiling(2, block_n, 1, chunks=2, slices=slices)
    monkeypatch.setattr(channel_plan, "rule", lambda *args, **options: tiling)


def backward(
    x: torch.Tensor,
    groups: int,
    mask: tuple[bool, ...] = ALL,
    g: torch.Tensor | None = None,
    weight: Any = F32,
    **params: Any,
) -> ChannelPlan:
    """groups 0: instance_norm. weight: its dtype, or None."""
    n, c = x.shape[:2]
    op = "group_norm_backward" if groups else "instance_norm_backward"
    mean, rstd = random(n, groups or c), random(n, groups or c).abs() + 0.5
    if params.pop("strided", False):
        mean, rstd = (t.repeat_interleave(2, 1)[:, ::2] for t in (mean, rstd))
    tensors = [
        torch.empty_like(x).copy_(random(*x.shape)) if g is None else g,
        x,
        None if weight is None else random(c, dtype=weight),
        mean,
        rstd,
    ]
    params |= {"num_groups": groups} if groups else {"use_input_stats": True} | params
    params["output_mask"] = mask
    spec = CATALOGUE[op]
    call = Call.of(spec, tensors, params)
    assert supports_channel_norm(call) is None
    results = channel_planes_launch.prepare(call)(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    wide = [None if t is None else t.double() for t in tensors]
    wanted = [t for t in spec.reference(*wide, **params) if t is not None]
    for got, want, meta in zip(results, wanted, call.outputs, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
        torch.testing.assert_close(got.double(), want, rtol=RTOL[got.dtype], atol=2**-16)
    return planes_plan(call)


X = (3, 6, 5, 7)
LAYOUTS = {
    "contiguous": lambda: random(*X),
    "channels-last": lambda: channels_last(random(*X)),
    "channels-last-3d": lambda: random(2, 4, 3, 2, 5).contiguous(
        memory_format=torch.channels_last_3d
    ),
    "2-d": lambda: random(9, 12),
    "2-d-transposed": lambda: random(12, 9).T,
    "one-sample": lambda: random(1, 6, 8),
    "one-channel": lambda: random(4, 1, 6),
    "columns-skipped": lambda: random(3, 6, 5, 14)[..., ::2],
    "samples-and-channels-swapped": lambda: random(6, 3, 5, 7).transpose(0, 1),
    "expanded": lambda: random(3, 6, 5, 1).expand(3, 6, 5, 7),
    "half": lambda: random(2, 6, 2, 4, dtype=F16),
    "bfloat16": lambda: random(2, 6, 16, dtype=BF16),
}
LAYOUT = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
ROAD = pytest.mark.parametrize("road", ["resident", "sliced"])


def take(road: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if road == "sliced":
        sliced(monkeypatch)


@LAYOUT
@ROAD
def test_group_norm_layouts(make, road, monkeypatch):
    take(road, monkeypatch)
    x = make()
    plan = backward(x, 3 if x.shape[1] % 3 == 0 else 1)
    assert bool(plan.tiling.slices) == (road == "sliced")


@LAYOUT
@ROAD
def test_instance_norm_layouts(make, road, monkeypatch):
    take(road, monkeypatch)
    x = make()
    backward(x, 0, use_input_stats=x.ndim > 2)


@ROAD
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("weight", [F32, None], ids=str)
def test_masks(mask, weight, road, monkeypatch):
    take(road, monkeypatch)
    backward(random(2, 6, 15), 2, mask, weight=weight)


@ROAD
@pytest.mark.parametrize("mask", [ALL, *MASKS], ids=str)
def test_given_statistics(mask, road, monkeypatch):
    take(road, monkeypatch)
    backward(random(2, 6, 15), 0, mask, use_input_stats=False)


@ROAD
@pytest.mark.parametrize("groups", [1, 2, 6, 20])
def test_channels_last_groups(groups, road, monkeypatch):
    """Groups narrower than a sector, groups of one, and groups that are a multiple of sectors."""
    take(road, monkeypatch)
    c = 60 if groups == 20 else 24
    backward(channels_last(random(2, c, 3, 3)), groups)


@ROAD
def test_gradient_of_another_layout(road, monkeypatch):
    take(road, monkeypatch)
    backward(channels_last(random(*X)), 2, g=random(*X))
    backward(random(*X), 2, g=channels_last(random(*X)))
    backward(random(*X), 2, g=random(1).expand(X))


@ROAD
def test_parameters(road, monkeypatch):
    """A weight of another dtype; statistics that are not contiguous."""
    take(road, monkeypatch)
    x = random(2, 6, 16, dtype=F16)
    backward(x, 2, weight=F16)
    backward(x, 2, weight=BF16)
    backward(x, 2, strided=True)
    backward(x, 0, strided=True)


def test_many_samples_and_slices(monkeypatch):
    """More partial sums than finish_kernel reads at once."""
    backward(random(300, 4, 3), 2)
    sliced(monkeypatch, block_n=1, slices=20)
    backward(random(15, 2, 41), 2)


def test_more_planes_than_a_program_reads_at_once(monkeypatch):
    sliced(monkeypatch, block_n=2, slices=1)
    monkeypatch.setattr(channel_plan, "rule", lambda *a, **k: Tiling(512, 2, 1, slices=1))
    backward(random(1, 1100, 2), 1)


def test_weight_of_zero():
    """grad_input is then all zeros, not a quotient."""
    x = random(2, 4, 6)
    tensors = [random(2, 4, 6), x, torch.zeros(4, device=x.device), random(2, 2), random(2, 2)]
    params = {"num_groups": 2, "output_mask": ALL}
    call = Call.of(CATALOGUE["group_norm_backward"], tensors, params)
    found = channel_planes_launch.prepare(call)(*tensors)
    assert not found[0].any() and found[1].isfinite().all()


def test_two_runs_are_equal(monkeypatch):
    for road in ("resident", "sliced"):
        take(road, monkeypatch)
        x = random(3, 6, 40)
        tensors = [random(3, 6, 40), x, random(6), random(3, 2), random(3, 2)]
        params = {"num_groups": 2, "output_mask": ALL}
        launch = channel_planes_launch.prepare(
            Call.of(CATALOGUE["group_norm_backward"], tensors, params)
        )
        assert all(map(torch.equal, launch(*tensors), launch(*tensors)))


def test_rule_covers_every_shape():
    for dtype in (F16, F32):
        for groups, shape in ((32, (4, 320, 64, 64)), (32, (8, 2560, 8, 8)), (1, (2, 512, 7, 7)),
                              (32, (1, 128, 512, 512)), (2, (64, 4, 1, 2)), (0, (2, 3, 2000, 2000)),
                              (0, (4, 64, 30, 30)), (1, (2, 70000, 3, 1))):  # fmt: skip
            for layout in (torch.contiguous_format, torch.channels_last):
                x = torch.empty(shape, dtype=dtype, device="meta").to(memory_format=layout)
                mean = torch.empty(shape[0], groups or shape[1], device="meta")
                name = "group_norm_backward" if groups else "instance_norm_backward"
                params: dict[str, Any] = {"output_mask": ALL}
                params |= {"num_groups": groups} if groups else {"use_input_stats": True}
                call = Call.of(CATALOGUE[name], [x, x, None, mean, mean], params, real=False)
                plan = planes_plan(call)
                t, v = plan.tiling, plan.view
                assert t.num_warps in (1, 2, 4, 8, 16, 32)
                if t.slices:
                    assert v.channel == "plane" and not v.pool and t.slices <= plan.items
                else:
                    assert t.block_n * t.chunks >= v.cols and (not v.pool or t.block_m >= v.rows)


def test_registered_and_refused():
    found = {i.op: i for i in opkiln_implementations()}
    for op in ("group_norm_backward", "instance_norm_backward"):
        assert "deterministic" in found[op].traits
    x = torch.empty(0, 4, 3)
    tensors = [x, x, None, torch.empty(0, 2), torch.empty(0, 2)]
    params = {"num_groups": 2, "output_mask": ALL}
    refusal = supports_channel_norm(
        Call.of(CATALOGUE["group_norm_backward"], tensors, params, real=False)
    )
    assert "no elements" in refusal.reason


@pytest.mark.parametrize("kernel", ["planes_backward_kernel", "planes_gradient_kernel"])
def test_constexprs_are_in_the_kernels_order(kernel):
    """They are passed by position."""
    x = random(2, 4, 6)
    tensors = [x, x, None, random(2, 2), random(2, 2)]
    params = {"num_groups": 2, "output_mask": ALL}
    call = Call.of(CATALOGUE["group_norm_backward"], tensors, params)
    constexprs = planes_plan(call).constexprs()
    names = list(getattr(channel_planes_launch, kernel).arg_names)
    assert names[-len(constexprs) :] == list(constexprs)
