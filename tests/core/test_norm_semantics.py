"""What normalizations promise beyond their formula: layouts, mixed dtypes, statistics, errors.

Truth is torch.nn.functional in float64 on the same values.
"""

import math

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln.errors import ArgumentError

N = torch.nn.functional
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BACKENDS = ("torch", "torch-ref")


def normal(*shape, dtype=F32, seed=0, mean=0.0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, dtype=F64) + mean).to(dtype)


def double(*tensors):
    return [None if t is None else t.double() for t in tensors]


def close(got, truth, dtype, ulps=4.0):
    """Within `ulps` units in the last place of max(1, |truth|)."""
    assert got.dtype == dtype
    error = (got.double() - truth).abs() / truth.abs().clamp(min=1)
    worst = error.max().item() / torch.finfo(dtype).eps if error.numel() else 0.0
    assert worst <= ulps, f"{worst:.1f} ulp"


def layer(x, w, b, **kw):
    return F.layer_norm(x, x.shape[-1:], w, b, **kw)


def rms(x, w, b, **kw):
    return F.rms_norm(x, x.shape[-1:], w, 1e-5, **kw)


ROW_NORMS = {
    "layer_norm": (layer, lambda x, w, b: N.layer_norm(x, x.shape[-1:], w, b)),
    "rms_norm": (rms, lambda x, w, b: N.rms_norm(x, x.shape[-1:], w, 1e-5)),
}
CHANNEL_NORMS = {
    "batch_norm": (
        lambda x, w, b, **kw: F.batch_norm(x, None, None, w, b, True, **kw),
        lambda x, w, b: N.batch_norm(x, None, None, w, b, True),
    ),
    "group_norm": (
        lambda x, w, b, **kw: F.group_norm(x, 3, w, b, **kw),
        lambda x, w, b: N.group_norm(x, 3, w, b),
    ),
    "instance_norm": (
        lambda x, w, b, **kw: F.instance_norm(x, None, None, w, b, **kw),
        lambda x, w, b: N.instance_norm(x, None, None, w, b),
    ),
}


# Dao-AILab/quack#12
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight_dtype", [F16, BF16, F32, None], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("name", [*ROW_NORMS, *CHANNEL_NORMS])
def test_any_weight_dtype(name, dtype, weight_dtype, backend):
    ours, truth = {**ROW_NORMS, **CHANNEL_NORMS}[name]
    x = normal(4, 6, 6, dtype=dtype)
    w = b = None
    if weight_dtype is not None:
        w, b = normal(6, dtype=weight_dtype, seed=1), normal(6, dtype=weight_dtype, seed=2)
    close(ours(x, w, b, backend=backend), truth(*double(x, w, b)), dtype)


# pytorch/pytorch#111824 (channels_last)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", CHANNEL_NORMS)
def test_statistics_of_16_bit_channels_are_float32(name, dtype, layout, backend):
    """Mean 100, deviation 1: a mean rounded to bfloat16 would be off by up to 0.25."""
    ours, truth = CHANNEL_NORMS[name]
    x = normal(4, 6, 5, 7, dtype=dtype, mean=100.0)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    close(ours(x, None, None, backend=backend), truth(*double(x, None, None)), dtype)


# pytorch/pytorch#51102, tenstorrent/tt-metal#45968
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", [*ROW_NORMS, *CHANNEL_NORMS])
def test_large_mean_small_deviation(name, layout, backend):
    """E[x^2] - E[x]^2 in float32 would lose all of a variance of 1 beside a mean of 1e4."""
    ours, truth = {**ROW_NORMS, **CHANNEL_NORMS}[name]
    x = normal(2, 6, 16, 16, mean=1e4)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    got = ours(x, None, None, backend=backend)
    torch.testing.assert_close(got.double(), truth(*double(x, None, None)), rtol=0, atol=5e-3)


@pytest.mark.parametrize("name", CHANNEL_NORMS)
def test_channels_last_iff_the_input_is(name):
    ours, _ = CHANNEL_NORMS[name]
    for ndim, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        x = normal(2, 6, *[3, 4, 5][: ndim - 2])
        assert ours(x, None, None).is_contiguous()
        assert ours(x.transpose(2, 3), None, None).is_contiguous()
        x = x.contiguous(memory_format=memory_format)
        assert ours(x, None, None).is_contiguous(memory_format=memory_format)


