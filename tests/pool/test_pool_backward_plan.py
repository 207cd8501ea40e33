"""How a pool's backward is planned: layouts of the gradient, the rule, the table, refusals."""

import itertools

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool import backward_plan
from opkiln_pool.backward_plan import BackwardTiling, axis_taps, plan_for
from opkiln_pool.gradient import gradient_of
from opkiln_pool.plugin import opkiln_implementations, supports_backward
from opkiln_pool.pool_backward import KERNELS
from pool.backward_cases import call_of, forward, run
from pool.test_pool_interpreter import (
    DEVICE,
    F16,
    channels_last,
    nan_filled_memory,
    random,
    window,
)

__all__ = ["nan_filled_memory"]  # a fixture of every test here


LAYOUTS = {  # id: how a gradient is laid out
    "expanded": lambda out: random(1).expand(out.shape),
    "one-a-channel": lambda out: random(1, out.shape[1], 1, 1).expand(out.shape),
    "one-a-sample": lambda out: random(out.shape[0], 1, 1, 1).expand(out.shape),
    "channel-slice": lambda out: random(out.shape[0], 2 * out.shape[1], *out.shape[2:])[:, ::2],
    "row-slice": lambda out: random(*out.shape[:3], out.shape[3] + 8)[..., : out.shape[3]],
    "columns-apart": lambda out: random(*out.shape[:3], 2 * out.shape[3])[..., ::2],
    "transposed": lambda out: random(*out.shape[:2], out.shape[3], out.shape[2]).mT,
    "one-element-in": lambda out: random(out.numel() + 1)[1:].view(out.shape),
    "contiguous": lambda out: random(*out.shape),
    "channels-last": lambda out: channels_last(random(*out.shape)),
}  # fmt: skip


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("grad", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_the_gradient(grad, last):
    """Beside offsets of the plain layout and of channels_last."""
    x = random(2, 4, 6, 8)
    x = channels_last(x) if last else x
    for op in ("max_pool2d", "avg_pool2d", "adaptive_max_pool2d"):
        params = {"output_size": (3, 4)} if op[:3] == "ada" else window(op, 3, 2, 1)
        run(op, x, params, grad=grad)
    run("adaptive_max_pool2d", x, {"output_size": (1, 1)}, grad=grad)


def test_vectors_only_where_every_row_allows_them():
    params = window("max_pool2d", 3, 2, 1)
    found = {
        name: run("max_pool2d", random(2, 4, 6, 8), params, grad=grad).constexprs.get("VECTOR")
        for name, grad in LAYOUTS.items()
        if name != "channels-last"
    }
    assert {n for n, vector in found.items() if vector} == {
        "contiguous", "channel-slice", "row-slice",
    }  # fmt: skip


def test_taps_of_an_element():
    """The constants of a cell name every tap of every window once, and nothing else."""
    for k, s, p, d in itertools.product(range(1, 7), range(1, 6), range(4), (1, 2, 3)):
        first, near, taps = axis_taps(k, s, p, d)
        assert len(taps) == near * s
        found = {
            (q * s + r, q + first + i): taps[i * s + r]
            for q in range(3)
            for i in range(near)
            for r in range(s)
            if taps[i * s + r] >= 0
        }
        assert found == {
            (o * s - p + t * d, o): t
            for t in range(k)
            for o in range(-20, 30)
            if 0 <= o * s - p + t * d < 3 * s
        }


RULE = {  # id: (op, shape, window, the rule's variant and v)
    "kernel": ("max_pool1d", (1, 1, 64), dict(kernel=9, stride=1, padding=4), ("cells", 4)),
    "halo": ("max_pool1d", (1, 1, 64), dict(kernel=10, stride=1), ("gather", 1)),
    "halo-at-stride-2": ("max_pool1d", (1, 1, 64), dict(kernel=18, stride=2), ("cells", 2)),
    "cell": ("max_pool1d", (1, 1, 256), dict(kernel=2, stride=64), ("cells", 1)),
    "larger-cell": ("max_pool1d", (1, 1, 260), dict(kernel=2, stride=65), ("gather", 1)),
    "steps": ("max_pool3d", (1, 1, 16, 16, 16), dict(kernel=5, stride=2), ("cells", 2)),
    "fewer-cells": ("max_pool3d", (1, 1, 12, 12, 12), dict(kernel=7, stride=2), ("cells", 1)),
    "windows": ("avg_pool2d", (1, 1, 12, 12), dict(kernel=9, stride=1), ("cells", 4)),
    "more-windows": ("avg_pool3d", (1, 1, 8, 8, 8), dict(kernel=6, stride=1), ("gather", 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", RULE.values(), ids=RULE)
def test_rule_bounds_a_threads_work(case):
    op, shape, how, want = case
    x = torch.empty(shape, device="meta")
    params = window(op, **how)
    forward_call = Call.of(CATALOGUE[op], [x], params, needs_grad=True, real=False)
    outs = [m.empty() for m in forward_call.outputs]
    rest = {"input_shape": shape, "output_mask": [True]}
    back = Call.of(CATALOGUE[f"{op}_backward"], outs, params | rest, real=False)
    t = plan_for(back).tiling
    assert (t.variant, t.v) == want


def test_rule_bounds_the_channels_of_a_thread():
    """Of 8 channels: 9 windows of 2D are 72, 27 of 3D more than a thread may load."""
    for op, dims, want in (("max_pool2d", 2, "cells"), ("max_pool3d", 3, "gather")):
        params = window(op, 3, 1, 1)
        g = channels_last(random(2, 8, *[4] * dims, dtype=F16))
        offset = torch.zeros_like(g, dtype=torch.uint8)
        assert plan_for(call_of(op, [g, offset], g.shape, params)).tiling.variant == want


def test_rule_bounds_a_band_and_a_plane():
    found = {
        (shape, size): variant_of(shape, size)
        for shape, size in (
            ((256, 256), (1, 1)), ((256, 257), (1, 1)),  # 2^16 elements, and more
            ((64, 128), (1, 3)), ((65, 128), (1, 3)),  # 2^13 elements of a band
            ((4, 4), (14, 16)), ((4, 4), (13, 17)),  # 16 windows of an element
        )
    }  # fmt: skip
    assert list(found.values()) == ["spread", "gather", "bands", "gather", "bands", "gather"]


def variant_of(shape: tuple[int, ...], size: tuple[int, ...]) -> str:
    g = torch.empty((1, 1, *size), device="meta")
    rest = {"output_size": size, "input_shape": (1, 1, *shape), "output_mask": [True]}
    back = CATALOGUE["adaptive_avg_pool2d_backward"]
    return plan_for(Call.of(back, [g], rest, real=False)).tiling.variant


def test_the_table_serves_plain_layouts(monkeypatch):
    x, params = random(2, 3, 8, 16, dtype=F16), window("max_pool2d", 3, 2, 1)
    out, offset = forward("max_pool2d", x, params)
    g = out.to(F16)
    key = backward_plan.key_of(
        "max_pool2d_backward",
        gradient_of(call_of("max_pool2d", [g, offset], x.shape, params)).pool,
    )
    use = {"variant": "cells", "block": 32, "num_warps": 1, "v": 2}
    rows = ({"op": "x"}, key | {"label": "row", "use": use})
    monkeypatch.setattr(backward_plan, "tuning_rows", lambda: rows)
    plan = run("max_pool2d", x, params)
    assert (plan.tiling, plan.source) == (BackwardTiling(**use), "row")
    for layout in (
        lambda out: random(2, 6, 4, 8, dtype=F16)[:, ::2],
        lambda out: random(2, 3, 4, 10, dtype=F16)[..., :8],
        lambda out: random(out.numel() + 1, dtype=F16)[1:].view(out.shape),
        lambda out: channels_last(random(*out.shape, dtype=F16)),
        lambda out: random(*out.shape),
    ):
        assert run("max_pool2d", x, params, grad=layout).source == "rule"
    assert run("max_pool2d", random(2, 3, 8, 14, dtype=F16), params).source == "rule"


REFUSED = {  # id: (op, gradient, offset, input's shape, words of the refusal)
    "f64": ("avg_pool1d", lambda: random(2, 3, 4).double(), None, (2, 3, 8), "float64"),
    "meta-device": ("avg_pool1d", lambda: torch.empty(2, 3, 4, device="meta"), None, (2, 3, 8),
                    "meta"),
    "unbatched-volume": ("avg_pool3d", lambda: channels_last(random(2, 3, 4, 5)), None,
                         (2, 6, 8, 10), "unbatched volume"),
    "offset": ("max_pool1d", lambda: random(2, 3, 4), (2, 3, 5), (2, 3, 8), "[2, 3, 5]"),
    "empty": ("adaptive_avg_pool2d", lambda: random(2, 3, 0, 4), None, (2, 3, 8, 8), "no window"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    op, make, offset, shape, words = case
    g = make()
    tensors = [g] if offset is None else [g, torch.zeros(offset, dtype=torch.uint8, device=DEVICE)]
    params = {"output_size": tuple(g.shape[-2:])} if op[:3] == "ada" else window(op, 2)
    refusal = supports_backward(call_of(op, tensors, shape, params))
    assert words in refusal.reason
    assert "\n" not in refusal.reason


def test_arguments_are_in_the_kernels_order():
    """They are passed by position."""
    for variant, size in (("bands", (2, 3)), ("spread", (1, 1))):
        rest = {"output_size": size}
        plan = plan_for(call_of("adaptive_avg_pool2d", [random(1, 1, *size)], (1, 1, 8, 9), rest))
        names = list(KERNELS[variant].arg_names)
        assert plan.tiling.variant == variant
        assert names[-len(plan.constexprs) :] == list(plan.constexprs)
        assert len(names) == 3 + len(plan.arguments)
    for variant in ("cells", "gather"):
        g, params = random(1, 1, 4, 8), window("avg_pool2d", 2)
        call = call_of("avg_pool2d", [g], (1, 1, 8, 16), params)
        plan = plan_for(call, BackwardTiling(variant, 32, 1, v=2))
        names = list(KERNELS[variant].arg_names)
        assert names[-len(plan.constexprs) :] == list(plan.constexprs)
        assert len(names) == 3 + len(plan.arguments)


def test_every_pool_has_a_backward():
    ops = {i.op for i in opkiln_implementations()}
    forwards = {op for op in ops if not op.endswith("_backward")}
    assert {CATALOGUE[op].backward.spec.name for op in forwards} == ops - forwards
