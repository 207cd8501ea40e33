"""csrc/mhc_pre.cu and csrc/mhc_pre_cluster.cu themselves, run on the CPU."""

import pytest
import torch
from misc.on_cpu import conformance, needs_compiler
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_misc import mhc_pre, mhc_pre_cluster, plugin

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]
SMALL = {
    mhc_pre: mhc_pre.Tiling(2, 64, 2, 96),
    mhc_pre_cluster: mhc_pre_cluster.Tiling(2, 2, 96, 2, 8),
}
modules = pytest.mark.parametrize("module", SMALL, ids=lambda m: m.__name__)


@modules
@pytest.mark.parametrize("case", conformance("mhc_pre", torch.float32, torch.bfloat16))
def test_conformance(module, case, monkeypatch):
    class Planner:
        @staticmethod
        def prepare(call):
            return module.prepare(call, SMALL[module])

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


@modules
@pytest.mark.parametrize(("streams", "columns"), [(3, 20), (8, 20), (8, 21), (2, 1000), (4, 2)])
def test_sizes(module, streams, columns):
    """Several vectors a lane, several slabs, fewer columns than threads or CTAs of a cluster."""
    tiling = {
        mhc_pre: mhc_pre.Tiling(4, 96, 3, 96, 8, overlap=True),
        mhc_pre_cluster: mhc_pre_cluster.Tiling(4, 8, 96, 1, 4),
    }[module]
    call, tensors = call_of(3, streams, columns)
    got = module.prepare(call, tiling)(*tensors)
    wide = [t.double() for t in tensors]
    want = call.spec.reference(*wide, **vars(call.params))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-6)


@modules
def test_phi_without_vectors(module):
    """80 columns one by one: three a lane."""
    call, (phi, x, b) = call_of(2, 8, 20)
    shifted = torch.empty(160, 81)[:, 1:].copy_(phi)
    call = Call.of(call.spec, [shifted, x, b], vars(call.params))
    assert module.plan_for(call).macros["PHI_VECTOR"] == 1
    got = module.prepare(call, SMALL[module])(shifted, x, b)
    for g, w in zip(got, call.spec.reference(phi, x, b, **vars(call.params)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


@modules
def test_rows_do_not_depend_on_the_batch(module):
    call, tensors = call_of(5, 4, 24)
    many = module.prepare(call, SMALL[module])(*tensors)
    phi, x, b = tensors
    one, _ = call_of(1, 4, 24)
    fields = SMALL[module].__dataclass_fields__
    tiling = type(SMALL[module])(1, *[getattr(SMALL[module], f) for f in fields][1:])
    alone = module.prepare(one, tiling)(phi, x[:1], b)
    for a, m in zip(alone, many, strict=True):
        assert torch.equal(a, m[:1])


def test_streams_beyond_the_kernels_are_refused():
    call, _ = call_of(1, 9, 2)
    with pytest.raises(ValueError, match="8 streams"):
        mhc_pre.plan_for(call)
