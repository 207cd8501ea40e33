"""csrc/fft.cu itself, run on the CPU: index arithmetic, twiddles, exchanges, both steps."""

import pytest
import torch
from misc.on_cpu import conformance, needs_compiler
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_misc import fft
from opkiln_misc.fft import Tiling

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]
C64, C128 = torch.complex64, torch.complex128
# RMS error relative to the RMS of the result; the CPU library's is 0.75 of ours.
LIMIT = {C64: 2.5e-7, C128: 5e-16}


@pytest.mark.parametrize("case", conformance("fft", C64))
def test_conformance(case):
    assert case.run() == ""


@pytest.mark.parametrize("case", conformance("fft_backward", C64))
def test_conformance_of_the_backward(case):
    assert case.run() == ""


def gradient_error(shape: tuple[int, ...], n: int, tiling: Tiling | None = None) -> float:
    """Of the gradient along the last dim, at its worst, for an input of `shape`."""
    g = torch.randn(*shape[:-1], n, dtype=C64)
    params = dict(n=n, dim=len(shape) - 1, norm="ortho", input_shape=shape, output_mask=[True])
    call = Call.of(CATALOGUE["fft_backward"], [g], params)
    got = fft.prepare(call, tiling)(g)
    (want,) = call.spec.reference(g.to(C128), **params)
    assert got.shape == want.shape
    return float((got - want).abs().max())


@pytest.mark.parametrize(("points", "cluster"), [(8, 1), (16, 2), (8, 8)])
@pytest.mark.parametrize("width", [256, 101, 600])
def test_gradient_of_a_cropped_or_padded_input(points, cluster, width):
    """In a CTA and over a cluster: fewer outputs than points, or zeros after them."""
    torch.manual_seed(0)
    tiling = Tiling(points, cluster=cluster, asynchronous=cluster == 8)
    assert gradient_error((3, width), 256, tiling) < 3e-6


@pytest.mark.parametrize("width", [16384, 5001, 40000])
def test_gradient_in_two_steps(width):
    torch.manual_seed(0)
    assert gradient_error((2, width), 16384) < 3e-6


def error(x: torch.Tensor, dim: int = -1, tiling: Tiling | None = None) -> float:
    dim = dim % x.ndim
    call = Call.of(CATALOGUE["fft"], [x], dict(n=x.shape[dim], dim=dim, norm="backward"))
    got = fft.prepare(call, tiling)(x)
    want = torch.fft.fft(x.to(C128), dim=dim)
    return float((got - want).abs().square().mean().sqrt() / want.abs().square().mean().sqrt())


@pytest.mark.parametrize("n", [2, 4, 16, 32, 128, 512, 4096, 8192, 16384, 65536])
def test_powers_of_two(n):
    torch.manual_seed(0)
    assert error(torch.randn(3, n, dtype=C64)) < LIMIT[C64]


@pytest.mark.parametrize("n", [8, 256, 4096, 8192])
def test_double(n):
    torch.manual_seed(0)
    assert error(torch.randn(2, n, dtype=C128)) < LIMIT[C128]


@pytest.mark.parametrize("tiling", [Tiling(8), Tiling(4, 32, 1), Tiling(16, 512, 1)], ids=str)
def test_tilings(tiling):
    torch.manual_seed(0)
    assert error(torch.randn(5, 4096, dtype=C64), tiling=tiling) < LIMIT[C64]


# CTAs with several transforms and with one; one, two and three passes after the exchange.
SPREAD = [(16, 2), (16, 8), (16, 16), (8, 2), (8, 8), (4, 2)]


@pytest.mark.parametrize(("points", "cluster"), SPREAD, ids=str)
@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_cluster_for_each_transform(points, cluster, dtype, asynchronous):
    torch.manual_seed(0)
    tiling = Tiling(points, cluster=cluster, asynchronous=asynchronous)
    assert error(torch.randn(3, 4096, dtype=dtype), tiling=tiling) < LIMIT[dtype]
    assert error(torch.randn(1024, 2, dtype=dtype), 0, tiling) < LIMIT[dtype]


def test_two_steps_along_the_first_dim_and_padded():
    torch.manual_seed(0)
    x = torch.randn(9000, 3, dtype=C64)
    call = Call.of(CATALOGUE["fft"], [x], dict(n=16384, dim=0, norm="ortho"))
    assert len(fft.plan_for(call)) == 2
    got = fft.prepare(call)(x)
    want = torch.fft.fft(x.to(C128), 16384, 0, "ortho")
    assert float((got - want).abs().max()) < 3e-6


@pytest.mark.parametrize(
    ("shape", "n", "words"),
    [((2, 6), 6, "powers of two"), ((2, 1), 1, "powers of two")],
)
def test_refused(shape, n, words):
    x = torch.empty(shape, dtype=C64, device="meta")
    call = Call.of(CATALOGUE["fft"], [x], dict(n=n, dim=1, norm="ortho"), real=False)
    with pytest.raises(ValueError, match=words):
        fft.plan_for(call)


def planned(transforms: int, dtype: torch.dtype, policy: Policy) -> fft.Step:
    x = torch.empty(transforms, 4096, dtype=dtype, device="meta")
    params = dict(n=4096, dim=1, norm="backward")
    (step,) = fft.plan_for(Call.of(CATALOGUE["fft"], [x], params, policy, real=False))
    return step


@pytest.mark.parametrize(("transforms", "cluster"), [(1, 8), (16, 8), (64, 2), (67, 1)])
def test_few_transforms_take_clusters(transforms, cluster):
    step = planned(transforms, C64, Policy())
    assert step.cluster == cluster
    assert step.macros["ASYNC"] == (cluster == 8)
    assert planned(transforms, C64, Policy(batch_invariant=True)).cluster == 1


def test_a_cluster_without_room_for_two_buffers_is_refused():
    with pytest.raises(ValueError, match="do not fit"):
        fft.step(C64, 32768, [], (1, 1), (32768, 32768), 0, Tiling(16, cluster=2), {})
