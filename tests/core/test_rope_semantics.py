"""What rotary embeddings promise beyond their formula: exact angles, the shared tables, in place.

Truth is an independent rotation by complex numbers in float64.
"""

import math
import threading

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln.device import rope_tables
from opkiln.errors import ArgumentError

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BACKENDS = ("torch", "torch-ref")
FAR = 131_064


def normal(*shape, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def frequencies(dim, base=10000.0):
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def llama31(dim, base, factor, low, high, original):
    found = []
    for f in frequencies(dim, base):
        turns = original * f / (2 * math.pi)
        if turns > high:
            found.append(f)
        elif turns < low:
            found.append(f / factor)
        else:
            smooth = (turns - low) / (high - low)
            found.append((1 - smooth) * f / factor + smooth * f)
    return found


def yarn(dim, base, scale, original, fast, slow):
    def pair(turns):
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(pair(fast)), math.ceil(pair(slow))
    assert 0 < low < high < dim // 2
    found = []
    for i, f in enumerate(frequencies(dim, base)):
        share = min(max((i - low) / (high - low), 0), 1)
        found.append(f / scale * share + f * (1 - share))
    return found


def turn(x, position, freq, amplitude=1.0, interleaved=False):
    """x [T, H, D] in float64, token t turned by position[t] * freq."""
    x = x.double()
    half = len(freq)
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
    angle = torch.outer(position.double(), torch.tensor(freq, dtype=F64))
    turned = torch.complex(a, b) * torch.polar(torch.full_like(angle, amplitude), angle)[:, None]
    out = x.clone()
    if interleaved:
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = turned.real, turned.imag
    else:
        out[..., :half], out[..., half : 2 * half] = turned.real, turned.imag
    return out


LONG = [1.0 + i / 7 for i in range(32)]
# function, arguments, its frequencies and amplitude for 64 channels, interleaved
RULES = {
    "neox": (F.rope_neox, {"base": 5e5}, frequencies(64, 5e5), 1.0, False),
    "non_neox": (F.rope_non_neox, {}, frequencies(64), 1.0, True),
    "llama31": (
        F.rope_llama31,
        {"base": 5e5, "scale_factor": 32.0},
        llama31(64, 5e5, 32, 1, 4, 8192),
        1.0,
        False,
    ),
    "llama31 of other bands": (
        F.rope_llama31,
        {"low_freq_factor": 0.5, "high_freq_factor": 16.0},
        llama31(64, 1e4, 8, 0.5, 16, 8192),
        1.0,
        False,
    ),
    "yarn of another ramp": (
        F.rope_yarn,
        {"beta_fast": 8.0, "beta_slow": 2.0},
        yarn(64, 1e4, 16, 4096, 8, 2),
        1.0,
        False,
    ),
    "yarn": (
        F.rope_yarn,
        {"scale": 8.0, "attn_factor": 1.25},
        yarn(64, 1e4, 8, 4096, 32, 1),
        1.25,
        False,
    ),
    "longrope": (
        F.rope_longrope,
        {"rescale_factors": LONG, "max_position_embeddings": 131072},
        [f / s for f, s in zip(frequencies(64), LONG, strict=True)],
        math.sqrt(1 + math.log(32) / math.log(4096)),
        False,
    ),
    "longrope within its context": (F.rope_longrope, {}, frequencies(64), 1.0, False),
}


# ggml-org/llama.cpp#8676, lablup/mlxcel#1355 (llama31), apache/tvm#18576 (yarn),
# apache/tvm#18422, ml-explore/mlx-lm#660 (longrope)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("offset", [0, FAR])
@pytest.mark.parametrize("rule", RULES)
def test_rules_match_a_rotation_in_float64(rule, offset, dtype, backend):
    rope, arguments, freq, amplitude, interleaved = RULES[rule]
    x = normal(2, 7, 3, 64, dtype=dtype)
    got = rope(x, offset=offset, backend=backend, **arguments)
    position = torch.arange(offset, offset + 7)
    want = torch.stack([turn(row, position, freq, amplitude, interleaved) for row in x])
    assert got.dtype == dtype and got.is_contiguous()
    # Half an ulp of the result, of cos and sin, and of two products and their sum.
    assert (got.double() - want).abs().max() <= 3 * torch.finfo(dtype).eps * want.abs().max()
    flat = rope(x[0, :, 0], offset=offset, backend=backend, **arguments)
    assert torch.equal(flat, got[0, :, 0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_position_ids(dtype, backend):
    x = normal(5, 2, 16)
    ids = torch.tensor([131_071, 0, 7, 7, 99_999], dtype=dtype)
    got = F.rope_neox_position_ids(x, ids, max_position=131_072, rotary_dim=8, backend=backend)
    want = turn(x, ids, frequencies(8))
    torch.testing.assert_close(got, want.float(), rtol=0, atol=1e-6)
    assert torch.equal(got[..., 8:], x[..., 8:])


@pytest.mark.parametrize("rope", [F.rope_neox, F.rope_non_neox])
def test_channels_beyond_rotary_dim_pass_through(rope):
    x = normal(2, 5, 3, 20, dtype=F16)
    got = rope(x, rotary_dim=12)
    assert torch.equal(got[..., 12:], x[..., 12:])
    assert torch.equal(got[..., :12], rope(x[..., :12]))


@pytest.mark.parametrize("rule", RULES)
def test_the_gradient_is_the_rotation_back(rule):
    rope, arguments, _, amplitude, _ = RULES[rule]
    x = normal(1, 5, 2, 64, dtype=F64).requires_grad_()
    upstream = normal(1, 5, 2, 64, dtype=F64, seed=1)
    rope(x, offset=3, **arguments).backward(upstream)
    # A rotation times a: turning the gradient forwards again gives a^2 times the upstream one.
    again = rope(x.grad, offset=3, **arguments)
    torch.testing.assert_close(again, amplitude**2 * upstream, rtol=1e-12, atol=1e-12)


def test_factors_as_a_tensor_are_read_at_every_call():
    x = normal(4, 8)
    factors = torch.tensor([1.0, 2.0, 3.0, 4.0])
    first = F.rope_longrope(x, rescale_factors=factors)
    assert torch.equal(first, F.rope_longrope(x, rescale_factors=[1, 2, 3, 4]))
    factors[1] = 9
    assert torch.equal(
        F.rope_longrope(x, rescale_factors=factors),
        F.rope_longrope(x, rescale_factors=[1, 9, 3, 4]),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place(backend):
    buffer = normal(2, 6, 9, 8)
    untouched = buffer.clone()
    q = buffer[:, :, 3:6]
    want = F.rope_yarn(q, backend=backend)
    version = q._version
    assert F.rope_yarn(q, inplace=True, backend=backend) is q
    assert torch.equal(q, want) and q._version > version
    assert torch.equal(buffer[:, :, :3], untouched[:, :, :3])
    assert torch.equal(buffer[:, :, 6:], untouched[:, :, 6:])
    x = normal(3, 2, 8)
    ids = torch.tensor([2, 0, 1])
    want = F.rope_neox_position_ids(x, ids, max_position=3, backend=backend)
    assert F.rope_neox_position_ids(x, ids, max_position=3, inplace=True, backend=backend) is x
    assert torch.equal(x, want)


def test_in_place_under_autocast_writes_the_callers_tensor():
    x = normal(4, 8, dtype=BF16)
    want = F.rope_neox(x)
    with torch.autocast("cpu", dtype=BF16):
        F.rope_neox(x, inplace=True)
    assert torch.equal(x, want)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(1, 8).expand(4, 8), "share memory"),
        (torch.zeros(20).as_strided((5, 8), (1, 1)), "share memory"),
        (torch.zeros(4, 8, requires_grad=True) * 1, "requires a gradient"),
    ],
    ids=["expanded", "overlapping", "gradient"],
)
def test_in_place_refuses(x, message):
    with pytest.raises(ArgumentError, match=message):
        F.rope_neox(x, inplace=True)


X = torch.zeros(3, 8)
IDS = torch.zeros(3, 2, 8)


# fla-org/flash-linear-attention#1177 (rotary_dim), vllm-project/vllm#14404,
# microsoft/onnxruntime#28205 (position_ids)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.rope_neox(X, rotary_dim=3), "rotary_dim must be even and at most 8"),
        (lambda: F.rope_neox(X, rotary_dim=10), "rotary_dim must be even and at most 8"),
        (lambda: F.rope_neox(X[:, :7]), "rotary_dim must be even and at most 7"),
        (lambda: F.rope_neox(X, offset=-1), "offset must not be negative"),
        (lambda: F.rope_neox(X, base=0.0), "base must be greater than 1"),
        (lambda: F.rope_neox(IDS), "x has 3 dims"),
        (lambda: F.rope_yarn(X, scale=0.0), "scale must be greater than 0"),
        (lambda: F.rope_llama31(X, high_freq_factor=0.5), "below high_freq_factor"),
        (lambda: F.rope_longrope(X, rescale_factors=[1.0]), "rescale_factors must be 4"),
        (lambda: F.rope_longrope(X, original_max_position_embeddings=1), "at least 2"),
        (
            lambda: F.rope_neox_position_ids(IDS, torch.tensor([0, 1, 9]), max_position=9),
            r"position_ids must be in \[0, 9\), got values from 0 to 9",
        ),
        (
            lambda: F.rope_neox_position_ids(IDS, torch.tensor([0, -1, 8]), max_position=9),
            "got values from -1 to 8",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ArgumentError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.fixture
def tables(monkeypatch):
    """An empty cache of its own, and the backend that keeps cosines and sines in it."""
    monkeypatch.setattr(rope_tables, "_tables", type(rope_tables._tables)())
    with opkiln.use("torch"):
        yield rope_tables._tables


def test_tables_are_shared_between_lengths_and_calls(tables):
    for length in (5, 7, 8):
        F.rope_neox(normal(length, 16))
    F.rope_non_neox(normal(6, 16))
    assert [[x.shape for x in t.tensors] for t in tables.values()] == [[(8, 8)] * 2]
    F.rope_neox(normal(9, 16))
    F.rope_neox(normal(9, 16), base=500.0)
    assert len(tables) == 3


def test_tables_are_ordinary_tensors(tables):
    with torch.inference_mode():
        F.rope_neox(normal(5, 16))
    (table,) = tables.values()
    assert not any(t.is_inference() for t in table.tensors)
    x = normal(5, 16).requires_grad_()
    F.rope_neox(x).sum().backward()
    assert len(tables) == 1


def test_tables_are_bounded(tables, monkeypatch):
    monkeypatch.setattr(rope_tables, "MAX_BYTES", 3 * 2 * 8 * 8 * 4)  # three pairs of 8 x 8
    for base in (2.0, 3.0, 4.0):
        F.rope_neox(normal(8, 16), base=base)
    F.rope_neox(normal(8, 16), base=2.0)
    next(iter(tables.values())).kept = True  # as if a CUDA graph read the oldest, base 3
    F.rope_neox(normal(8, 16), base=5.0)
    assert [key[0][2] for key in tables] == [3.0, 2.0, 5.0]
    F.rope_neox(normal(64, 16), base=6.0)
    assert [key[0][2] for key in tables] == [3.0, 6.0]


def test_tables_from_many_threads(tables):
    x = normal(33, 16)
    want = F.rope_neox(x, backend="torch-ref")
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(F.rope_neox(x, backend="torch")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(tables) == 1
    assert all(torch.equal(r, want) for r in results)


def test_float64_does_not_read_the_float32_tables(tables):
    with opkiln.use("torch"):
        F.rope_neox(normal(5, 16, dtype=F64))
    assert not tables
