"""The channel norms against the spec's reference in float64: every layout, view and kind of tiling.

Runs in Triton's interpreter on a machine without a GPU, on the GPU elsewhere.
"""

import dataclasses

import pytest
import torch
from norm.channel_cases import (
    BF16,
    DEVICE,
    F16,
    F32,
    X,
    affine,
    backward,
    batch_norm,
    channels_last,
    group_norm,
    instance_norm,
    nan_filled_memory,
    only_tiling,
    random,
)
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import channel_norm, channel_plan
from opkiln_norm.channel_plan import Tiling, forward_plan


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    yield from nan_filled_memory()


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


SLICED = {  # id: tiling; 15 columns make 2 blocks of 8, 45 make 6: the last is not full
    "two-kernels": Tiling(2, 4, 2, chunks=2, slices=2),
    "more-slices-than-tiles": Tiling(4, 16, 1, slices=5),
    "one-slice": Tiling(1, 8, 1, slices=1, store_cache=".cs", evict="evict_first"),
    "one-kernel": Tiling(2, 4, 1, chunks=2, slices=1, stream=1),
}
SMALL = {  # few elements: the interpreter takes a millisecond for each operation on a tile
    "contiguous": lambda: random(3, 2, 3, 5),
    "channels-last": lambda: channels_last(random(3, 2, 3, 5)),
    "2-d": lambda: random(9, 4),
    "expanded": lambda: random(3, 2, 3, 1).expand(3, 2, 3, 5),
}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("tiling", SLICED.values(), ids=SLICED)
def test_slices(make, tiling, monkeypatch):
    only_tiling(monkeypatch, tiling)
    x = make()
    plans = [batch_norm(x), backward(x), group_norm(x, 1), batch_norm(x, training=False)]
    if x.ndim > 2:
        plans.append(instance_norm(x))
    assert all(p.tiling.slices and p.source == "test" for p in plans)


def test_slices_that_tiles_cover_exactly(monkeypatch):
    only_tiling(monkeypatch, Tiling(2, 4, 1, chunks=2, slices=3))
    x = random(4, 2, 24)
    assert batch_norm(x).even and backward(x).even and group_norm(x, 2, None, None).even


@pytest.mark.skipif(DEVICE == "cpu", reason="one program at a time in the interpreter")
def test_stream_of_many_programs(monkeypatch):
    only_tiling(monkeypatch, Tiling(1, 1024, 4, slices=1, stream=2))
    for _ in range(3):  # the counters are 0 again after each
        batch_norm(random(4, 37, 90000), rtol=1e-5)
        backward(random(4, 37, 90000), rtol=1e-4, atol=0.05)


RESIDENT = {
    "chunks": Tiling(4, 8, 1, chunks=5),
    "packed-chunks": Tiling(4, 16, 1, chunks=3, packed=True),
    "streaming-store": Tiling(4, 64, 2, store_cache=".cs", evict="evict_first"),
}


@pytest.mark.parametrize("tiling", RESIDENT.values(), ids=RESIDENT)
def test_resident(tiling, monkeypatch):
    only_tiling(monkeypatch, tiling)
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
