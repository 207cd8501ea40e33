"""csrc/shift.cu itself: run on the CPU against float64, and compiled for sm_90a."""

import pytest
import torch
from conv.on_cpu import Kernel
from misc.on_cpu import needs_compiler
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_conv import shift
from opkiln_conv.geometry import geometry_of
from opkiln_conv.shift import ShiftTiling

F16, BF16 = torch.float16, torch.bfloat16
PROGRAMS = 3  # of the emulated device: tiles come in turns


def call_of(x, w, bias, padding=0, dilation=1, real=True):
    n = x.ndim - 2
    each = lambda v: v if isinstance(v, tuple) else (v,) * n  # noqa: E731
    padding = tuple(p for p in each(padding) for _ in "ab")
    params = dict(stride=(1,) * n, padding=padding, dilation=each(dilation))
    params |= dict(groups=1, allow_tf32=False)
    return Call.of(CATALOGUE[f"conv{n}d"], [x, w, bias], params, real=real)


@pytest.fixture
def emulated(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(cuda, "load", Kernel)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: PROGRAMS)

    def run(shape, weight, t, dtype=F16, bias=True, **window):
        x, w = torch.randn(shape).to(dtype), torch.randn(weight).to(dtype)
        b = torch.randn(weight[0]).to(dtype) if bias else None
        call = call_of(x, w, b, **window)
        g = geometry_of(call)
        assert shift.can_use(g, t)
        got = shift.prepare(call, shift.plan_of(call, g, t, "test"))(x, w, b)
        wide = [None if v is None else v.double() for v in (x, w, b)]
        want = call.spec.reference(*wide, **vars(call.params))
        tolerance = {F16: 2**-10, BF16: 2**-7}[dtype]
        scale = float(want.square().mean().sqrt())
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale)
        return got

    return run


CASES = {  # id: (input, weight, tiling, window)
    "one-tap": ((1, 64, 8, 8), (64, 64, 1, 1), ShiftTiling(32, wm=1), dict()),
    "taps": ((1, 64, 6, 9), (128, 64, 3, 3), ShiftTiling(32, w_stages=2), dict(padding=1)),
    "swizzled": ((1, 64, 6, 9), (128, 64, 3, 3), ShiftTiling(32, swizzle=1), dict(padding=1)),
    "blocks-turns": ((2, 72, 9, 10), (70, 72, 3, 3), ShiftTiling(16, wm=1, x_stages=3),
                     dict(padding=1)),
    "lines-dilated": ((1, 16, 12, 12), (64, 16, 3, 3),
                      ShiftTiling(48, 16, wm=1, group=2, split=1), dict(padding=6, dilation=6)),
    "lines-split": ((1, 128, 12, 12), (128, 128, 3, 3), ShiftTiling(64, group=2, split=3),
                    dict(padding=6, dilation=6)),
    "3d-resident": ((1, 32, 3, 5, 8), (64, 32, 3, 3, 3),
                    ShiftTiling(64, 32, wm=1, group=1, w_stages=0), dict(padding=1)),
    "3d-swizzled-32": ((1, 32, 3, 5, 8), (64, 32, 3, 3, 3),
                       ShiftTiling(48, 32, wm=1, group=1, swizzle=1), dict(padding=1)),
    "5x5-wide-no-padding": ((1, 16, 9, 20), (64, 16, 5, 5), ShiftTiling(32, 16, wm=1), dict()),
    "1d-many-products": ((1, 16, 70), (200, 16, 4), ShiftTiling(16, 16, nb=2, wm=2), dict()),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case, emulated):
    shape, weight, tiling, how = case
    emulated(shape, weight, tiling, **how)


@needs_compiler
def test_bf16_without_bias(emulated):
    emulated((1, 16, 6, 8), (64, 16, 3, 3), ShiftTiling(32, 16, wm=1), BF16, False, padding=1)
