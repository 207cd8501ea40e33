"""Derivatives of convolutions: of any order, by every road, in the precision of the call."""

import contextlib
from functools import partial

import opkiln.functional as F
import pytest
import torch
from opkiln.ops.conv import conv, products
from torch.utils._python_dispatch import TorchDispatchMode

N = torch.nn.functional
F32, F64 = torch.float32, torch.float64
NAMES = {1: "conv1d", 2: "conv2d", 3: "conv3d"}


def normal(*shape, dtype=F32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


class Convolutions(TorchDispatchMode):
    """Counts torch's convolutions and their gradients: [inside, outside] of float32_precision."""

    inside = False

    def __init__(self):
        super().__init__()
        self.counts = [0, 0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in str(func):
            self.counts[not self.inside] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("n", NAMES)
def test_every_derivative_is_taken_in_the_same_precision(n, monkeypatch):
    seen = Convolutions()

    @contextlib.contextmanager
    def precision(x, allow_tf32):
        assert x.dtype == F32 and not allow_tf32
        seen.inside = True
        yield
        seen.inside = False

    monkeypatch.setattr(products, "float32_precision", precision)
    monkeypatch.setattr(conv, "float32_precision", precision)
    x, w = normal(2, 4, *[6] * n).requires_grad_(), normal(6, 2, *[3] * n).requires_grad_()
    with seen:
        loss = getattr(F, NAMES[n])(x, w, groups=2, backend="torch").square().sum()
        for order in (1, 2, 3):
            before = seen.counts[0]
            (grad,) = torch.autograd.grad(loss, x if order == 2 else w, create_graph=True)
            assert seen.counts[0] > before
            loss = grad.square().sum()
    assert seen.counts[1] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN decides on TF32")
@pytest.mark.parametrize("backend", ["opkiln", "torch", "torch-ref"])
@pytest.mark.parametrize("n", NAMES)
def test_second_derivatives_are_exact_on_integers(n, backend):
    """Sums of integers up to 4,095 need 12 bits and more: TF32 has 11."""
    integers = torch.randint(0, 4096, (2, 16, *[8] * n), device="cuda", dtype=F32)
    ones = torch.ones(32, 16, *[2] * n, device="cuda", dtype=F32)
    expected = getattr(N, NAMES[n])(integers.double(), ones.double())
    x, w = torch.zeros_like(integers, requires_grad=True), ones.requires_grad_()
    upstream = torch.zeros(expected.shape, device="cuda", requires_grad=True)
    out = getattr(F, NAMES[n])(x, w, backend=backend)
    (grad,) = torch.autograd.grad(out, x, upstream, create_graph=True)
    (second,) = torch.autograd.grad(grad, upstream, integers)
    assert torch.equal(second.double(), expected)


def derivatives(fn, x, w, b):
    """By torch.func, in reverse and forward mode, nested; each of a cube, so that none is zero."""
    t = torch.func

    def loss(x, w, b):
        return fn(x, w, b).pow(3).sum()

    def pushed(x, w, b):
        return t.jvp(lambda x: t.grad(loss)(x, w, b), (x,), (x.flip(-1),))[1]

    def of_batch(x, w, b):
        return t.vmap(loss, in_dims=(0, None, None))(x, w, b).sum()

    gradients = t.vmap(t.grad(loss, argnums=(0, 1, 2)), in_dims=(0, None, None))
    return [
        *gradients(x, w, b),
        *t.grad(of_batch, argnums=(0, 1, 2))(x, w, b),
        t.grad(lambda w: t.grad(loss)(x, w, b).square().sum())(w),
        t.jvp(lambda x: pushed(x, w, b), (x,), (x.flip(-2),))[1],
        t.jacfwd(t.jacfwd(lambda b: loss(x, w, b)))(b),
    ]


def test_derivatives_of_every_order_are_those_of_torch():
    x, w, b = (normal(*shape, dtype=F64) for shape in ((2, 4, 6, 5), (6, 2, 3, 3), (6,)))
    how = {"stride": 2, "padding": 1, "groups": 2}
    found = derivatives(partial(F.conv2d, **how), x, w, b)
    for got, expected in zip(found, derivatives(partial(N.conv2d, **how), x, w, b), strict=True):
        torch.testing.assert_close(got, expected)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    assert torch.autograd.gradgradcheck(partial(F.conv2d, **how), leaves)
    assert torch.autograd.gradgradcheck(partial(F.conv2d, **how), (leaves[0][0], *leaves[1:]))
