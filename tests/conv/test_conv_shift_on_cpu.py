"""csrc/shift.cu itself: run on the CPU against float64, and compiled for sm_90a."""

from dataclasses import replace

import pytest
import torch
from conv.calls import BF16, F16, by_engine, call_of, call_of_row, cuobjdump, stacks
from conv.on_cpu import Kernel
from misc.on_cpu import needs_compiler
from opkiln.device import cuda
from opkiln_conv import conv_plan, shift, tilings
from opkiln_conv.geometry import geometry_of
from opkiln_conv.launch import prepare
from opkiln_conv.shift import ShiftTiling

PROGRAMS = 5  # of the emulated device: tiles come in turns


@pytest.fixture
def emulated(monkeypatch):
    """Every plan is a shift's, and opkiln.device.cuda has no GPU."""
    monkeypatch.setattr(cuda, "load", Kernel)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: PROGRAMS)
    return by_engine(shift, monkeypatch)


CASES = {  # id: (input, weight, tiling, window)
    "taps": ((1, 64, 6, 9), (128, 64, 3, 3), ShiftTiling(64, mb=2, w_stages=2), dict(padding=1)),
    "blocks-turns": ((3, 72, 9, 10), (150, 72, 3, 3),
                     ShiftTiling(16, mb=2, x_stages=3, w_stages=2), dict(padding=1)),
    "3d-resident": ((1, 32, 3, 5, 16), (64, 32, 3, 3, 3),
                    ShiftTiling(24, 32, group=1, w_stages=0), dict(padding=1)),
    "3d-dilated-lines": ((1, 64, 4, 6, 6), (64, 64, 3, 3, 3), ShiftTiling(16, group=2),
                         dict(padding=3, dilation=3)),
    "5x5-no-padding": ((1, 16, 9, 20), (64, 16, 5, 5), ShiftTiling(32, 16), dict()),
    "1d-many-outputs": ((1, 16, 70), (200, 16, 4), ShiftTiling(16, 16), dict()),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case, emulated):
    shape, weight, tiling, how = case
    emulated(shape, weight, tiling, **how)


@needs_compiler
def test_bf16_without_bias(emulated):
    emulated((1, 16, 6, 8), (64, 16, 3, 3), ShiftTiling(32, 16), BF16, False, padding=1)


@needs_compiler
def test_bits_do_not_depend_on_the_batch(emulated, monkeypatch):
    t, w = ShiftTiling(32, 16, group=2), torch.randn(64, 32, 3, 3).half()
    monkeypatch.setattr(conv_plan, "tuned", lambda *_: (t, "test"))
    x = torch.randn(3, 32, 2, 8).half()
    whole, last = (prepare(call_of(part, w, None, padding=1))(part, w, None) for part in (x, x[2:]))
    assert torch.equal(whole[2:], last)


FITS = ShiftTiling(64, 16, x_stages=1, w_stages=2)


@pytest.mark.parametrize("reason, t, how", [
    ("stride", FITS, dict(stride=2)),
    ("sums in registers", replace(FITS, width=256, mb=2), dict()),
    ("shared memory", replace(FITS, x_stages=99), dict()),
    ("weights of two tiles", replace(FITS, w_stages=0), dict()),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_tilings_that_do_not_fit(reason, t, how):
    x, w = torch.empty(1, 64, 9, 9, dtype=F16), torch.empty(128, 64, 3, 3, dtype=F16)
    assert not shift.can_use(geometry_of(call_of(x, w, None, padding=1, **how)), t)
    assert shift.can_use(geometry_of(call_of(x, w, None, padding=1)), FITS)


def test_channels_that_are_no_multiple_of_8_do_not_fit():
    x, w = torch.empty(1, 12, 9, 9, dtype=F16), torch.empty(64, 12, 3, 3, dtype=F16)
    assert not shift.can_use(geometry_of(call_of(x, w, None, padding=1)), FITS)


def test_table_falls_back_to_triton_without_the_compiler(monkeypatch):
    x, w = torch.empty(1, 16, 4, 8, dtype=F16), torch.empty(64, 16, 3, 3, dtype=F16)
    call = call_of(x, w, None, padding=1)
    use = {"variant": "gather", "block_m": 16, "block_n": 16, "block_k": 16}
    row = tilings.key_of(geometry_of(call)) | {"label": "row", "use": use}
    row |= {"shift": dict(width=32, block=16)}
    monkeypatch.setattr(tilings, "tuning_rows", lambda: (row,))
    assert conv_plan.plan_for(call).tiling.variant == "gather"
    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    assert conv_plan.plan_for(call).tiling == ShiftTiling(32, 16)


TABLE = {row["label"]: row for row in tilings.tuning_rows() if "shift" in row}


@pytest.mark.skipif(not cuda.has_compiler(), reason="cuda-core is not installed")
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_tables_tilings_compile_to_wgmma_without_spills(row, tmp_path, monkeypatch):
    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path / "cache"))
    call = call_of_row(row)
    g = geometry_of(call)
    tiling, label = tilings.tuned(g, True)
    assert (label, shift.can_use(g, tiling)) == (row["label"], True)
    plan = shift.plan_of(call, g, tiling, label)
    cubin = cuda.compile_cubin(shift.text_of(plan), "sm_90a", plan.macros)
    assert stacks(cubin, tmp_path) == ["0", "0"]
    code = cuobjdump("-sass", cubin, tmp_path)
    assert "HGMMA.64x" in code and "UBLKCP" in code and "USETMAXREG.TRY_ALLOC" in code
