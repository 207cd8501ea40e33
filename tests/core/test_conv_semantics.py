"""What convolution promises beyond its formula: padding, precision, layouts, errors.

Truth is torch.nn.functional in float64 on the same values.
"""

import random

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln.errors import ArgumentError
from opkiln.ops.conv import conv

N = torch.nn.functional
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAMES = {1: "conv1d", 2: "conv2d", 3: "conv3d"}
BACKENDS = ("torch", "torch-ref")
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")


def normal(*shape, dtype=F32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def random_call(seed, dtype):
    """Tensors and options of a valid convolution."""
    pick = random.Random(seed)
    n, groups = pick.choice((1, 2, 3)), pick.choice((1, 1, 2, 3))
    kernel = [pick.randint(1, 3) for _ in range(n)]
    dilation = [pick.randint(1, 2) for _ in range(n)]
    size = [d * (k - 1) + pick.randint(1, 5) for k, d in zip(kernel, dilation, strict=True)]
    padding = pick.choice(("same", "valid", 0, [pick.randint(0, 2) for _ in range(n)]))
    stride = 1 if padding == "same" else [pick.randint(1, 3) for _ in range(n)]
    batch = pick.choice(((), (1,), (3,)))
    x = normal(*batch, 2 * groups, *size, dtype=dtype, seed=seed)
    w = normal(3 * groups, 2, *kernel, dtype=dtype, seed=seed + 1)
    b = pick.choice((None, normal(3 * groups, dtype=dtype, seed=seed + 2)))
    return NAMES[n], (x, w, b), (stride, padding, dilation, groups)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_random_arguments_match_torch(seed, dtype, backend):
    name, tensors, options = random_call(seed, dtype)
    got = getattr(F, name)(*tensors, *options, backend=backend)
    wide = [None if t is None else t.double() for t in tensors]
    truth = getattr(N, name)(*wide, *options)
    assert got.dtype == dtype and got.is_contiguous() and got.shape == truth.shape
    size = getattr(N, name)(*[None if t is None else t.abs() for t in wide], *options)
    assert ((got.double() - truth).abs() <= 4 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(12))
def test_gradients_match_torch(seed, backend):
    name, tensors, options = random_call(seed, F64)
    ours, theirs = (
        [None if t is None else t.clone().requires_grad_() for t in tensors] for _ in range(2)
    )
    with opkiln.use(backend):
        out = getattr(F, name)(*ours, *options)
    truth = getattr(N, name)(*theirs, *options)
    grad = normal(*truth.shape, dtype=F64, seed=99)
    out.backward(grad)
    truth.backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        if a is not None:
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["input", "weight", "bias"])
def test_only_the_wanted_gradient_is_computed(wanted):
    tensors = [normal(2, 4, 5, 6), normal(3, 4, 2, 2), normal(3)]
    tensors[wanted].requires_grad_()
    F.conv2d(*tensors, 1, "same").sum().backward()
    assert [t.grad is not None for t in tensors] == [i == wanted for i in range(3)]


def test_same_puts_the_odd_zero_after():
    x, w = torch.arange(1.0, 5.0).view(1, 1, 4), torch.ones(1, 1, 2)
    assert F.conv1d(x, w, None, 1, "same").tolist() == [[[3.0, 5.0, 7.0, 4.0]]]


# pytorch/pytorch#153698
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_is_exact_on_integers(backend):
    """Sums of integers up to 4,095 need 12 bits and more: TF32 has 11."""
    x = torch.randint(0, 4096, (1, 2, 64), generator=torch.Generator().manual_seed(1))
    w = torch.ones(2, 2, 5, dtype=torch.int64)
    got = F.conv1d(x.float(), w.float(), backend=backend)
    assert torch.equal(got.double(), N.conv1d(x.double(), w.double()))


class FakeTensorOnGpu:
    """As much of a CUDA tensor as float32_precision looks at."""

    is_cuda = True

    def __init__(self, dtype):
        self.dtype = dtype


@pytest.mark.parametrize("n", NAMES)
def test_reference_of_many_groups_counts_in_three_dims(n, monkeypatch):
    x, w, b = normal(2, 4, *[5] * n), normal(6, 2, *[3] * n), normal(6)
    padded = torch.nn.functional.pad(x, [1, 2] * n)
    window = [2] * n, [1, 2] * n, [1] * n
    monkeypatch.setattr(conv, "MANY_GROUPS", 1)
    for taken, whole in ((x, padded), (x[0], padded[0])):
        got = conv.reference(taken, w, b, *window, 2, False)
        torch.testing.assert_close(got, getattr(N, NAMES[n])(whole, w, b, 2, groups=2))


@pytest.mark.parametrize("before", ["ieee", "tf32"])
@pytest.mark.parametrize("allow", [False, True])
def test_cudnn_precision_is_set_for_the_call_and_put_back(allow, before, monkeypatch):
    setting = torch.backends.cudnn.conv
    default = setting.fp32_precision
    try:
        setting.fp32_precision = before
        with conv.float32_precision(FakeTensorOnGpu(F32), allow):
            assert setting.fp32_precision == ("tf32" if allow else "ieee")
        assert setting.fp32_precision == before
        with conv.float32_precision(FakeTensorOnGpu(F16), allow):
            assert setting.fp32_precision == before
    finally:
        setting.fp32_precision = default