ADDITIONS = {
    "fused_add_layer_norm": (
        lambda x, r, w, **kw: F.fused_add_layer_norm(x, r, x.shape[-1:], w, w, **kw),
        lambda s, w: N.layer_norm(s, s.shape[-1:], w, w),
    ),
    "fused_add_rms_norm": (
        lambda x, r, w, **kw: F.fused_add_rms_norm(x, r, x.shape[-1:], w, **kw),
        lambda s, w: N.rms_norm(s, s.shape[-1:], w, 1e-6),
    ),
}


# sgl-project/sglang#34466, unslothai/unsloth#4550 (inputs kept), vllm-project/vllm#48324 (dtypes)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ADDITIONS)
def test_the_norm_reads_the_unrounded_sum(name, backend):
    """64 + residual in bfloat16 has steps of 0.5: half of the residual's deviation of 1."""
    ours, norm = ADDITIONS[name]
    x, r = torch.full((3, 40), 64.0, dtype=BF16), normal(3, 40, dtype=BF16)
    w = normal(40, seed=1)
    before = x.clone(), r.clone()
    out, total = ours(x, r, w, backend=backend)
    close(out, norm(x.double() + r.double(), w.double()), BF16)
    assert torch.equal(total, x + r)
    assert torch.equal(x, before[0]) and torch.equal(r, before[1])


@pytest.mark.parametrize("name", ADDITIONS)
def test_gradients_of_an_addition_match_the_unfused_ops(name):
    ours, norm = ADDITIONS[name]
    tensors = [normal(*s, dtype=F64, seed=i) for i, s in enumerate([(3, 5), (3, 5), (5,)])]
    grads = normal(3, 5, dtype=F64, seed=7), normal(3, 5, dtype=F64, seed=8)
    fused = [t.clone().requires_grad_() for t in tensors]
    plain = [t.clone().requires_grad_() for t in tensors]
    total = plain[0] + plain[1]
    torch.autograd.backward(ours(*fused), grads)
    torch.autograd.backward((norm(total, plain[2]), total), grads)
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert fused[0].grad.data_ptr() != fused[1].grad.data_ptr()


@pytest.mark.parametrize("wants", ["input", "residual", "both"])
@pytest.mark.parametrize("name", ADDITIONS)
def test_one_gradient_serves_input_and_residual(name, wants):
    """The backward makes it once: whoever wants it gets it, and what autograd then adds to one of
    them does not reach the other.
    """
    ours, norm = ADDITIONS[name]
    found = []
    for fused in (True, False):
        x, r = (normal(3, 5, dtype=F64, seed=i).requires_grad_() for i in (0, 1))
        left, right = {
            "input": (x, r.detach()),
            "residual": (x.detach(), r),
            "both": (x * 2 + r, r),
        }[wants]
        out, total = ours(left, right, None) if fused else (norm(left + right, None), left + right)
        (out * out + total.sin() + (left * right).sum()).sum().backward()
        found.append((x.grad, r.grad))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_keeps_only_its_own_output(name):
    """Of [rows, N] tensors autograd holds one, and that is the result the caller holds anyway."""
    ours, _ = ADDITIONS[name]
    x, r = normal(3, 64).requires_grad_(), normal(3, 64, seed=1).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, total = ours(x, r, None)
    rows = [t for t in kept if t is not None and t.numel() == x.numel()]
    assert [t.data_ptr() for t in rows] == [total.data_ptr()]


@pytest.mark.parametrize("name", ADDITIONS)
def test_in_place_writes_the_callers_tensors(name):
    ours, _ = ADDITIONS[name]
    buffer, w = normal(4, 24), normal(8, seed=1)
    x, r = buffer[:, :8], buffer[:, 8:16]  # columns of one buffer do not overlap
    expected = ours(x.clone(), r.clone(), w)
    rest, versions = buffer[:, 16:].clone(), (x._version, r._version)
    out, total = ours(x, r, w, inplace=True)
    assert out is x and total is r
    assert torch.equal(x, expected[0]) and torch.equal(r, expected[1])
    assert torch.equal(buffer[:, 16:], rest)
    assert x._version > versions[0] and r._version > versions[1]


SQUARE = normal(8, 8)
UNFIT_IN_PLACE = {
    "same tensor": (SQUARE, SQUARE),
    "overlapping rows": (SQUARE[:5], SQUARE[3:]),
    "overlapping columns": (SQUARE[:, :5], SQUARE[:, 3:]),
    "expanded input": (normal(8).expand(8, 8), normal(8, 8)),
    "expanded residual": (normal(8, 8), normal(8).expand(8, 8)),
}


@pytest.mark.parametrize("pair", UNFIT_IN_PLACE)
def test_in_place_refuses_shared_memory(pair):
    with pytest.raises(ArgumentError, match="share memory"):
        x, r = UNFIT_IN_PLACE[pair]
        F.fused_add_rms_norm(x, r, x.shape[-1:], inplace=True)


