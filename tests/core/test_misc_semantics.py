"""What FFT, hyper-connections and top-k promise beyond their formulas."""

import math

import opkiln.functional as F
import pytest
import torch
from opkiln.errors import ArgumentError
from opkiln.ops.misc import topk

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
INF, NAN = float("inf"), float("nan")
BACKENDS = ("torch", "torch-ref")


def normal(*shape, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    wide = C128 if dtype.is_complex else F64
    return torch.randn(*shape, generator=generator, dtype=wide).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [None, "backward", "ortho", "forward"])
@pytest.mark.parametrize(("n", "dim"), [(None, -1), (4, 0), (9, 1), (1, -2), (None, -3)])
@pytest.mark.parametrize("dtype", [C64, C128], ids=str)
def test_fft_equals_torch(dtype, n, dim, norm, backend):
    x = normal(5, 6, 7, dtype=dtype)
    for view in (x, x.conj(), x.transpose(0, 2).contiguous().transpose(0, 2)):
        got = F.fft(view, n, dim, norm, backend=backend)
        want = torch.fft.fft(view.to(C128), n, dim, norm)
        assert got.dtype == dtype and got.is_contiguous() and not got.is_conj()
        error = (got - want).abs().max() / want.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("n", [3, 5, 8])
def test_fft_gradient_equals_torch(n, norm):
    ours, theirs = (normal(2, 5, dtype=C128).requires_grad_() for _ in range(2))
    upstream = normal(2, n, dtype=C128, seed=1)
    F.fft(ours, n, norm=norm).backward(upstream)
    torch.fft.fft(theirs, n, norm=norm).backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13)


def test_fft_of_nothing():
    assert F.fft(torch.zeros(0, 4, dtype=C64)).shape == (0, 4)
    assert torch.equal(F.fft(torch.zeros(2, 0, dtype=C64), 3), torch.zeros(2, 3, dtype=C64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "number of points, must be at least 1"),
        ({"norm": "unit"}, "norm must be one of backward, ortho, forward, got 'unit'"),
        ({"dim": 2}, "dim is 2, input has 2 dims"),
    ],
    ids=str,
)
def test_fft_bad_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        F.fft(torch.zeros(2, 3, dtype=C64), **arguments)


def test_fft_missing_dim_is_an_index_error_and_real_input_an_error():
    with pytest.raises(IndexError):
        F.fft(torch.zeros((), dtype=C64))
    with pytest.raises(ArgumentError, match="allowed: complex64, complex128"):
        F.fft(torch.zeros(3))


def mhc_inputs(rows=3, n=4, c=6, dtype=F32):
    wide = F64 if dtype == F64 else F32
    phi = normal(n * c, n * n + 2 * n, dtype=wide) * 0.2
    return phi, normal(rows, n * c, dtype=dtype), normal(n * n + 2 * n, dtype=wide, seed=1)


def mhc_by_row(phi, x, b, alpha_pre, alpha_post, alpha_res, repeat, eps):
    """Row by row in float64, entry by entry where the order of the steps matters."""
    phi, x, b = phi.double(), x.double(), b.double()
    n = round(math.sqrt(phi.shape[1] + 1)) - 1
    rows = []
    for row in x:
        h = (row @ phi) / (row.square().mean().sqrt() + 1e-4)
        pre = torch.sigmoid(alpha_pre * h[:n] + b[:n])
        post = alpha_post * h[n : 2 * n] + b[n : 2 * n]
        m = (alpha_res * h[2 * n :] + b[2 * n :]).view(n, n)
        m = torch.stack([(r - r.max()).exp() for r in m])
        for _ in range(repeat):
            m = torch.stack([r / (r.sum() + eps) for r in m])
            m = torch.stack([r / (r.sum() + eps) for r in m.T]).T
        streams = row.view(n, -1)
        rows.append(((m @ streams).flatten(), pre @ streams, post))
    return [torch.stack(part) for part in zip(*rows, strict=True)]


# sgl-project/sglang#36817 (eps)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("repeat", [0, 1, 20])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_mhc_pre_follows_its_formula(n, repeat, dtype):
    phi, x, b = mhc_inputs(n=n, dtype=dtype)
    options = (0.9, 0.7, 1.1, repeat, 0.05)
    got = F.mhc_pre(phi, x, b, *options, return_h_post=True)
    want = mhc_by_row(phi, x, b, *options)
    assert [t.dtype for t in got] == [dtype, dtype, phi.dtype]
    for ours, truth in zip(got, want, strict=True):
        scale = truth.abs().max()
        assert (ours.double() - truth).abs().max() <= 16 * torch.finfo(ours.dtype).eps * scale
    short = F.mhc_pre(phi, x, b, *options)
    assert len(short) == 2 and all(torch.equal(a, b) for a, b in zip(short, got, strict=False))


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_mhc_pre_returns_two_unless_asked(grad):
    phi, x, b = (t.requires_grad_(grad) for t in mhc_inputs())
    assert len(F.mhc_pre(phi, x, b, 1.0, 1.0, 1.0, 2)) == 2
    assert len(F.mhc_pre(phi, x, b, 1.0, 1.0, 1.0, 2, return_h_post=True)) == 3


