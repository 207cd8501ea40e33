"""csrc/mhc_pre.cu itself, run on the CPU."""

import pytest
import torch
from misc.on_cpu import conformance, needs_compiler
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_misc import mhc_pre, plugin
from opkiln_misc.mhc_pre import Tiling

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]
SMALL = Tiling(2, 96, 2, 2)


@pytest.mark.parametrize("case", conformance("mhc_pre", torch.float32, torch.bfloat16))
def test_conformance(case, monkeypatch):
    class Planner:
        @staticmethod
        def prepare(call):
            return mhc_pre.prepare(call, SMALL)

    monkeypatch.setattr(plugin, "planner", lambda op: Planner)
    assert case.run() == ""


def call_of(batch: int, streams: int, columns: int, repeat: int = 2) -> tuple[Call, list]:
    torch.manual_seed(0)
    width, m = streams * columns, streams * streams + 2 * streams
    tensors = [torch.randn(width, m) / width**0.5, torch.randn(batch, width), torch.randn(m)]
    params = dict(
        alpha_pre=0.7, alpha_post=1.1, alpha_res=0.9, sinkhorn_repeat=repeat, sinkhorn_eps=0.02,
        return_h_post=True,
    )  # fmt: skip
    return Call.of(CATALOGUE["mhc_pre"], tensors, params), tensors


@pytest.mark.parametrize(("streams", "columns"), [(3, 20), (8, 20), (8, 21), (2, 1000), (4, 2)])
def test_sizes(streams, columns):
    """Several vectors a lane, several slabs, fewer columns than threads or CTAs of a cluster."""
    tiling = Tiling(4, 96, 1, 8)
    call, tensors = call_of(3, streams, columns)
    got = mhc_pre.prepare(call, tiling)(*tensors)
    wide = [t.double() for t in tensors]
    want = call.spec.reference(*wide, **vars(call.params))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("streams", "columns", "step"), [(8, 33, 1), (3, 33, 1), (4, 24, 2)])
def test_halves_one_by_one(streams, columns, step, dtype):
    """Odd columns, or a stride of x: no two elements are loaded or stored at once."""
    call, (phi, x, b) = call_of(3, streams, columns)
    x = torch.empty(3, streams * columns * step, dtype=dtype)[:, ::step].copy_(x)
    call = Call.of(call.spec, [phi, x, b], vars(call.params))
    assert mhc_pre.plan_for(call).macros["X_VECTOR"] == 1
    got = mhc_pre.prepare(call, SMALL)(phi, x, b)
    want = call.spec.reference(phi.double(), x.double(), b.double(), **vars(call.params))
    for g, w in zip(got, want, strict=True):
        unit = torch.finfo(g.dtype).eps  # of the output's own rounding: half a unit
        torch.testing.assert_close(g.double(), w, rtol=unit / 2 + 1e-5, atol=1e-6)


def test_phi_without_vectors():
    """80 columns one by one: three a lane."""
    call, (phi, x, b) = call_of(2, 8, 20)
    shifted = torch.empty(160, 81)[:, 1:].copy_(phi)
    call = Call.of(call.spec, [shifted, x, b], vars(call.params))
    assert mhc_pre.plan_for(call).macros["PHI_VECTOR"] == 1
    got = mhc_pre.prepare(call, SMALL)(shifted, x, b)
    for g, w in zip(got, call.spec.reference(phi, x, b, **vars(call.params)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_rows_do_not_depend_on_the_batch():
    call, tensors = call_of(5, 4, 24)
    many = mhc_pre.prepare(call, Tiling(4, 96, 1, 2))(*tensors)
    phi, x, b = tensors
    one, _ = call_of(1, 4, 24)
    alone = mhc_pre.prepare(one, Tiling(1, 96, 3, 2))(phi, x[:1], b)
    for a, m in zip(alone, many, strict=True):
        assert torch.equal(a, m[:1])


@pytest.mark.parametrize("width", [5120, 10240])
def test_the_rule_sums_alike_for_every_batch(width):
    few, many = mhc_pre.rule(1, width, 4), mhc_pre.rule(9, width, 4)
    assert few.rows < many.rows
    assert (few.threads, few.cluster) == (many.threads, many.cluster)


def test_streams_beyond_the_kernels_are_refused():
    call, _ = call_of(1, 9, 2)
    with pytest.raises(ValueError, match="8 streams"):
        mhc_pre.plan_for(call)
