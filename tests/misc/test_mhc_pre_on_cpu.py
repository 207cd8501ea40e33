"""csrc/mhc_pre.cu itself, run on the CPU: clusters, barriers and remote shared memory included."""

import pytest
import torch
from misc.on_cpu import conformance, needs_compiler
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_misc import mhc_pre
from opkiln_misc.mhc_pre import Tiling

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]
SMALL = Tiling(rows=2, cluster=2, threads=192)


@pytest.mark.parametrize("case", conformance("mhc_pre", torch.float32, torch.bfloat16))
def test_conformance(case, monkeypatch):
    monkeypatch.setattr(mhc_pre, "rule", lambda batch: SMALL)
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


@pytest.mark.parametrize("streams", [3, 8])
def test_streams(streams):
    call, tensors = call_of(3, streams, 20)
    got = mhc_pre.prepare(call, Tiling(rows=4, cluster=4, threads=96))(*tensors)
    wide = [t.double() for t in tensors]
    want = call.spec.reference(*wide, **vars(call.params))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-6)


def test_rows_do_not_depend_on_the_batch():
    call, tensors = call_of(5, 4, 24)
    many = mhc_pre.prepare(call, Tiling(rows=4, cluster=2, threads=192))(*tensors)
    phi, x, b = tensors
    one, _ = call_of(1, 4, 24)
    alone = mhc_pre.prepare(one, Tiling(rows=1, cluster=2, threads=192))(phi, x[:1], b)
    for a, m in zip(alone, many, strict=True):
        assert torch.equal(a, m[:1])


def test_fewer_columns_than_ctas():
    """Some CTAs of the cluster have no column at all."""
    call, tensors = call_of(2, 4, 2)
    got = mhc_pre.prepare(call, Tiling(rows=2, cluster=4, threads=96))(*tensors)
    want = call.spec.reference(*tensors, **vars(call.params))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_too_many_columns_are_refused():
    meta = dict(device="meta")
    tensors = [torch.empty(s, **meta) for s in ((4 * 10**6, 24), (1, 4 * 10**6), (24,))]
    call, _ = call_of(1, 4, 2)
    params = vars(call.params)
    with pytest.raises(ValueError, match="shared memory"):
        mhc_pre.plan_for(Call.of(call.spec, tensors, params, real=False))