@pytest.mark.parametrize("which", range(3), ids=["input", "residual", "weight"])
def test_in_place_refuses_a_gradient(which):
    tensors = [normal(3, 8), normal(3, 8), normal(8)]
    tensors[which].requires_grad_()
    with pytest.raises(ArgumentError, match="gradient"):
        F.fused_add_rms_norm(*tensors[:2], (8,), tensors[2], inplace=True)
    with torch.no_grad():
        F.fused_add_rms_norm(*tensors[:2], (8,), tensors[2], inplace=True)


def ada_truth(x, scale, shift, gate, offset):
    return gate * ((offset + scale) * N.layer_norm(x, x.shape[-1:]) + shift)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 1, 8), (8,), (3, 1)], ids=str)
def test_modulation_broadcasts_and_so_do_its_gradients(shape, offset, backend):
    x = normal(2, 3, 8, dtype=F64).requires_grad_()
    scale, shift, gate = (normal(*shape, dtype=F64, seed=i).requires_grad_() for i in (1, 2, 3))
    grad = normal(2, 3, 8, dtype=F64, seed=4)
    one = torch.ones((), dtype=F64)
    cases = (
        (F.ada_layer_norm_zero, (x, scale, shift, gate), (x, scale, shift, gate)),
        (F.ada_layer_norm, (x, scale, shift), (x, scale, shift, one)),
    )
    for fn, args, full in cases:
        out, truth = fn(*args, scale_offset=offset, backend=backend), ada_truth(*full, offset)
        torch.testing.assert_close(out, truth)
        ours, theirs = (torch.autograd.grad(y, args, grad) for y in (out, truth))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def running(dtype=F32):
    return torch.full((3,), 0.25, dtype=dtype), torch.full((3,), 2.0, dtype=dtype)


