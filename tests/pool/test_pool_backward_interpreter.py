"""The pools' backward kernels and branches against the spec's reference in float64.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

import math

import opkiln
import pytest
import torch
from opkiln.functional import max_pool2d
from opkiln_pool import backward_plan
from opkiln_pool.backward_plan import BackwardTiling
from opkiln_pool.pool_backward import prepare
from pool.backward_cases import call_of, forward, run
from pool.test_pool_interpreter import (
    BF16,
    DEVICE,
    F16,
    F32,
    channels_last,
    nan_filled_memory,
    random,
    special,
    window,
)

__all__ = ["nan_filled_memory"]  # a fixture of every test here
INF, NAN = math.inf, math.nan


CELLS = {  # id: (op, shape, dtype, window, (VECTOR, V, PIECE, EVEN))
    "stem": ("max_pool2d", (1, 2, 8, 16), F16, dict(kernel=3, stride=2, padding=1),
             (True, 4, 8, True)),
    "stem-f32": ("max_pool2d", (2, 1, 4, 8), F32, dict(kernel=3, stride=2, padding=1),
                 (True, 2, 4, True)),
    "stem-indices": ("max_pool2d_indices", (1, 2, 6, 16), BF16,
                     dict(kernel=3, stride=2, padding=1), (True, 4, 8, True)),
    "stride-1": ("max_pool2d", (1, 1, 4, 16), F16, dict(kernel=3, stride=1, padding=1),
                 (True, 8, 8, True)),
    "stride-3": ("max_pool1d", (2, 2, 48), F16, dict(kernel=3), (True, 2, 2, True)),
    "gaps": ("max_pool1d", (2, 2, 32), F32, dict(kernel=2, stride=4), (False, 1, 4, True)),
    "dilated": ("max_pool1d", (2, 3, 48), BF16,
                dict(kernel=5, stride=2, padding=2, dilation=2, ceil_mode=True),
                (False, 4, 8, True)),
    "dilated-2d": ("max_pool2d", (1, 2, 9, 16), F16, dict(kernel=3, stride=2, dilation=3),
                   (False, 4, 8, True)),
    "odd-rows": ("max_pool2d_indices", (2, 2, 7, 7), F16,
                 dict(kernel=3, stride=2, ceil_mode=True), (False, 4, 8, False)),
    "odd-rows-padded": ("avg_pool2d", (2, 2, 7, 9), BF16,
                        dict(kernel=(3, 5), stride=2, padding=(1, 2), count_include_pad=False),
                        (False, 4, 8, False)),
    "volume": ("max_pool3d", (1, 1, 4, 4, 16), F16, dict(kernel=3, stride=2, padding=1),
               (True, 4, 8, True)),
    "volume-indices": ("max_pool3d_indices", (1, 2, 5, 4, 8), F32,
                       dict(kernel=(2, 3, 2), stride=2, padding=(0, 1, 1), ceil_mode=True),
                       (False, 2, 4, True)),
    "ceil-padded": ("avg_pool2d", (1, 2, 6, 16), F16,
                    dict(kernel=3, stride=2, padding=1, ceil_mode=True), (False, 4, 8, True)),
    "inside": ("avg_pool2d", (1, 2, 6, 16), F16,
               dict(kernel=5, stride=2, padding=2, count_include_pad=False), (True, 4, 8, True)),
    "whole": ("avg_pool1d", (2, 2, 48), F16, dict(kernel=5, stride=4, padding=2),
              (True, 2, 8, True)),
    "divisor": ("avg_pool3d", (1, 2, 2, 4, 8), F32,
                dict(kernel=2, stride=2, divisor_override=-3), (True, 2, 4, True)),
    "unbatched": ("max_pool2d_indices", (3, 4, 8), F32, dict(kernel=2), (True, 2, 4, True)),
    "misses": ("max_pool2d_indices", (1, 2, 2, 2), F32,
               dict(kernel=2, stride=1, padding=1, dilation=3, ceil_mode=True),
               (False, 2, 2, True)),
}  # fmt: skip


@pytest.mark.parametrize("case", CELLS.values(), ids=CELLS)
def test_cells(case):
    op, shape, dtype, how, layout = case
    plan = run(op, random(*shape, dtype=dtype), window(op, **how))
    assert plan.tiling.variant == "cells"
    assert tuple(plan.constexprs[k] for k in ("VECTOR", "V", "PIECE", "EVEN")) == layout


@pytest.mark.parametrize("case", ["stem", "odd-rows-padded", "volume-indices"])
def test_cells_with_sizes_compiled_in(case):
    op, shape, dtype, how, layout = CELLS[case]
    tiling = BackwardTiling("cells", 16, 1, v=layout[1], static=True, cache=".cs")
    plan = run(op, random(*shape, dtype=dtype), window(op, **how), tiling)
    assert plan.constexprs["SHAPE"] is not None


@pytest.mark.parametrize("v", [1, 2, 4, 8])
def test_cells_of_any_width(v):
    params = window("max_pool2d", 3, 2, 1)
    run("max_pool2d", random(2, 2, 6, 16), params, BackwardTiling("cells", 8, 1, v=v))


@pytest.mark.parametrize("length", [48, 32])
def test_several_pieces_a_row(length):
    """Eight windows of stride 3 are three vectors; of 10 windows, not one load is a vector."""
    x, params = random(2, 2, length, dtype=F16), window("max_pool1d_indices", 3)
    plan = run("max_pool1d_indices", x, params, BackwardTiling("cells", 8, 1, v=8))
    assert plan.constexprs["PIECE"] == 8 and plan.constexprs["VECTOR"] == (length == 48)


GATHER = {  # id: (op, input, window, constexprs that the plan must have)
    "odd-rows": ("max_pool2d", lambda: random(2, 3, 7, 7, dtype=F16),
                 dict(kernel=3, stride=2, padding=1), {"VEC": 1, "HOLDERS": (1, 2, 2)}),
    "vectors": ("max_pool2d_indices", lambda: random(2, 3, 5, 8, dtype=F16),
                dict(kernel=3, stride=2, padding=1), {"VEC": 8, "UNROLL": True}),
    "averages": ("avg_pool2d", lambda: random(2, 3, 7, 12, dtype=BF16),
                 dict(kernel=(3, 5), stride=2, padding=(1, 2), count_include_pad=False),
                 {"VEC": 4, "DIVISOR": "inside"}),
    "ceil-averages": ("avg_pool3d", lambda: random(1, 2, 3, 4, 5),
                      dict(kernel=(2, 3, 3), stride=2, padding=1, ceil_mode=True),
                      {"DIVISOR": "padded"}),
    "divisor": ("avg_pool2d", lambda: random(1, 2, 4, 4), dict(kernel=2, divisor_override=-3), {}),
    "dilated": ("max_pool2d", lambda: random(1, 2, 9, 10),
                dict(kernel=3, stride=2, padding=1, dilation=2), {"HOLDERS": (1, 3, 3)}),
    "gaps": ("max_pool1d", lambda: random(2, 2, 33), dict(kernel=2, stride=5), {}),
    "loop": ("max_pool2d_indices", lambda: random(1, 1, 9, 11), dict(kernel=(8, 9), stride=1,
             padding=(2, 4)), {"UNROLL": False}),
    "loop-avg": ("avg_pool1d", lambda: random(1, 2, 74, dtype=F16), dict(kernel=35, stride=1),
                 {"UNROLL": False}),
    "16-bit-offsets": ("max_pool2d", lambda: random(1, 2, 20, 33), dict(kernel=(17, 16)), {}),
    "32-bit-offsets": ("max_pool1d", lambda: random(1, 1, 32780), dict(kernel=32769, stride=11),
                       {"HOLDERS": (1, 1, 2)}),
    "channels-last": ("max_pool2d_indices", lambda: channels_last(random(2, 16, 5, 6, dtype=F16)),
                      dict(kernel=3, stride=2, padding=1),
                      {"VEC": 8, "CHANNELS_LAST": True, "VECTOR": True}),
    "channels-last-odd": ("avg_pool2d", lambda: channels_last(random(2, 3, 5, 6)),
                          dict(kernel=2), {"VEC": 1, "CHANNELS_LAST": True}),
    "channels-last-mean": ("avg_pool2d", lambda: channels_last(random(2, 8, 5, 6)),
                           dict(kernel=3, stride=1, padding=1, count_include_pad=False),
                           {"VEC": 4, "VECTOR": True}),
    "channels-last-3d": ("max_pool3d", lambda: channels_last(random(1, 4, 3, 4, 5)),
                         dict(kernel=2), {"VEC": 4, "CHANNELS_LAST": True}),
    "misses": ("max_pool2d_indices", lambda: random(1, 2, 2, 2),
               dict(kernel=2, stride=1, padding=1, dilation=3, ceil_mode=True), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", GATHER.values(), ids=GATHER)
def test_gather(case):
    op, make, how, expected = case
    plan = run(op, make(), window(op, **how), BackwardTiling("gather", 256, 1))
    assert expected.items() <= plan.constexprs.items()


@pytest.mark.parametrize("case", ["vectors", "averages", "dilated", "channels-last"])
def test_gather_with_sizes_compiled_in(case):
    op, make, how, _ = GATHER[case]
    tiling = BackwardTiling("gather", 256, 1, static=True, cache=".cs")
    assert run(op, make(), window(op, **how), tiling).constexprs["SHAPE"] is not None


@pytest.mark.parametrize("v", [1, 2])
@pytest.mark.parametrize("case", [name for name in GATHER if name.startswith("channels-last")])
def test_cells_of_channels(case, v):
    """By the rule one cell a thread, of as many channels as a load takes."""
    op, make, how, expected = GATHER[case]
    tiling = BackwardTiling("cells", 32, 1, v=v, static=True, cache=".cs") if v > 1 else None
    plan = run(op, make(), window(op, **how), tiling)
    assert (plan.tiling.variant, plan.tiling.v) == ("cells", v)
    assert plan.constexprs["CHANNELS_LAST"]
    assert plan.constexprs["LANES"] == expected["VEC"]


ADAPTIVE = {  # id: (op, input, output_size, the rule's variant)
    "global": ("adaptive_max_pool2d", lambda d: random(2, 5, 7, 6, dtype=d), (1, 1), "spread"),
    "global-avg": ("adaptive_avg_pool2d", lambda d: random(2, 5, 8, 4, dtype=d), (1, 1), "spread"),
    "uneven": ("adaptive_max_pool2d", lambda d: random(2, 2, 9, 11, dtype=d), (4, 3), "bands"),
    "uneven-avg": ("adaptive_avg_pool2d", lambda d: random(2, 2, 9, 11, dtype=d), (4, 3), "bands"),
    "vectors": ("adaptive_max_pool2d_indices", lambda d: random(1, 3, 8, 16, dtype=d), (3, 5),
                "bands"),
    "even-avg": ("adaptive_avg_pool2d", lambda d: random(1, 3, 8, 12, dtype=d), (4, 6), "bands"),
    "one-row": ("adaptive_max_pool2d", lambda d: random(1, 3, 8, 12, dtype=d), (1, 5), "bands"),
    "wider": ("adaptive_avg_pool2d", lambda d: random(1, 2, 3, 4, dtype=d), (5, 7), "bands"),
    "wider-max": ("adaptive_max_pool2d_indices", lambda d: random(1, 2, 3, 4, dtype=d), (5, 2),
                  "bands"),
    "much-wider": ("adaptive_avg_pool2d", lambda d: random(1, 2, 2, 2, dtype=d), (11, 9), "gather"),
    "unbatched": ("adaptive_avg_pool2d", lambda d: random(2, 6, 5, dtype=d), (4, 3), "bands"),
    "channels-last": ("adaptive_max_pool2d_indices",
                      lambda d: channels_last(random(2, 8, 7, 9, dtype=d)), (3, 2), "gather"),
    "channels-last-avg": ("adaptive_avg_pool2d",
                          lambda d: channels_last(random(2, 8, 7, 9, dtype=d)), (3, 2), "gather"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("case", ADAPTIVE.values(), ids=ADAPTIVE)
def test_adaptive(case, dtype):
    op, make, size, variant = case
    tiling = run(op, make(dtype), {"output_size": size}).tiling
    assert (tiling.variant, tiling.static) == (variant, variant == "gather")


@pytest.mark.parametrize("tiling", [
    BackwardTiling("bands", 1, 1), BackwardTiling("bands", 4, 1, cache=".cs"),
    BackwardTiling("gather", 256, 1),
])  # fmt: skip
@pytest.mark.parametrize("op", ["adaptive_max_pool2d", "adaptive_avg_pool2d"])
def test_adaptive_tilings(op, tiling):
    run(op, random(2, 2, 9, 11), {"output_size": (4, 3)}, tiling)


def test_windows_as_large_as_the_plane(monkeypatch):
    """In one step, and in several."""
    for columns in (backward_plan.SPREAD_COLUMNS, 8):
        monkeypatch.setattr(backward_plan, "SPREAD_COLUMNS", columns)
        plan = run("max_pool1d", random(5, 3, 20, dtype=F16), window("max_pool1d", 20, 1))
        assert (plan.tiling.variant, plan.constexprs["COLUMNS"]) == ("spread", min(columns, 32))
        params = window("avg_pool2d", (4, 6), divisor_override=5)
        assert run("avg_pool2d", random(5, 3, 4, 6), params).tiling.variant == "spread"


@pytest.mark.parametrize("kind", ["ties", "zeros", "nan", "-inf"])
@pytest.mark.parametrize("variant", ["cells", "gather"])
def test_special_inputs(variant, kind):
    """The one element that the pool chose gets the gradient."""
    params = window("max_pool2d", 3, 2, 1)
    run("max_pool2d", special(kind, F16, 1, 2, 6, 16), params, BackwardTiling(variant, 32, 1, v=4))
    if variant == "gather":
        for size in ((3, 2), (1, 1)):
            run("adaptive_max_pool2d", special(kind, F16, 1, 2, 7, 9), {"output_size": size})


@pytest.mark.parametrize("variant", ["cells", "gather"])
def test_infinite_and_nan_gradients_stay_where_they_belong(variant):
    def grad(out: torch.Tensor) -> torch.Tensor:
        kinds = torch.tensor([1.0, INF, -INF, NAN], device=DEVICE, dtype=F32)
        return kinds[torch.randint(0, 4, out.shape, device=DEVICE)]

    for op in ("max_pool2d", "avg_pool2d"):
        tiling = BackwardTiling(variant, 32, 1, v=2)
        run(op, random(2, 2, 6, 8), window(op, 3, 2, 1), tiling, grad)
        for size in ((4, 3), (1, 1)):
            run(f"adaptive_{op}", random(2, 2, 6, 8), {"output_size": size}, grad=grad)


@pytest.mark.parametrize("variant", ["cells", "gather", "bands", "spread"])
def test_planes_beyond_2_31_elements(variant, monkeypatch):
    """Plane 2 starts 2^31 elements in. The 4 GiB are reserved; only three planes are touched."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    room = torch.empty(2**31 + 256, dtype=F16, device=DEVICE)
    g = room.as_strided((3, 1, 4, 8), (2**30, 2**30, 8, 1))
    g.copy_(random(3, 1, 4, 8))
    monkeypatch.undo()
    tiling = BackwardTiling(variant, 4, 1, v=4)
    op, params = "max_pool2d", window("max_pool2d", 3, 2, 1)
    if variant in ("bands", "spread"):
        op, params = (
            "adaptive_max_pool2d",
            {"output_size": (4, 8) if variant == "bands" else (1, 1)},
        )
    rows, columns = (1, 1) if variant == "spread" else (4, 8)
    plan = run(op, random(3, 1, 8, 16, dtype=F16), params, tiling,
               grad=lambda out: g[..., :rows, :columns])  # fmt: skip
    assert plan.constexprs["WIDE"]


