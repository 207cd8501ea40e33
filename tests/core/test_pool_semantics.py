"""What the pools promise beyond their formulas: torch's windows, NaN and tie rules, gradients.

Truth is torch.nn.functional on the same values, in float64 where sums are rounded; maxima and
indices must be identical.
"""

import random
from itertools import pairwise

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln.errors import ArgumentError
from opkiln.ops.pool.window import adaptive_bounds, adaptive_extent

N = torch.nn.functional
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")
BACKENDS = ("torch", "torch-ref")
LAYOUTS = ("contiguous", "transposed", "every second", "expanded", "channels_last")


def normal(*shape, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def in_layout(x, layout):
    """The values of `x` (of its first column, if expanded) with other strides."""
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "every second":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "expanded":
        return x[..., :1].expand(x.shape)
    if layout == "channels_last" and x.ndim in (4, 5):
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return x.contiguous(memory_format=formats[x.ndim])
    return x


def random_window(pick, dilated):
    """Spatial sizes, and kernel, stride, padding, dilation, ceil_mode of windows that fit."""
    n = pick.choice((1, 2, 3))
    kernel = [pick.randint(1, 4) for _ in range(n)]
    dilation = [pick.randint(1, 2) if dilated else 1 for _ in range(n)]
    sizes = [(k - 1) * d + pick.randint(1, 5) for k, d in zip(kernel, dilation, strict=True)]
    stride = pick.choice((None, [pick.randint(1, 4) for _ in range(n)]))
    padding = [pick.randint(0, k // 2) for k in kernel]
    return sizes, kernel, stride, padding, dilation, pick.random() < 0.5


def random_input(pick, sizes, seed):
    """Values with ties, NaN and -inf, in some layout."""
    dtype = pick.choice((F16, BF16, F32, F64))
    shape = (*pick.choice(((), (0,), (2,))), pick.randint(1, 3), *sizes)
    x = normal(*shape, dtype=dtype, seed=seed)
    x = x.round() if pick.random() < 0.5 else x
    x = x.masked_fill(normal(*shape, seed=seed + 1) > 1, pick.choice((0, NAN)))
    x = x.masked_fill(normal(*shape, seed=seed + 2) > pick.choice((1, -1)), pick.choice((0, -INF)))
    return in_layout(x, pick.choice(LAYOUTS)) if x.numel() else x


def same(got, want):
    return torch.equal(got, want) or bool(((got == want) | (got.isnan() & want.isnan())).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(40))
def test_max_pools_equal_torch(seed, backend):
    pick = random.Random(seed)
    sizes, *window = random_window(pick, dilated=True)
    x = random_input(pick, sizes, seed)
    name = f"max_pool{len(sizes)}d"
    want, indices = getattr(N, name)(x.contiguous(), *window, return_indices=True)
    got, got_indices = getattr(F, name)(x, *window, True, backend=backend)
    assert got.dtype == x.dtype and got_indices.dtype == torch.int64
    assert same(got, want) and torch.equal(got_indices, indices)
    assert same(getattr(F, name)(x, *window, backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(40))
def test_average_pools_equal_torch(seed, backend):
    pick = random.Random(seed)
    sizes, kernel, stride, padding, _, ceil_mode = random_window(pick, dilated=False)
    x = normal(2, 3, *sizes, dtype=pick.choice((F16, BF16, F32, F64)), seed=seed)
    x = in_layout(x, pick.choice(LAYOUTS))
    options = [ceil_mode, pick.random() < 0.5]
    if len(sizes) > 1:
        options.append(pick.choice((None, 7, -3)))
    name = f"avg_pool{len(sizes)}d"
    want = getattr(N, name)(x.double(), kernel, stride, padding, *options)
    got = getattr(F, name)(x, kernel, stride, padding, *options, backend=backend)
    size = getattr(N, name)(x.double().abs(), kernel, stride, padding, *options).abs()
    assert got.dtype == x.dtype
    assert ((got.double() - want).abs() <= 4 * torch.finfo(x.dtype).eps * size).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(30))
def test_gradients_equal_torch(seed, backend):
    pick = random.Random(seed)
    kind = pick.choice(("max", "avg"))
    sizes, kernel, stride, padding, dilation, ceil_mode = random_window(pick, kind == "max")
    options = [dilation, ceil_mode] if kind == "max" else [ceil_mode, pick.random() < 0.5]
    name = f"{kind}_pool{len(sizes)}d"
    ours, theirs = (normal(2, 2, *sizes, dtype=F64, seed=seed).requires_grad_() for _ in range(2))
    with opkiln.use(backend):
        out = getattr(F, name)(ours, kernel, stride, padding, *options)
        upstream = normal(*out.shape, dtype=F64, seed=seed)
        out.backward(upstream)
    getattr(N, name)(theirs, kernel, stride, padding, *options).backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13)


# sonos/tract#2851, robertknight/rten#1456
def test_what_hangs_over_the_padding_is_not_counted():
    got = F.avg_pool1d(torch.ones(1, 1, 5), 3, 2, 1, ceil_mode=True)
    assert torch.equal(got.flatten(), torch.tensor([2 / 3, 1, 2 / 3]))
    got = F.avg_pool1d(torch.ones(1, 1, 4), 3, 2, 1, ceil_mode=True)
    assert torch.equal(got.flatten(), torch.tensor([2 / 3, 1, 1 / 2]))  # 1 element, 1 of padding


# pytorch/pytorch#52719
def test_sums_of_16_bit_values_do_not_overflow():
    x = torch.full((1, 1, 64, 64), 60000.0, dtype=F16)
    for pool in (lambda x: F.avg_pool2d(x, 64), lambda x: F.adaptive_avg_pool2d(x, 1)):
        assert pool(x).item() == 60000


@pytest.mark.parametrize("indices", [False, True])
def test_an_infinite_gradient_reaches_one_element(indices):
    x = torch.arange(4.0).view(1, 1, 2, 2).requires_grad_()
    for pool in (lambda x: F.max_pool2d(x, 2, 1, 1, 1, False, indices), adaptive(indices)):
        out = pool(x)
        out = out[0] if indices else out
        upstream = torch.zeros_like(out)
        upstream[..., -1, -1] = INF
        (grad,) = torch.autograd.grad(out, x, upstream)
        assert grad.flatten().tolist() == [0, 0, 0, INF]


def adaptive(indices):
    return lambda x: F.adaptive_max_pool2d(x, (1, 1), indices)


def test_windows_that_step_over_the_input_give_no_gradient():
    x = torch.ones(1, 1, 2, requires_grad=True)  # the taps of a window lie at -1 and 2
    out = F.max_pool1d(x, 2, 1, 1, 3)
    assert out.tolist() == [[[-INF]]]
    out.backward(torch.ones_like(out))
    assert x.grad.tolist() == [[[0, 0]]]


@pytest.mark.parametrize("taps", [(16, 16), (16, 17), (181, 182)], ids=str)
def test_the_saved_offset_is_wide_enough(taps):
    """256, 272 and 32,942 taps: uint8, int16 and int32; the maximum is the last tap."""
    x = torch.arange(float(taps[0] * taps[1])).view(1, 1, *taps)
    for pool, size in ((F.max_pool2d, taps), (F.adaptive_max_pool2d, 1)):
        leaf = x.clone().requires_grad_()
        pool(leaf, size, backend="torch").sum().backward()  # the interpreter would take minutes
        assert leaf.grad.flatten().nonzero().tolist() == [[x.numel() - 1]]


# pytorch/pytorch#13386
def test_lengths_beyond_float32():
    x = torch.arange(2**24 + 3).remainder(251).float().view(1, 1, -1)
    got = F.max_pool1d(x, 3, 2, 1, backend="torch")  # the interpreter would take an hour
    assert got.shape[-1] == 2**23 + 2
    assert got[0, 0, -1] == x[0, 0, -2:].max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(40))
def test_adaptive_pools_equal_torch(seed, backend):
    pick = random.Random(seed)
    sizes = (pick.randint(1, 11), pick.randint(1, 11))
    x = random_input(pick, sizes, seed)
    side = pick.randint(0, 12)
    output_size = pick.choice((side, (side, None), [None, pick.randint(1, 13)], (3, 4)))
    want, indices = N.adaptive_max_pool2d(x, output_size, return_indices=True)
    got, got_indices = F.adaptive_max_pool2d(x, output_size, True, backend=backend)
    assert same(got, want) and torch.equal(got_indices, indices)
    assert got.stride() == F.adaptive_max_pool2d(x, output_size).stride()
    finite = x.nan_to_num(0, neginf=0)
    got = F.adaptive_avg_pool2d(finite, output_size, backend=backend)
    want = N.adaptive_avg_pool2d(finite.double(), output_size)
    size = N.adaptive_avg_pool2d(finite.double().abs(), output_size)
    assert got.dtype == x.dtype
    assert ((got.double() - want).abs() <= 4 * torch.finfo(x.dtype).eps * size).all()


@pytest.mark.parametrize("name", ["adaptive_avg_pool2d", "adaptive_max_pool2d"])
@pytest.mark.parametrize("seed", range(20))
def test_adaptive_gradients_equal_torch(name, seed):
    pick = random.Random(seed)
    shape = (2, 2, pick.randint(1, 9), pick.randint(1, 9))
    output_size = (pick.randint(1, 12), pick.randint(1, 12))
    ours, theirs = (normal(*shape, dtype=F64, seed=seed).requires_grad_() for _ in range(2))
    out = getattr(F, name)(ours, output_size)
    upstream = normal(*out.shape, dtype=F64, seed=seed)
    out.backward(upstream)
    getattr(N, name)(theirs, output_size).backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13)