# pytorch/pytorch#19902, #19916, #59864, #61924, NVIDIA/apex#133, kakaobrain/trident#125
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "train"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_running_statistics_follow_torch(name, dtype, backend, grad):
    """Biased variance normalizes, unbiased variance is stored; instances are averaged over N."""
    x = normal(4, 3, 6, dtype=dtype).requires_grad_(grad)
    mean, var = running()
    truth = [t.double() for t in (mean, var)]
    out = getattr(F, name)(x, mean, var, None, None, True, 0.3, backend=backend)
    expected = getattr(N, name)(x.detach().double(), *truth, None, None, True, 0.3)
    close(out, expected, dtype)
    torch.testing.assert_close(mean.double(), truth[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(var.double(), truth[1], rtol=1e-5, atol=1e-5)


# pytorch/pytorch#2961
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_evaluation_reads_running_statistics_and_leaves_them(name):
    x = normal(1, 3, 1).requires_grad_()  # one value a channel is fine here
    mean, var = running()
    out = getattr(F, name)(x, mean, var, None, None, False)
    torch.testing.assert_close(out, (x - 0.25) / math.sqrt(2.0 + 1e-5))
    assert mean.eq(0.25).all() and var.eq(2.0).all()
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(grad, torch.full_like(x, 1 / math.sqrt(2.0 + 1e-5)))


EMPTY = {
    "layer_norm rows": lambda: F.layer_norm(normal(3, 0, 8), (8,), normal(8), normal(8)),
    "rms_norm rows": lambda: F.rms_norm(normal(3, 0, 8), (8,), normal(8)),
    "fused_add rows": lambda: F.fused_add_rms_norm(normal(0, 8), normal(0, 8), (8,))[0],
    "ada rows": lambda: F.ada_layer_norm(normal(0, 4, 8), normal(0, 1, 8), normal(0, 1, 8)),
    "group_norm batch": lambda: F.group_norm(normal(0, 6, 4), 3),
    "group_norm plane": lambda: F.group_norm(normal(2, 6, 0), 3),
    "instance_norm batch": lambda: F.instance_norm(normal(0, 6, 4)),
    "batch_norm batch": lambda: F.batch_norm(normal(0, 3, 4), *running()),
    "batch_norm batch in training": lambda: F.batch_norm(
        normal(0, 3, 4), *running(), training=True
    ),
}


# Dao-AILab/flash-attention#1620, pytorch/pytorch#186414
@pytest.mark.parametrize("what", EMPTY)
def test_empty_inputs_give_empty_outputs(what):
    out = EMPTY[what]()
    assert out.numel() == 0 and out.ndim in (2, 3)


@pytest.mark.parametrize("backend", ["torch", "torch-ref"])
@pytest.mark.parametrize("shape", [(0, 4, 6, 6), (2, 4, 0), (0, 4)], ids=str)
def test_training_on_an_empty_batch_is_torchs(shape, backend):
    """Empty result, zero gradients, running statistics left alone."""
    results = []
    for fn, how in ((F.batch_norm, {"backend": backend}), (torch.nn.functional.batch_norm, {})):
        mean, var = torch.zeros(4), torch.ones(4)
        leaves = [normal(*shape), torch.ones(4), torch.ones(4)]
        x, weight, bias = (t.requires_grad_() for t in leaves)
        out = fn(x, mean, var, weight, bias, training=True, **how)
        out.sum().backward()
        results.append((out, mean, var, *[t.grad for t in leaves]))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_instance_norm_of_an_empty_batch_leaves_the_running_statistics_alone():
    mean, var = torch.zeros(4), torch.ones(4)
    assert F.instance_norm(normal(0, 4, 6), mean, var).shape == (0, 4, 6)
    assert mean.eq(0).all() and var.eq(1).all()


@pytest.mark.parametrize("name", [*ROW_NORMS, *CHANNEL_NORMS])
def test_expanded_and_transposed_inputs(name):
    ours, truth = {**ROW_NORMS, **CHANNEL_NORMS}[name]
    w, b = normal(6, seed=1), normal(6, seed=2)
    expanded = normal(6, 6)[:, None].expand(6, 6, 6)
    for x in (expanded, normal(6, 6, 6).permute(2, 1, 0), normal(4, 6, 12)[..., ::2]):
        close(ours(x, w, b), truth(*double(x, w, b)), F32, ulps=16)


MISTAKES = {
    "num_groups that does not divide": lambda: F.group_norm(normal(2, 6, 3), 4),
    "num_groups of zero": lambda: F.group_norm(normal(2, 6, 3), 0),
    "one value a group, batch of one": lambda: F.group_norm(normal(1, 6, 1), 6),
    "plane of one value": lambda: F.instance_norm(normal(2, 3, 1, 1)),
    "no statistics": lambda: F.instance_norm(normal(2, 3, 4), use_input_stats=False),
    "one running statistic": lambda: F.instance_norm(normal(2, 3, 4), torch.zeros(3), None),
    "one value a channel": lambda: F.batch_norm(normal(1, 3, 1), None, None, training=True),
    "weight of another size": lambda: F.layer_norm(normal(2, 8), (8,), normal(4)),
    "normalized_shape that is not trailing": lambda: F.layer_norm(normal(2, 8), (2,)),
    "residual of another shape": lambda: F.fused_add_rms_norm(normal(2, 8), normal(1, 8), (8,)),
    "residual of another dtype": lambda: F.fused_add_rms_norm(
        normal(2, 8), normal(2, 8).half(), (8,)
    ),
    "scale larger than the input": lambda: F.ada_layer_norm(normal(1, 8), normal(2, 8), normal(8)),
    "scale of more dims": lambda: F.ada_layer_norm(normal(1, 8), normal(1, 1, 8), normal(8)),
    "integer input": lambda: F.layer_norm(torch.ones(2, 8, dtype=torch.int32), (8,)),
}


# pytorch/pytorch#1381, FluxML/Flux.jl#2716, pytorch/pytorch#45687 (one value)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake):
    with pytest.raises(ArgumentError) as caught:
        MISTAKES[mistake]()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)
    assert "\n" not in str(caught.value)


def test_one_value_a_group_in_a_larger_batch_is_zero():
    """As torch 2.13: only a batch of one is refused."""
    assert torch.equal(F.group_norm(normal(2, 6, 1), 6), torch.zeros(2, 6, 1))


def test_autocast_runs_torchs_float32_list_in_float32():
    x = normal(2, 6, 8, dtype=BF16)
    with torch.autocast("cpu", dtype=BF16):
        assert F.layer_norm(x, (8,)).dtype == F32
        assert F.group_norm(x, 3).dtype == F32
        assert F.ada_layer_norm(x, x, x).dtype == F32
        assert F.instance_norm(x).dtype == BF16


def test_explain_names_the_in_place_op():
    x = normal(2, 8)
    plain = opkiln.explain(F.fused_add_rms_norm, x, x.clone(), (8,))
    inplace = opkiln.explain(F.fused_add_rms_norm, x, x.clone(), (8,), inplace=True)
    assert (plain.op, inplace.op) == ("fused_add_rms_norm", "fused_add_rms_norm_inplace")
