"""mhc_post against the spec's reference in float64; in Triton's interpreter without a GPU."""

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_misc.mhc_post import Tiling, layout, prepare, rule, tiling_of
from opkiln_misc.plugin import supports_mhc_post

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
RTOL = {F16: 2**-11, BF16: 2**-7 if DEVICE == "cpu" else 2**-8, F32: 2**-21}


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def run(
    layer: torch.Tensor, h: torch.Tensor, res: torch.Tensor, tiling: Tiling | None = None
) -> int:
    """Launch, compare with float64, return the alignment that the kernel was told."""
    spec, tensors = CATALOGUE["mhc_post"], [layer, h, res]
    call = Call.of(spec, tensors, {})
    assert supports_mhc_post(call) is None
    got = prepare(call, tiling)(*tensors)
    want = spec.reference(*(t.double() for t in tensors))
    assert (got.shape, got.dtype, got.is_contiguous()) == (res.shape, res.dtype, True)
    torch.testing.assert_close(got.double(), want, rtol=RTOL[res.dtype], atol=2**-20)
    return layout(call)[0]


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "c", "align"), [(4, 64, 16), (1, 33, 1), (3, 24, 8), (8, 40, 8)])
def test_sizes(dtype, n, c, align):
    tensors = random(3, c, dtype=dtype), random(3, n), random(3, n * c, dtype=dtype)
    assert run(*tensors) == align


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("block_c", [16, 128])
def test_blocks(block_c, fixed):
    run(random(2, 72), random(2, 4), random(2, 288), Tiling(block_c, 1, fixed))


def test_one_row_takes_more_ctas():
    assert rule(1).block_c < rule(2).block_c
    run(random(1, 200), random(1, 4), random(1, 800))


def test_a_batch_invariant_policy_takes_one_tiling():
    """Of one row as of many."""

    def chosen(batch: int) -> Tiling:
        tensors = [random(batch, 200), random(batch, 4), random(batch, 800)]
        policy = Policy(batch_invariant=True)
        return tiling_of(Call.of(CATALOGUE["mhc_post"], tensors, {}, policy))

    assert chosen(1) == chosen(2) == rule(4096)


def test_the_table_serves_dense_tensors_of_the_measured_sizes():
    def chosen(batch: int, pitch: int) -> Tiling:
        sizes = (batch, 4 * 2560)
        res = torch.empty(batch, pitch, dtype=BF16, device="meta")[:, : sizes[1]]
        layer = torch.empty(batch, 2560, dtype=BF16, device="meta")
        h = torch.empty(batch, 4, device="meta")
        return tiling_of(Call.of(CATALOGUE["mhc_post"], [layer, h, res], {}, real=False))

    assert chosen(2, 10240).fixed and chosen(2, 10240) == chosen(4, 10240)
    assert chosen(4, 10256) == rule(4)


@pytest.mark.parametrize("columns", [1920, 2560])
def test_sizes_of_the_table(columns):
    run(random(2, columns, dtype=F16), random(2, 4), random(2, 4 * columns, dtype=F16))


STRIDES = {
    "padded": lambda: (random(3, 40)[:, :32], random(3, 5)[:, :4], random(3, 136)[:, :128]),
    "transposed": lambda: (random(32, 3).t(), random(4, 3).t(), random(128, 3).t()),
    "expanded": lambda: (random(1, 32).expand(3, 32), random(3, 4), random(1, 1).expand(3, 128)),
    "one-strided": lambda: (random(3, 64)[:, ::2], random(3, 4), random(3, 128)),
}


@pytest.mark.parametrize("make", STRIDES.values(), ids=STRIDES)
def test_strides(make):
    run(*make())


def test_refuses_what_it_cannot_index():
    meta = dict(device="meta")
    tensors = [torch.empty(s, **meta) for s in ((1, 2**29), (1, 4), (1, 2**31))]
    refusal = supports_mhc_post(Call.of(CATALOGUE["mhc_post"], tensors, {}, real=False))
    assert "32-bit" in refusal.reason
