"""csrc/stem.cu itself, run on the CPU against float64."""

import pytest
import torch
from conv.on_cpu import Kernel
from conv.test_conv_patch_on_cpu import BF16, F16, call_of
from misc.on_cpu import needs_compiler
from opkiln.device import cuda
from opkiln_conv import stem
from opkiln_conv.geometry import geometry_of
from opkiln_conv.stem import StemTiling


@pytest.fixture
def emulated(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(cuda, "load", Kernel)

    def run(shape, weight, t, dtype=F16, bias=True, **window):
        x, w = torch.randn(shape).to(dtype), torch.randn(weight).to(dtype)
        b = torch.randn(weight[0]).to(dtype) if bias else None
        call = call_of(x, w, b, **window)
        g = geometry_of(call)
        assert stem.can_use(g, t)
        got = stem.prepare(call, stem.plan_of(call, g, t, "test"))(x, w, b)
        wide = [None if v is None else v.double() for v in (x, w, b)]
        want = call.spec.reference(*wide, **vars(call.params))
        tolerance = {F16: 2**-10, BF16: 2**-7}[dtype]
        scale = float(want.square().mean().sqrt())
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale)
        return got

    return run


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
    "1d-whole-quartets-runs-of-2": ((1, 16, 70), (40, 16, 3), (1, 64, 4, 2, 2), dict(padding=1)),
    "weights-in-shared-memory": ((1, 64, 4, 8), (16, 64, 3, 3), (2, 8, 2, 1, 1), dict(padding=1)),
    "wgmma": ((1, 3, 3, 8, 16), (64, 3, 3, 3, 3), (6, 16, 4, 1, 4, 1, 1), dict(padding=1)),
    "wgmma-wide": ((2, 4, 2, 5, 124), (40, 4, 3, 3, 3), (5, 128, 8, 1, 4, 1, 1), dict(padding=1)),
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