def test_two_runs_give_the_same_bits_and_leave_the_inputs_alone():
    x, params = random(2, 3, 8, 16, dtype=F16), window("max_pool2d", 3, 2, 1)
    out, offset = forward("max_pool2d", x, params)
    g = out.to(F16)
    before = g.clone(), offset.clone()
    call = call_of("max_pool2d", [g, offset], x.shape, params)
    assert torch.equal(prepare(call)(g, offset), prepare(call)(g, offset))
    assert torch.equal(g, before[0]) and torch.equal(offset, before[1])


def test_a_plane_does_not_depend_on_the_others():
    x, params = random(5, 3, 7, 9), window("avg_pool2d", 3, 2, 1)
    (out,) = forward("avg_pool2d", x, params)
    g = out.float()

    def grad(g: torch.Tensor) -> torch.Tensor:
        return prepare(call_of("avg_pool2d", [g], (len(g), 3, 7, 9), params))(g)

    assert torch.equal(grad(g)[2:3], grad(g[2:3]))


def test_through_autograd():
    """The gradient that loss.backward() takes is this kernel's."""
    x = random(2, 3, 8, 16).requires_grad_()
    with opkiln.use("opkiln", strict=True):
        out = max_pool2d(x, 3, 2, 1)
    g = torch.randn_like(out)
    out.backward(g)
    params = window("max_pool2d", 3, 2, 1)
    _, offset = forward("max_pool2d", x.detach(), params)
    want = prepare(call_of("max_pool2d", [g, offset], x.shape, params))(g, offset)
    assert torch.equal(x.grad, want)


def test_no_gradient_is_wanted():
    params = window("avg_pool2d", 2)
    g = random(1, 1, 2, 2)
    assert prepare(call_of("avg_pool2d", [g], (1, 1, 4, 4), params, mask=False))(g) == ()