def test_policy_decides_on_tf32():
    from opkiln.api import capture

    x, w = normal(1, 2, 8), normal(2, 2, 3)
    assert capture(F.conv1d, x, w).params.allow_tf32 is False
    with opkiln.use(allow_tf32=True):
        assert capture(F.conv1d, x, w).params.allow_tf32 is True


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "train"])
@pytest.mark.parametrize("padding", [0, "same"])
def test_channels_last_iff_the_input_is(padding, grad):
    for n, memory_format in ((2, torch.channels_last), (3, torch.channels_last_3d)):
        fn = getattr(F, NAMES[n])
        x, w = normal(2, 4, *[5] * n), normal(3, 4, *[2] * n)
        x, lasting = x.requires_grad_(grad), x.contiguous(memory_format=memory_format)
        lasting_w = w.contiguous(memory_format=memory_format)
        assert fn(x, lasting_w, None, 1, padding).is_contiguous()
        out = fn(lasting, w, None, 1, padding)
        assert out.is_contiguous(memory_format=memory_format) and not out.is_contiguous()
        torch.testing.assert_close(out, fn(x, w, None, 1, padding))


# pytorch/pytorch#1246
def test_strided_weight():
    w = normal(3, 3, 4, 4)[:, :, ::2, ::2]
    x = normal(1, 3, 5, 5)
    torch.testing.assert_close(F.conv2d(x, w), N.conv2d(x, w))


# pytorch/pytorch#142466
@pytest.mark.parametrize("name", NAMES.values())
def test_empty_batch(name):
    n = int(name[4])
    x = normal(0, 4, *[5] * n).requires_grad_()
    w = normal(3, 4, *[3] * n).requires_grad_()
    out = getattr(F, name)(x, w)
    assert out.shape == (0, 3, *[3] * n)
    out.sum().backward()
    assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros_like(w))


X, W = normal(1, 4, 6, 6), normal(6, 4, 3, 3)
MISTAKES = {
    "channels": (lambda: F.conv2d(normal(1, 3, 6, 6), W), "channels"),
    "groups of zero": (lambda: F.conv2d(X, W, groups=0), "groups"),
    "groups that do not divide": (lambda: F.conv2d(X, W, groups=4), "groups"),
    "channels of a group": (lambda: F.conv2d(X, W, groups=2), "channels"),
    "kernel larger than input": (lambda: F.conv2d(normal(1, 4, 2, 6), W), "larger than the input"),
    "dilated kernel": (lambda: F.conv2d(X, W, dilation=3), "larger than the input"),
    "same with a stride": (lambda: F.conv2d(X, W, stride=2, padding="same"), "stride"),
    "misspelt padding": (lambda: F.conv2d(X, W, padding="full"), "'valid' or 'same'"),
    "padding per side": (lambda: F.conv2d(X, W, padding=(1, 1, 1, 1)), "padding"),
    "negative padding": (lambda: F.conv2d(X, W, padding=-1), "padding"),
    "stride of zero": (lambda: F.conv2d(X, W, stride=0), "stride"),
    "dilation of zero": (lambda: F.conv2d(X, W, dilation=0), "dilation"),
    "weight dims": (lambda: F.conv2d(X, normal(6, 4, 3)), "weight"),
    "weight dims under same": (lambda: F.conv2d(X, normal(6, 4, 3), padding="same"), "weight"),
    "input dims": (lambda: F.conv2d(normal(6, 6), W), "input"),
    "bias size": (lambda: F.conv2d(X, W, normal(4)), "bias"),
    "weight dtype": (lambda: F.conv2d(X, W.double()), "weight"),
    "empty plane": (lambda: F.conv2d(normal(1, 4, 0, 6), W, padding=1), "empty"),
    "no output channel": (lambda: F.conv2d(X, normal(0, 4, 3, 3)), "empty"),
}


# pytorch/pytorch#67551 (same with a stride), #113885 (kernel larger than input)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake):
    call, says = MISTAKES[mistake]
    with pytest.raises(ArgumentError, match=says) as caught:
        call()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)


def test_a_stride_that_is_no_int_is_a_type_error():
    with pytest.raises(TypeError, match="stride"):
        F.conv2d(X, W, stride=1.5)


def test_autocast_lowers_as_torch():
    with torch.autocast("cpu", dtype=BF16):
        assert F.conv2d(X, W).dtype == N.conv2d(X, W).dtype == BF16


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_same_padding_compiles(dynamic):
    torch._dynamo.reset()
    fn = torch.compile(
        lambda x, w: F.conv2d(x, w, None, 1, "same"),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    for shape in ((1, 4, 6, 6), (2, 4, 7, 9)):
        x, w = normal(*shape), normal(3, 4, 2, 3)
        torch.testing.assert_close(fn(x, w), N.conv2d(x, w, None, 1, "same"))
