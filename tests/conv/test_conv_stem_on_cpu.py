"""csrc/stem.cu itself: run on the CPU against float64, and compiled for sm_90a."""

import pytest
import torch
from conv.calls import BF16, F16, by_engine, call_of, call_of_row, stacks
from conv.on_cpu import Kernel
from misc.on_cpu import needs_compiler
from opkiln.device import cuda
from opkiln_conv import conv_plan, stem, tilings
from opkiln_conv.geometry import geometry_of
from opkiln_conv.sources import source
from opkiln_conv.stem import StemTiling


@pytest.fixture
def emulated(monkeypatch):
    """Every plan is stem's, and opkiln.device.cuda has no GPU."""
    monkeypatch.setattr(cuda, "load", Kernel)
    return by_engine(stem, monkeypatch)


CASES = {  # id: (input, weight, (tile_h, tile_w, warps, wm, mt), window)
    "3d-stem": ((1, 3, 3, 8, 16), (64, 3, 3, 3, 3), (4, 16, 2, 1, 4), dict(padding=1)),
    "3d-stem-halves": ((2, 3, 2, 5, 24), (40, 3, 3, 3, 3), (3, 16, 4, 2, 2), dict(padding=1)),
    "stride-2": ((1, 3, 12, 16), (64, 3, 3, 3), (2, 8, 2, 2, 2), dict(stride=2, padding=1)),
    "five-channels-dilated": ((1, 5, 9, 12), (24, 5, 3, 3), (4, 16, 2, 2, 1),
                              dict(padding=2, dilation=2)),
    "one-channel-odd": ((1, 1, 131), (32, 1, 7), (1, 64, 2, 1, 2), dict(padding=3)),
    "groups-of-two-runs-of-4": ((2, 6, 3, 5, 28), (12, 2, 3, 3, 3), (3, 32, 2, 1, 1),
                                dict(padding=1, groups=3)),
    "groups-of-four": ((1, 12, 7, 28), (24, 4, 3, 3), (7, 32, 4, 1, 1), dict(padding=1, groups=3)),
    "two-quartets-runs-of-2": ((1, 8, 70), (40, 8, 3), (1, 64, 4, 2, 2), dict(padding=1)),
    "pointwise": ((1, 12, 4, 8), (16, 12, 1, 1), (2, 8, 1, 1, 1), dict()),
    "odd-width-in": ((1, 2, 6, 15), (16, 2, 3, 2), (6, 16, 1, 1, 1), dict()),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case, emulated):
    shape, weight, tiling, how = case
    emulated(shape, weight, StemTiling(*tiling), **how)


@needs_compiler
def test_bf16_without_bias(emulated):
    emulated((1, 3, 4, 8), (8, 3, 3, 3), StemTiling(4, 8, 1, 1, 1), BF16, False, padding=1)


@needs_compiler
def test_units_and_channels_past_the_last_ignore_what_the_input_holds(emulated, monkeypatch):
    """27 taps leave one unit of 28, three channels one of four: an infinite input reaches the
    outputs over it alone.
    """
    x, w = torch.randn(1, 3, 3, 6, 8).half(), torch.ones(16, 3, 3, 3, 3).half()
    x[0, 0, 0, 0, 2] = torch.inf
    t = StemTiling(6, 8, 2, 1, 1)
    call = call_of(x, w, None, padding=1)
    got = stem.prepare(call, stem.plan_of(call, geometry_of(call), t, "test"))(x, w, None)
    over = torch.zeros(3, 6, 8, dtype=torch.bool)
    over[:2, :2, 1:4] = True
    assert torch.equal(torch.isinf(got[0]), over.expand(16, 3, 6, 8))
    assert torch.equal(torch.isfinite(got[0]), ~over.expand(16, 3, 6, 8))


@needs_compiler
def test_bits_do_not_depend_on_the_batch(emulated):
    t, w = StemTiling(2, 8, 2, 1, 1), torch.randn(16, 3, 3, 3).half()
    x = torch.randn(3, 3, 4, 8).half()
    outs = []
    for part in (x, x[2:]):
        call = call_of(part, w, None, padding=1)
        plan = stem.plan_of(call, geometry_of(call), t, "test")
        outs.append(stem.prepare(call, plan)(part, w, None))
    assert torch.equal(outs[0][2:], outs[1])


@pytest.mark.parametrize("fields", [
    (4, 12, 2, 1, 1),  # rows that are no whole vectors
    (4, 16, 3, 2, 1),  # warps that do not share the channels evenly
    (4, 16, 4, 1, 4),  # more weights than registers
    (256, 256, 4, 1, 1),  # more shared memory than there is
], ids=str)  # fmt: skip
def test_tilings_that_do_not_fit(fields):
    x, w = torch.empty(1, 16, 256, 256, dtype=F16), torch.empty(64, 16, 3, 3, dtype=F16)
    g = geometry_of(call_of(x, w, None, padding=1))
    assert stem.can_use(g, StemTiling(4, 16, 2, 1, 1))
    assert not stem.can_use(g, StemTiling(*fields))


TABLE = {row["label"]: row for row in tilings.tuning_rows() if "stem" in row}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_table_falls_back_to_triton_without_the_compiler(row, monkeypatch):
    assert conv_plan.plan_for(call_of_row(row)).tiling.variant == row["use"]["variant"]
    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    plan = conv_plan.plan_for(call_of_row(row))
    assert (plan.tiling, plan.source) == (StemTiling(**row["stem"]), row["label"])


@pytest.mark.skipif(not cuda.has_compiler(), reason="cuda-core is not installed")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_tables_tilings_compile_without_spills(row, dtype, bias, tmp_path, monkeypatch):
    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path / "cache"))
    call = call_of_row(row, dtype, bias)
    tiling, label = tilings.tuned(geometry_of(call), True)
    assert (label, stem.can_use(geometry_of(call), tiling)) == (row["label"], True)
    plan = stem.plan_of(call, geometry_of(call), tiling, label)
    cubin = cuda.compile_cubin(source("stem"), "sm_90a", plan.macros)
    assert stacks(cubin, tmp_path) == ["0"]
