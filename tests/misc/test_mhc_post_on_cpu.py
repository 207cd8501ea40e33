"""csrc/mhc_post.cu itself, run on the CPU."""

import pytest
import torch
from misc.on_cpu import needs_compiler
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_misc.mhc_post_cuda import Tiling, plan_for, prepare

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated")]
RTOL = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-21}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def check(layer: torch.Tensor, h: torch.Tensor, res: torch.Tensor, tiling: Tiling) -> int:
    """Elements of an access."""
    spec, tensors = CATALOGUE["mhc_post"], (layer, h, res)
    call = Call.of(spec, tensors, {})
    got = prepare(call, tiling)(*tensors)
    want = spec.reference(*(t.double() for t in tensors))
    assert (got.shape, got.dtype, got.is_contiguous()) == (res.shape, res.dtype, True)
    torch.testing.assert_close(got.double(), want, rtol=RTOL[res.dtype], atol=2**-20)
    return plan_for(call, tiling).macros["VECTOR"]


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize(("n", "c", "vector"), [(4, 328, 8), (1, 33, 1), (3, 24, 8), (8, 6, 2)])
def test_sizes(dtype, n, c, vector):
    tensors = random(3, c, dtype=dtype), random(3, n), random(3, n * c, dtype=dtype)
    assert check(*tensors, Tiling(32, 2)) == min(vector, 16 // dtype.itemsize)


@pytest.mark.parametrize("tiling", [Tiling(64, 4), Tiling(32, 1, 8), Tiling(96, 2, 4)], ids=str)
def test_tilings(tiling):
    bf16 = torch.bfloat16
    check(random(2, 72, dtype=bf16), random(2, 4), random(2, 288, dtype=bf16), tiling)


STRIDES = {
    "padded": lambda: (random(3, 40)[:, :32], random(3, 5)[:, :4], random(3, 136)[:, :128]),
    "transposed": lambda: (random(32, 3).t(), random(4, 3).t(), random(128, 3).t()),
    "expanded": lambda: (random(1, 32).expand(3, 32), random(3, 4), random(1, 1).expand(3, 128)),
    "one-strided": lambda: (random(3, 64)[:, ::2], random(3, 4), random(3, 128)),
    "misaligned": lambda: (random(3, 33)[:, 1:], random(3, 4), random(3, 129)[:, 1:]),
}


@pytest.mark.parametrize("make", STRIDES.values(), ids=STRIDES)
def test_strides(make):
    check(*make(), Tiling(32, 2))