# tile-ai/TileOPs#715
def test_an_all_zero_token_has_a_result_and_a_gradient():
    phi, x, b = mhc_inputs()
    x[0] = 0
    x.requires_grad_()
    x_res, x_layer = F.mhc_pre(phi, x, b, 1.0, 1.0, 1.0, 3)
    assert (x_res[0] == 0).all() and (x_layer[0] == 0).all()
    (x_res.sum() + x_layer.sum()).backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_mhc_post_follows_its_formula(dtype):
    wide = F64 if dtype == F64 else F32
    layer, h_post, x_res = normal(3, 5, dtype=dtype), normal(3, 4, dtype=wide), normal(3, 20)
    x_res = x_res.to(dtype)
    got = F.mhc_post(layer, h_post, x_res)
    want = torch.einsum("bn,bc->bnc", h_post.double(), layer.double()).flatten(1) + x_res.double()
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= 2 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, x, b: F.mhc_pre(p[:, :7], x, b[:7], 1.0, 1.0, 1.0, 1), r"expected \[n\*c"),
        (lambda p, x, b: F.mhc_pre(p, x[:, :5], b, 1.0, 1.0, 1.0, 1), "x has shape"),
        (lambda p, x, b: F.mhc_pre(p.double(), x, b.double(), 1.0, 1.0, 1.0, 1), "must have"),
        (lambda p, x, b: F.mhc_pre(p, x, b, 1.0, 1.0, 1.0, -1), "must not be negative"),
        (lambda p, x, b: F.mhc_post(x[:, :3], x[:, :4], x[:, :11]), "x_res has shape"),
    ],
)
def test_mhc_bad_arguments(call, message):
    with pytest.raises(ArgumentError, match=message) as error:
        call(*mhc_inputs())
    assert "\n" not in str(error.value)


def best(row, start, end, k):
    """The rule, read aloud: NaN first, then larger scores, then lower positions."""
    window = range(max(start, 0), min(end, len(row)))
    order = sorted(
        window, key=lambda i: (not math.isnan(row[i]), -row[i] if row[i] == row[i] else 0, i)
    )
    return sorted(order[:k])


def check_topk(scores, starts, ends, k, backend):
    got = F.topk_selector(scores, starts, ends, k, backend=backend)
    batch, length, _, groups = scores.shape
    assert got.dtype == torch.int32 and got.shape == (batch, length, groups, k)
    for b in range(batch):
        for s in range(length):
            for g in range(groups):
                want = best(scores[b, s, :, g].tolist(), int(starts[b, s]), int(ends[b, s]), k)
                assert got[b, s, g].tolist() == want + [-1] * (k - len(want))


KINDS = {
    "distinct": lambda x: x,
    "few values": lambda x: x.round(),
    "constant": torch.zeros_like,
    "signed zeros": lambda x: torch.where(x > 0, 0.0, -0.0).to(x.dtype),
    "negative": lambda x: -x.abs() - 1,
    "-inf and inf": lambda x: x.masked_fill(x > 0, -INF).masked_fill(x < -1, INF),
    "NaN": lambda x: x.masked_fill(x > 0.5, NAN).masked_fill(x < -1, -NAN),
    "last bits": lambda x: 1 + (x.abs() * 4).round() * torch.finfo(x.dtype).eps,
}


# vllm-project/vllm#56464 (windows), sgl-project/sglang#30645 (inf), antirez/ds4#1060 (negative)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("k", [0, 1, 5, 30])
@pytest.mark.parametrize("kind", KINDS)
def test_topk_selects_the_set(kind, k, dtype, backend):
    scores = KINDS[kind](normal(2, 4, 17, 2, dtype=dtype))
    starts = torch.tensor([[0, 3, 9, -5], [16, 17, 40, 2]])
    ends = torch.tensor([[17, 8, 3, 99], [17, 17, 50, 2]], dtype=torch.int32)
    check_topk(scores, starts, ends, k, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_topk_in_several_chunks(backend, monkeypatch):
    monkeypatch.setattr(topk, "CHUNK_ELEMENTS", 40)  # two rows of 17 scores at a time
    scores = normal(3, 5, 17, 1).transpose(0, 1)
    starts = torch.zeros(5, 3, dtype=torch.int32)
    check_topk(scores, starts, starts + 15, 4, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3, 4, 1), (2, 0, 4, 1), (2, 3, 0, 1), (2, 3, 4, 0)], ids=str)
def test_topk_of_nothing(shape, backend):
    scores = torch.zeros(shape)
    ends = torch.full(shape[:2], shape[2])
    got = F.topk_selector(scores, torch.zeros_like(ends), ends, 3, backend=backend)
    assert got.shape == (shape[0], shape[1], shape[3], 3)
    assert shape[2] or (got == -1).all()


def test_topk_bad_arguments():
    scores, rows = torch.zeros(2, 3, 4, 1), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="topk must not be negative, got -1"):
        F.topk_selector(scores, rows, rows, -1)
    with pytest.raises(ArgumentError, match="starts has dtype float32, allowed: int32, int64"):
        F.topk_selector(scores, rows.float(), rows, 1)
    with pytest.raises(ArgumentError, match="scores has dtype float16"):
        F.topk_selector(scores.half(), rows, rows, 1)
