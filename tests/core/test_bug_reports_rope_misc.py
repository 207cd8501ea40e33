"""Rotary embeddings, FFT, hyper-connections and top-k that other libraries got wrong.

Threads about frequency rules, Sinkhorn, special scores and bad arguments are named at the tests of
test_rope_semantics.py and test_misc_semantics.py that hold them.
"""

import math

import opkiln.functional as F
import pytest
import torch
from opkiln.registry import REGISTRY
from reports import BACKENDS, Report, check, check_refused
from samples import rand

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
INF = float("inf")


def turned(x, position, frequencies, interleaved=False):
    """x [T, ..., D] with its first pairs of channels turned as complex numbers."""
    width = 2 * len(frequencies)
    pairs = (width // 2, 2) if interleaved else (2, width // 2)
    head = x[..., :width].unflatten(-1, pairs).movedim(-1 if interleaved else -2, 0)
    angles = torch.outer(position.double(), torch.tensor(frequencies, dtype=F64))
    shape = (len(position), *[1] * (x.ndim - 2), -1)
    z = torch.complex(*head) * torch.polar(torch.ones_like(angles), angles).view(shape)
    head = torch.stack((z.real, z.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((head, x[..., width:]), -1)


def powers(dim, base=1e4):
    return [base ** (-i / dim) for i in range(0, dim, 2)]


def yarn_frequencies(dim, scale, original):
    """YaRN's with 32 and 1 turns as the ends of the ramp, each rounded outwards."""
    ends = [dim / 2 * math.log(original / (t * math.tau)) / math.log(1e4) for t in (32, 1)]
    low, high = math.floor(ends[0]), math.ceil(ends[1])
    slowed = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    return [f * (1 - s + s / scale) for f, s in zip(powers(dim), slowed, strict=True)]


IDS = torch.tensor([9, 0, 77, 4, 4, 31])
FUSED = (3, 4, 40)  # batch, tokens, and q of 2 heads, k and v of 1 and 2 heads of 8 channels


def batched(truth):
    """`truth` of a sample's tokens, for [B, S, H, D]."""
    return lambda x: torch.stack([truth(sample) for sample in x])


ROTATIONS = {
    "channels beyond rotary_dim are turned too": Report(
        "vllm-project/vllm#747 linkedin/Liger-Kernel#1451",
        lambda: (rand(F16, 6, 3, 24), IDS),
        lambda F, x, ids: F.rope_neox_position_ids(x, ids, max_position=80, rotary_dim=10),
        lambda x, ids: turned(x, ids, powers(10)),
        condition=77,
    ),
    "neighbouring channels are not the pairs": Report(
        "vllm-project/vllm#941 vllm-project/vllm#49290",
        lambda: (rand(BF16, 2, 9, 3, 12),),
        lambda F, x: F.rope_non_neox(x),
        batched(lambda x: turned(x, torch.arange(9), powers(12), interleaved=True)),
        condition=9,
    ),
    "an attention factor of 1 is replaced by YaRN's own": Report(
        "vllm-project/vllm#46280 ml-explore/mlx-lm#1507",
        lambda: (rand(F32, 50, 48),),
        lambda F, x: F.rope_yarn(x, scale=32.0, original_max_position=2048, attn_factor=1.0),
        lambda x: turned(x, torch.arange(50), yarn_frequencies(48, 32.0, 2048)),
        condition=50,
    ),
    "the query is a slice of a fused buffer": Report(
        "vllm-project/vllm#17091",
        lambda: (rand(F16, *FUSED)[..., :16].unflatten(-1, (2, 8)),),
        lambda F, x: F.rope_neox(x),
        batched(lambda x: turned(x, torch.arange(4), powers(8))),
        condition=4,
    ),
    "no tokens": Report(
        "Dao-AILab/flash-attention#1620",
        lambda: (rand(F32, 0, 3, 8), torch.zeros(0, dtype=torch.int32)),
        lambda F, x, ids: F.rope_neox_position_ids(x, ids, max_position=5),
        lambda x, ids: x,
    ),
}


def fft(F, x):
    return F.fft(x)


# Name -> threads, and the input.
TRANSFORMS = {
    "every second column of a transposed matrix": (
        "pytorch/pytorch#6118 IntelPython/dpnp#2332",
        lambda: rand(C64, 32, 5).t()[:, ::2],
    ),
    "one point": ("", lambda: rand(C64, 3, 2, 1)),
    "long rows further apart than their length": (
        "DTolm/VkFFT#101",
        lambda: rand(C64, 2, 16_390)[:, :16_384],
    ),
    "rounding errors of twiddles add up": (
        "mpicbg-scicomp/gearshifft#114",
        lambda: rand(C64, 1, 131_072),
    ),
    "double precision beside a large constant": (
        "pytorch/pytorch#33485",
        lambda: rand(C128, 3, 512) + 1e7,
    ),
    "a kernel for powers of two takes another size": (
        "intel/torch-xpu-ops#3121 isjinghao/T-Mamba#4",
        lambda: rand(C64, 4, 48),
    ),
}
TRANSFORM_REPORTS = {
    name: Report(threads, lambda make=make: (make(),), fft, torch.fft.fft)
    for name, (threads, make) in TRANSFORMS.items()
}
CONNECTIONS = {
    "a scale that a cosine does not see": Report(
        "ROCm/aiter#2646",
        lambda: (rand(BF16, 2, 776), rand(F32, 2, 3), rand(BF16, 2, 3 * 776)),
        lambda F, out, h_post, x_res: F.mhc_post(out, h_post, x_res),
        lambda out, h_post, x_res: (h_post[..., None] * out[:, None]).flatten(1) + x_res,
    ),
}


def windows(rows, starts, ends):
    """Scores [1, queries, KV, 1] and the windows of the queries."""
    bounds = [torch.tensor([b], dtype=torch.int32) for b in (starts, ends)]
    return rows[None, :, :, None], *bounds


def select(k):
    return lambda F, scores, starts, ends: F.topk_selector(scores, starts, ends, k)


def selected(k):
    """Larger scores first, of equal ones the lower position; unused slots are -1."""

    def truth(scores, starts, ends):
        found = torch.full((1, scores.shape[1], 1, k), -1, dtype=torch.int32)
        for query, row in enumerate(scores[0, :, :, 0]):
            first, end = int(starts[0, query]), int(ends[0, query])
            order = row[first:end].sort(descending=True, stable=True).indices[:k]
            found[0, query, 0, : len(order)] = order + first
        return found

    return truth


def last_bits():
    steps = torch.randint(0, 900, (1, 6000), generator=torch.Generator().manual_seed(6))
    return windows(2.5 + steps * 2.0**-22, [0], [6000])


def mostly_ties():
    scores = torch.full((1, 7000), -1.0)
    scores[:, 11::83] = 1 + torch.arange(85.0)
    return windows(scores, [0], [7000])


SELECTIONS = {
    "scores that differ in their last bits": Report(
        "tile-ai/tilelang#1351", last_bits, select(700), selected(700)
    ),
    "thousands of ties leave slots empty": Report(
        "sgl-project/sglang#30645", mostly_ties, select(1500), selected(1500)
    ),
    "as many candidates as slots": Report(
        "tile-ai/tilelang#2513",
        lambda: windows(rand(F32, 3, 70), [0, 11, 22], [48, 59, 70]),
        select(48),
        selected(48),
    ),
    "a number of slots that nobody compiled for": Report(
        "jundot/omlx#2956 sgl-project/sglang#23761",
        lambda: windows(rand(F32, 1, 4100), [3], [4097]),
        select(1111),
        selected(1111),
    ),
}
REPORTS = ROTATIONS | TRANSFORM_REPORTS | CONNECTIONS | SELECTIONS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", REPORTS)
def test_reported(what, backend):
    check(REPORTS[what], backend)


@pytest.mark.parametrize("rotary_dim", [13, 26], ids=["odd", "larger than the head"])
def test_a_rotary_dim_that_does_not_fit_is_refused(rotary_dim):
    """fla-org/flash-linear-attention#1177"""
    x, ids = rand(F32, 3, 1, 14), torch.arange(3)
    check_refused(
        lambda: F.rope_neox_position_ids(x, ids, max_position=8, rotary_dim=rotary_dim),
        "rotary_dim must be even and at most 14",
    )


@pytest.mark.skipif("opkiln" not in REGISTRY.of("fft"), reason="opkiln does not implement fft")
def test_a_size_without_a_kernel_is_refused_by_name():
    """intel/torch-xpu-ops#3121"""
    with pytest.raises(ValueError, match="opkiln"):
        F.fft(rand(C64, 4, 48), backend="opkiln")
