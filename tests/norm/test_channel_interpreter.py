"""The channel norms against the spec's reference in float64, every view and branch of the kernels.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import channel_norm, channel_plan
from opkiln_norm.channel_plan import ChannelPlan, Tiling, backward_plan, forward_plan, rule
from opkiln_norm.plugin import supports_channel_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# The interpreter truncates f32 to bf16 (one ulp) where the GPU rounds (half an ulp).
RTOL = {F16: 2**-11, BF16: 2**-7 if DEVICE == "cpu" else 2**-8, F32: 2**-19}
RUNNING = ("running_mean", "running_var")


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs and workspaces start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


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
LAYOUTS = {  # id: input; the kernel sees 35 columns that no vector covers, or strides of all kinds
    "contiguous": lambda: random(*X),
    "channels-last": lambda: channels_last(random(*X)),
    "channels-last-3d": lambda: random(2, 4, 3, 2, 5).contiguous(
        memory_format=torch.channels_last_3d
    ),
    "2-d": lambda: random(9, 10),
    "2-d-transposed": lambda: random(10, 9).T,
    "3-d-channels-inner": lambda: random(2, 5, 8).transpose(1, 2),
    "one-sample": lambda: random(1, 6, 8),
    "one-channel": lambda: random(4, 1, 6),
    "rows-skipped": lambda: random(3, 6, 10, 7)[:, :, ::2],
    "columns-skipped": lambda: random(3, 6, 5, 14)[..., ::2],
    "samples-and-channels-swapped": lambda: random(6, 3, 5, 7).transpose(0, 1),
    "expanded": lambda: random(3, 6, 5, 1).expand(3, 6, 5, 7),
    "5-d-half": lambda: random(2, 3, 2, 4, 4, dtype=F16),
    "bfloat16": lambda: random(2, 3, 16, dtype=BF16),
}
LAYOUT = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)


@LAYOUT
def test_batch_norm_layouts(make):
    batch_norm(make())


@LAYOUT
def test_batch_norm_evaluation_layouts(make):
    batch_norm(make(), training=False)


@LAYOUT
def test_batch_norm_backward_layouts(make):
    backward(make())


@LAYOUT
def test_group_norm_layouts(make):
    x = make()
    group_norm(x, 3 if x.shape[1] % 3 == 0 else 1)


@LAYOUT
@pytest.mark.parametrize("own_statistics", [True, False])
def test_instance_norm_layouts(make, own_statistics):
    x = make()
    if x.ndim > 2 or not own_statistics:
        instance_norm(x, use_input_stats=own_statistics)


VIEWS = {  # id: (call, what the view must be)
    "batch": (lambda: batch_norm(random(*X)), {"pool": True, "outer": 6, "rows": 3, "cols": 35}),
    "batch-channels-last": (
        lambda: batch_norm(channels_last(random(*X))),
        {"pool": False, "outer": 1, "rows": 6, "cols": 105},
    ),
    "group": (lambda: group_norm(random(*X), 3), {"pool": True, "channel": "group", "rows": 2}),
    "group-no-affine": (
        lambda: group_norm(random(*X), 3, None, None),
        {"pool": False, "rows": 9, "cols": 70},
    ),
    "group-of-one": (lambda: group_norm(random(*X), 6), {"pool": False, "rows": 18}),
    "group-channels-last-narrow": (
        lambda: group_norm(channels_last(random(*X)), 2),
        {"segment": True, "rows": 6, "per_group": 3},
    ),
    "group-channels-last-wide": (
        lambda: group_norm(channels_last(random(2, 20, 3, 3)), 2),
        {"pool": True, "segment": False, "rows": 10},
    ),
    "instance": (
        lambda: instance_norm(random(*X), None, None, *affine(6)),
        {"outer": 1, "rows": 18, "averaged": False},
    ),
    "instance-running": (
        lambda: instance_norm(random(*X)),
        {"outer": 6, "rows": 3, "averaged": True},
    ),
    "instance-running-channels-last": (
        lambda: instance_norm(channels_last(random(*X))),
        {"outer": 3, "rows": 6, "averaged": False},
    ),
}


@pytest.mark.parametrize("case", VIEWS.values(), ids=VIEWS)
def test_view(case):
    call, expected = case
    view = dataclasses.asdict(call().view)
    assert {k: view[k] for k in expected} == expected


@pytest.fixture
def use_tiling(monkeypatch):
    """Every call gets this tiling, where its view can have it."""

    def put(tiling: Tiling) -> None:
        def plan_of(
            op: str, view: Any, itemsize: int, tensors: int, given: bool = False
        ) -> ChannelPlan:
            whole = view.per_group if view.segment else 1
            rows = max(min(tiling.block_m, channel_plan.power_of_two(view.rows)), whole)
            used = dataclasses.replace(tiling, block_m=channel_plan.power_of_two(rows))
            if given:
                used = dataclasses.replace(used, stream=0, slices=tiling.slices or 1)
            return ChannelPlan(view, used, "test", given)

        monkeypatch.setattr(channel_plan, "plan_of", plan_of)
        if tiling.slices:
            monkeypatch.setattr(channel_plan, "resident", lambda *args: False)

    return put


SLICED = {  # id: tiling; 35 columns make 3 blocks of 16, 105 make 7
    "two-kernels": Tiling(2, 8, 2, chunks=2, slices=3),
    "more-slices-than-tiles": Tiling(4, 32, 1, slices=9),
    "one-slice": Tiling(1, 16, 1, slices=1, store_cache=".cs", evict="evict_first"),
    "one-kernel": Tiling(2, 8, 1, chunks=2, slices=1, stream=1),
}


@pytest.mark.parametrize("layout", ["contiguous", "channels-last", "2-d", "expanded"])
@pytest.mark.parametrize("tiling", SLICED.values(), ids=SLICED)
def test_slices(layout, tiling, use_tiling):
    use_tiling(tiling)
    x = LAYOUTS[layout]()
    plans = [batch_norm(x), backward(x), group_norm(x, 2), batch_norm(x, training=False)]
    if x.ndim > 2:
        plans.append(instance_norm(x))
    assert all(p.tiling.slices and p.source == "test" for p in plans)


def test_slices_that_tiles_cover_exactly(use_tiling):
    use_tiling(Tiling(2, 8, 1, chunks=2, slices=3))
    x = random(4, 3, 64)
    assert batch_norm(x).even and backward(x).even and group_norm(x, 3, None, None).even


@pytest.mark.skipif(DEVICE == "cpu", reason="one program at a time in the interpreter")
def test_stream_of_many_programs(use_tiling):
    use_tiling(Tiling(1, 1024, 4, slices=1, stream=2))
    for _ in range(3):  # the counters are 0 again after each
        batch_norm(random(4, 37, 90000), rtol=1e-5)
        backward(random(4, 37, 90000), rtol=1e-4, atol=0.05)


RESIDENT = {
    "chunks": Tiling(4, 8, 1, chunks=5),
    "packed-chunks": Tiling(4, 16, 1, chunks=3, packed=True),
    "streaming-store": Tiling(4, 64, 2, store_cache=".cs", evict="evict_first"),
}


@pytest.mark.parametrize("tiling", RESIDENT.values(), ids=RESIDENT)
def test_resident(tiling, use_tiling):
    use_tiling(tiling)
    x = random(*X, dtype=F16 if tiling.packed else F32)
    for plan in (batch_norm(x), backward(x), group_norm(x, 3), instance_norm(x)):
        assert plan.source == "test" and plan.tiling.slices == 0


def test_table(monkeypatch):
    use = {"block_m": 4, "block_n": 64, "num_warps": 2}
    row = {"op": "batch_norm", "itemsize": 4, "given": False, "view": [6, 3, 35, 1]}
    row |= {"label": "test", "use": use}
    monkeypatch.setattr(channel_plan, "tuning_rows", lambda: (row,))
    plan = batch_norm(random(*X))
    assert (plan.source, plan.tiling) == ("test", Tiling(**use))
    assert batch_norm(random(4, 6, 5, 7)).source == "rule"
    assert backward(random(*X)).source == "rule"


def test_table_is_valid():
    for row in channel_plan.tuning_rows():
        tiling = Tiling(**row["use"])
        assert tiling.block_m >= 1 and tiling.num_warps <= 32
        if not tiling.slices:
            assert tiling.block_n * tiling.chunks >= row["view"][2]


@pytest.mark.parametrize("kernel", ["resident_kernel", "apply_kernel", "stream_kernel"])
def test_constexprs_are_in_the_kernels_order(kernel):
    """They are passed by position."""
    x = random(*X)
    params = {"training": True, "momentum": 0.1, "eps": 0}
    call = Call.of(CATALOGUE["batch_norm"], [x, *[None] * 4], params)
    names = list(getattr(channel_norm, kernel).arg_names)
    constexprs = forward_plan(call).constexprs()
    assert names[-len(constexprs) :] == list(constexprs)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_parameters_of_another_dtype(dtype):
    x = random(3, 4, 6, dtype=dtype)
    batch_norm(x, *running(4), *affine(4))
    batch_norm(x, *running(4, dtype), *affine(4, dtype), rtol=2**-7)
    batch_norm(random(3, 4, 6), None, None, random(4, dtype=dtype), None)
    group_norm(x, 2, None, random(4))
    instance_norm(x, *running(4), random(4, dtype=dtype), None)


def test_strided_parameters():
    columns = random(6, 4).abs()
    batch_norm(random(*X), *(columns[:, i] for i in range(4)))
    instance_norm(random(*X), *(columns[:, i] for i in range(4)), use_input_stats=False)


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, True), (True, True, False)])
@pytest.mark.parametrize("slices", [0, 2])
def test_backward_of_some(mask, slices, use_tiling):
    use_tiling(Tiling(4, 64, 1, slices=slices))
    backward(random(*X), output_mask=mask)


def test_backward_gradient_of_another_layout():
    backward(channels_last(random(*X)), random(*X))
    backward(random(*X), channels_last(random(*X)))
    backward(random(*X), random(1).expand(X))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("slices", [0, 2])
def test_backward_without_weight(training, slices, use_tiling):
    use_tiling(Tiling(4, 64, 1, slices=slices))
    backward(random(*X), weight=False, training=training)


@pytest.mark.parametrize("slices", [0, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_large_mean(slices, layout, use_tiling):
    """Mean 1e4, deviation 1: E[x^2] - E[x]^2 in f32 has an error of 6 in the variance."""
    use_tiling(Tiling(4, 32 if slices else 512, 1, slices=slices))
    x = (random(4, 6, 8, 16) + 1e4).contiguous(memory_format=layout)
    rounding = 1e4 * 2**-23  # of the f32 mean itself
    for norm in (batch_norm, instance_norm):
        norm(x, None, None, None, None, atol=4 * rounding, rtol=1e-4)
    group_norm(x, 3, None, None, atol=4 * rounding, rtol=1e-4)


def test_constant_input():
    """Variance exactly 0: eps alone decides."""
    batch_norm(torch.full((3, 5, 40), 3.0, device=DEVICE), eps=1e-6)
    instance_norm(torch.full((3, 5, 40), 3.0, device=DEVICE), eps=1e-6)


@pytest.mark.parametrize("slices", [0, 2])
def test_nan_and_inf_stay_in_their_channel(slices, use_tiling):
    use_tiling(Tiling(4, 8, 1, chunks=1 if slices else 4, slices=slices))
    x = random(3, 4, 30)
    x[1, 1, 3] = math.nan
    x[2, 2, 5] = math.inf
    params = {"training": True, "momentum": 0.1, "eps": 1e-5}
    tensors = [x, *running(4), None, None]
    wide = [None if t is None else t.double() for t in tensors]
    call = Call.of(CATALOGUE["batch_norm"], tensors, params)
    y = channel_norm.prepare_forward(call)(*tensors)
    want = CATALOGUE["batch_norm"].reference(*wide, **params)[0]
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert y[:, 1:3].isnan().all() and y[:, [0, 3]].isfinite().all()
    assert tensors[1][[0, 3]].isfinite().all() and tensors[1][1].isnan()


def test_momentum_of_one_and_zero():
    x = random(*X)
    batch_norm(x, momentum=1.0)
    params = {"training": True, "momentum": 0.0, "eps": 1e-5}
    tensors = [x, *running(6), None, None]
    before = tensors[1].clone()
    channel_norm.prepare_forward(Call.of(CATALOGUE["batch_norm"], tensors, params))(*tensors)
    assert torch.equal(tensors[1], before)


@pytest.mark.parametrize("slices", [0, 1])
def test_beyond_2_31_elements(slices, use_tiling, monkeypatch):
    """Sample 2 starts 2^31 elements in. The 4 GiB are reserved; only the samples are touched."""
    use_tiling(Tiling(4, 16, 1, slices=slices))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    x = torch.empty(2**31 + 64, dtype=F16, device=DEVICE).as_strided((3, 4, 16), (2**30, 16, 1))
    x.copy_(random(3, 4, 16))
    params = {"training": True, "momentum": 0.1, "eps": 1e-5}

    def result(t: torch.Tensor) -> torch.Tensor:
        call = Call.of(CATALOGUE["batch_norm"], [t, *[None] * 4], params)
        return channel_norm.prepare_forward(call)(t, None, None, None, None)

    assert torch.equal(result(x), result(x.contiguous()))


REFUSED = {  # id: (input, weight, words of the refusal)
    "f64": (lambda: random(2, 3, 4).double(), lambda: None, "torch.float64"),
    "f64-weight": (lambda: random(2, 3, 4), lambda: random(3).double(), "weight"),
    "empty": (lambda: random(0, 3, 4), lambda: None, "no elements"),
    "meta-device": (lambda: torch.empty(2, 3, 4, device="meta"), lambda: None, "meta"),
    "2^31-samples": (
        lambda: torch.empty(2**31, 1, 2, dtype=F16, device="meta").transpose(1, 2),
        lambda: None,
        "fit the index",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case):
    make, weight, words = case
    x = make()
    params = {"num_groups": 1, "eps": 1e-5}
    refusal = supports_channel_norm(Call.of(CATALOGUE["group_norm"], [x, weight(), None], params))
    assert words in refusal.reason
    assert "\n" not in refusal.reason


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_rule_covers_every_shape(dtype, layout):
    """Resident tiles hold their set; slices are never more than tiles; at most 32 warps."""
    for n, c, s in ((1, 1, 2), (2, 3, 1), (8, 64, 32), (4, 256, 28), (3, 5, 7), (64, 2048, 7),
                    (4, 128, 1024), (512, 16, 56), (2, 70000, 3), (100000, 4, 1)):  # fmt: skip
        x = torch.empty(n, c, s, s, dtype=dtype, device="meta").to(memory_format=layout)
        params = {"training": True, "momentum": 0.1, "eps": 1e-5}
        call = Call.of(CATALOGUE["batch_norm"], [x, *[None] * 4], params, real=False)
        plan = forward_plan(call)
        t, v = plan.tiling, plan.view
        assert t.num_warps in (1, 2, 4, 8, 16, 32)
        if t.slices:
            assert 1 <= t.slices <= plan.items
        else:
            assert t.block_n * t.chunks >= v.cols and (not v.pool or t.block_m >= v.rows)
        assert rule(v, dtype.itemsize, 1, given=True).slices >= 1
