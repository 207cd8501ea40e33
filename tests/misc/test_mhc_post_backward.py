"""mhc_post_backward against the reference in float64; in Triton's interpreter without a GPU."""

import pytest
import torch
from misc.test_mhc_post import BF16, F16, F32, RTOL, random
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_misc.mhc_post_backward import Tiling, prepare, rule
from opkiln_misc.plugin import supports_triton_backward

SPEC = CATALOGUE["mhc_post_backward"]
ALL = [True, True, True]


def run(g, layer, h, tiling: Tiling | None = None, mask: list[bool] = ALL) -> list[torch.Tensor]:
    """Launch, compare with float64."""
    tensors, params = [g, layer, h], dict(x_res_shape=tuple(g.shape), output_mask=mask)
    call = Call.of(SPEC, tensors, params)
    assert supports_triton_backward(call) is None
    found = prepare(call, tiling)(*tensors)
    found = list(found) if isinstance(found, tuple) else [found]
    want = [w for w in SPEC.reference(*(t.double() for t in tensors), **params) if w is not None]
    for got, expected, meta in zip(found, want, call.outputs, strict=True):
        assert (tuple(got.shape), got.stride(), got.dtype) == (meta.shape, meta.stride, meta.dtype)
        torch.testing.assert_close(got.double(), expected, rtol=RTOL[got.dtype], atol=2**-18)
    if mask[2]:
        assert torch.equal(found[-1], g) and found[-1].data_ptr() != g.data_ptr()
    return found


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "c"), [(4, 64), (1, 33), (3, 24), (8, 40), (2, 1)])
def test_sizes(dtype, n, c, spread):
    run(random(3, n * c, dtype=dtype), random(3, c, dtype=dtype), random(3, n),
        Tiling(64, 1, spread))  # fmt: skip


def test_a_row_in_several_blocks():
    run(random(2, 4 * 72), random(2, 72), random(2, 4), Tiling(16, 1))


def test_few_rows_are_spread():
    assert rule(4, 4, 2560, 2).spread and not rule(4096, 4, 2560, 2).spread
    assert not rule(1, 1, 2560, 2).spread and not rule(1, 4, 2**20, 2).spread
    run(random(1, 800), random(1, 200), random(1, 4))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("i", range(3))
def test_a_single_gradient(i, spread):
    mask = [j == i for j in range(3)]
    found = run(random(2, 96), random(2, 24), random(2, 4), Tiling(32, 1, spread), mask)
    assert len(found) == 1


@pytest.mark.parametrize("spread", [False, True])
def test_the_sum_does_not_depend_on_the_batch(spread):
    g, layer, h = random(5, 288), random(5, 72), random(5, 4)
    many = run(g, layer, h, Tiling(128, 1, spread))
    alone = run(g[2:3], layer[2:3], h[2:3], Tiling(128, 1, spread))
    for m, a in zip(many, alone, strict=True):
        assert torch.equal(m[2:3], a)


def test_a_batch_invariant_policy_takes_one_tiling():
    g, layer, h = random(65, 96), random(65, 24), random(65, 4)
    policy = Policy(batch_invariant=True)

    def grad_h(rows: int) -> torch.Tensor:
        tensors = [g[:rows], layer[:rows], h[:rows]]
        params = dict(x_res_shape=(rows, 96), output_mask=[False, True, False])
        return prepare(Call.of(SPEC, tensors, params, policy))(*tensors)

    assert torch.equal(grad_h(65)[:1], grad_h(1))


STRIDES = {
    "padded": lambda: (random(3, 136)[:, :128], random(3, 40)[:, :32], random(3, 5)[:, :4]),
    "transposed": lambda: (random(128, 3).t(), random(32, 3).t(), random(4, 3).t()),
    "expanded": lambda: (random(1, 1).expand(3, 128), random(1, 32).expand(3, 32), random(3, 4)),
    "one-strided": lambda: (random(3, 128), random(3, 64)[:, ::2], random(3, 4)),
}


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("make", STRIDES.values(), ids=STRIDES)
def test_strides(make, spread):
    run(*make(), Tiling(32, 1, spread))


def test_through_autograd():
    """The gradient that loss.backward() takes is this kernel's."""
    import opkiln
    from opkiln.functional import mhc_post

    tensors = [t.requires_grad_() for t in (random(2, 24), random(2, 4), random(2, 96))]
    with opkiln.use("opkiln"):
        out = mhc_post(*tensors)
    g = torch.randn_like(out)
    out.backward(g)
    want = run(g, tensors[0].detach(), tensors[1].detach())
    for t, w in zip(tensors, want, strict=True):
        assert torch.equal(t.grad, w)


def test_refuses_what_it_cannot_serve():
    def refusal(dtype: torch.dtype, streams: int, columns: int) -> str:
        shapes = ((1, streams * columns), (1, columns), (1, streams))
        tensors = [torch.empty(s, dtype=dtype, device="meta") for s in shapes]
        tensors[2] = tensors[2].to(torch.float64 if dtype == torch.float64 else F32)
        params = dict(x_res_shape=shapes[0], output_mask=ALL)
        call = Call.of(SPEC, tensors, params, Policy(), real=False)
        return supports_triton_backward(call).reason

    assert "float64" in refusal(torch.float64, 4, 8)
    assert "64 streams" in refusal(F32, 65, 8)
    assert "2**31" in refusal(F32, 4, 2**29)
