"""csrc/patch.cu itself: run on the CPU against float64, and compiled for sm_90a."""

import pytest
import torch
from conv.calls import BF16, F16, by_engine, call_of, call_of_row, stacks
from conv.on_cpu import Kernel
from misc.on_cpu import needs_compiler
from opkiln.device import cuda
from opkiln_conv import conv_plan, patch, tilings
from opkiln_conv.geometry import geometry_of
from opkiln_conv.patch import PatchTiling


@pytest.fixture
def emulated(monkeypatch):
    """Every plan is a patch's, and opkiln.device.cuda has no GPU."""
    monkeypatch.setattr(cuda, "load", Kernel)
    return by_engine(patch, monkeypatch)


CASES = {  # id: (input, weight, (tile_h, tile_w, chunk, split, wm, wn, wk, mt, nt), window)
    "rows-chunks": ((1, 32, 6, 8), (20, 32, 3, 3), (2, 8, 16, 1, 1, 1, 2, 1, 2), dict(padding=1)),
    "stride-split": ((1, 32, 8, 16), (40, 32, 3, 3), (2, 8, 16, 2, 2, 1, 2, 2, 2),
                     dict(stride=2, padding=1)),
    "one-channel-odd-pitch": ((2, 1, 160), (40, 1, 10), (1, 24, 1, 1, 2, 1, 1, 2, 3),
                              dict(stride=5)),
    "3d-few-channels": ((1, 3, 3, 6, 8), (16, 3, 3, 3, 3), (2, 8, 3, 1, 1, 2, 2, 1, 1),
                        dict(padding=1)),
    "whole-odd-planes": ((2, 64, 7, 7), (32, 64, 1, 1), (1, 49, 32, 2, 2, 1, 2, 1, 7), dict()),
    "rows-apart": ((1, 16, 8, 8), (16, 16, 3, 3), (2, 8, 16, 1, 1, 1, 2, 1, 2),
                   dict(padding=6, dilation=6)),
    "columns-in-tiles": ((1, 16, 3, 40), (8, 16, 3, 5), (2, 16, 16, 1, 1, 2, 1, 1, 2),
                         dict(padding=1)),
    "1d-split": ((1, 32, 60), (40, 32, 10), (1, 32, 16, 2, 1, 1, 2, 2, 4), dict()),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case, emulated):
    shape, weight, tiling, how = case
    emulated(shape, weight, PatchTiling(*tiling), **how)


@needs_compiler
def test_bf16_without_bias(emulated):
    tiling = PatchTiling(1, 8, 16, 1, 1, 1, 2, 1, 1)
    emulated((1, 16, 4, 8), (8, 16, 3, 3), tiling, BF16, False, padding=1)


@needs_compiler
def test_products_past_the_last_ignore_what_the_patch_holds(emulated):
    """Of 10 taps 6 products are none: an infinite input reaches the outputs over it alone."""
    t = PatchTiling(1, 16, 1, 1, 1, 1, 1, 1, 2)
    x, w = torch.randn(1, 1, 80).half(), torch.ones(8, 1, 10).half()
    x[0, 0, 20] = torch.inf
    call = call_of(x, w, None, stride=5)
    got = patch.prepare(call, patch.plan_of(call, geometry_of(call), t, "test"))(x, w, None)
    over = [3 <= p <= 4 for p in range(15)]  # outputs 3 and 4 start at 15 and 20
    assert torch.isinf(got[0]).all(0).tolist() == over
    assert torch.isfinite(got[0]).all(0).tolist() == [not o for o in over]


@needs_compiler
def test_bits_do_not_depend_on_the_batch(emulated):
    t, w = PatchTiling(1, 8, 16, 2, 1, 1, 2, 1, 1), torch.randn(16, 32, 3, 3).half()
    x = torch.randn(3, 32, 2, 8).half()
    outs = []
    for part in (x, x[2:]):
        call = call_of(part, w, None, padding=1)
        plan = patch.plan_of(call, geometry_of(call), t, "test")
        outs.append(patch.prepare(call, plan)(part, w, None))
    assert torch.equal(outs[0][2:], outs[1])


@pytest.mark.parametrize("fields", [
    (1, 8, 24, 1, 1, 1, 1, 1, 1),  # chunks that do not divide the channels
    (1, 16, 16, 1, 1, 1, 1, 1, 1),  # more pixels than columns
    (1, 8, 16, 16, 1, 1, 1, 1, 1),  # more CTAs than a cluster has
    (1, 8, 256, 1, 4, 1, 1, 8, 1),  # more shared memory than there is
], ids=str)  # fmt: skip
def test_tilings_that_do_not_fit(fields):
    x, w = torch.empty(1, 256, 4, 8, dtype=F16), torch.empty(512, 256, 3, 3, dtype=F16)
    assert not patch.can_use(geometry_of(call_of(x, w, None, padding=1)), PatchTiling(*fields))


def test_table_falls_back_to_triton_without_the_compiler(monkeypatch):
    x, w = torch.empty(1, 16, 4, 8, dtype=F16), torch.empty(8, 16, 3, 3, dtype=F16)
    call = call_of(x, w, None, padding=1)
    use = {"variant": "gather", "block_m": 16, "block_n": 16, "block_k": 16}
    row = tilings.key_of(geometry_of(call)) | {"label": "row", "use": use}
    row |= {"patch": dict(tile_h=1, tile_w=8, chunk=16, mt=1, nt=1)}
    monkeypatch.setattr(tilings, "tuning_rows", lambda: (row,))
    assert conv_plan.plan_for(call).tiling.variant == "gather"
    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    assert conv_plan.plan_for(call).threads == 128


TABLE = {row["label"]: row for row in tilings.tuning_rows() if "patch" in row}


@pytest.mark.skipif(not cuda.has_compiler(), reason="cuda-core is not installed")
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_tables_patches_compile_without_spills(row, tmp_path, monkeypatch):
    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path / "cache"))
    call = call_of_row(row)
    tiling, label = tilings.tuned(geometry_of(call), True)
    assert (label, patch.can_use(geometry_of(call), tiling)) == (row["label"], True)
    plan = patch.plan_of(call, geometry_of(call), tiling, label)
    cubin = cuda.compile_cubin(patch.source("patch"), "sm_90a", plan.macros)
    assert stacks(cubin, tmp_path) == ["0"]