def test_adaptive_windows_are_their_own_transpose():
    """The windows that hold an element are adaptive windows with the sizes exchanged."""
    for size in range(1, 15):
        for out in range(1, 15):
            start, end = adaptive_bounds(size, out, torch.device("cpu"))
            assert adaptive_extent(size, out) == (end - start).max()
            first, last = adaptive_bounds(out, size, torch.device("cpu"))
            for e in range(size):
                held = ((start <= e) & (e < end)).nonzero().flatten().tolist()
                assert held == list(range(int(first[e]), int(last[e])))


# pytorch/pytorch#83062
@pytest.mark.parametrize("name", ["adaptive_avg_pool2d", "adaptive_max_pool2d"])
def test_empty_adaptive_results_have_zero_gradient(name):
    for shape, output_size in (((0, 2, 4, 4), 2), ((2, 2, 4, 4), (0, 3))):
        x = torch.ones(shape, requires_grad=True)
        out = getattr(F, name)(x, output_size)
        assert out.numel() == 0
        out.sum().backward()
        assert torch.equal(x.grad, torch.zeros(shape))


def means(x, offsets, chunk):
    bounds = [(s, min(s + chunk, b)) for a, b in pairwise(offsets) for s in range(a, b, chunk)]
    rows = [x[:, a:b].double().mean(1) for a, b in bounds]
    return torch.stack(rows, 1) if rows else x.new_zeros((1, 0, *x.shape[2:]), dtype=F64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 3, 4, 50])
@pytest.mark.parametrize(
    "offsets", [[0, 7], [0, 0, 5, 5, 5, 12], [0, 1, 2, 3, 23], [0, 0], [0, 0, 0]], ids=str
)
def test_mean_pooling_of_sequences(offsets, chunk, backend):
    x = normal(1, offsets[-1], 2, 3)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    want = means(x, offsets, chunk).float()
    got = F.mean_pooling(x, chunk, cu_seqlens, backend=backend)
    torch.testing.assert_close(got, want)
    padded = F.mean_pooling(x, chunk, cu_seqlens, num_chunks=want.shape[1] + 2, backend=backend)
    torch.testing.assert_close(padded[:, :-2], want)
    assert (padded[:, -2:] == 0).all()


def test_nan_stays_in_its_own_chunk():
    x = torch.ones(1, 6, 1, 1)
    x[0, 3] = NAN
    for backend in BACKENDS:
        got = F.mean_pooling(x, 2, torch.tensor([0, 3, 6]), backend=backend).flatten()
        assert got.isnan().tolist() == [False, False, True, False]


# apple/coremltools#2748 (divisor), tile-ai/TileOPs#832 (padding), pytorch/pytorch#83062 (size)
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: F.avg_pool2d(x, 2, divisor_override=0), "divisor_override must not be zero"),
        (lambda x: F.avg_pool2d(x, 2, padding=2), "padding must be at most half of kernel_size"),
        (lambda x: F.avg_pool2d(x, 9), "no window of kernel_size"),
        (lambda x: F.avg_pool1d(x, 2), "input has 4 dims, expected 2"),
        (lambda x: F.max_pool2d(x, 3, 1, 2, 2), "padding must be at most half of kernel_size"),
        (lambda x: F.max_pool2d(x, (2, 2, 2)), "kernel_size must be one int or 2"),
        (lambda x: F.adaptive_avg_pool2d(x, (-1, 2)), "output_size must not be negative"),
        (lambda x: F.adaptive_max_pool2d(x, (1, 2, 3)), "output_size must be one int or two"),
        (lambda x: F.adaptive_max_pool2d(x[..., :0], 2), "the plane must not be empty"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ArgumentError, match=message) as error:
        call(torch.zeros(1, 2, 4, 4))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "call",
    [lambda x: F.avg_pool2d(x, 2.5), lambda x: F.adaptive_avg_pool2d(x, 2.5)],
    ids=["kernel_size", "output_size"],
)
def test_sizes_must_be_ints(call):
    with pytest.raises(TypeError, match=r"must be (an|one) int"):
        call(torch.zeros(1, 2, 4, 4))
