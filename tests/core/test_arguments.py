"""User arguments: what is accepted, what is refused in one line, and that neither depends on what
was called before."""

from __future__ import annotations

import inspect
from collections import deque
from fractions import Fraction
from functools import partial

import numpy as np
import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln import dispatch
from samples import SAMPLES

IMAGE = torch.randn(2, 4, 6, 6)
ROWS = torch.randn(3, 8)
TOKENS = torch.randn(1, 9, 2, 3)


def message_of(call, error=TypeError):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


TENSORS = [
    pytest.param(name, tensor.name, tensor.optional, id=f"{name}-{tensor.name}")
    for name, sample in SAMPLES.items()
    for tensor in sample.bound(torch.float32).spec.tensors
]


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(("name", "tensor", "optional"), TENSORS)
def test_what_is_no_tensor_is_a_type_error(name, tensor, optional, grad):
    sample = SAMPLES[name]
    fn = getattr(F, sample.function)
    args, kwargs = sample.build(torch.float32)
    given = inspect.signature(fn).bind(*args, **kwargs).arguments
    if grad:
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        for t in tensors:
            t.requires_grad_(t.is_floating_point() or t.is_complex())
    for wrong in ([1.0, 2.0], 1.0, "x", np.ones(3), *([] if optional else [None])):
        message = message_of(lambda wrong=wrong: fn(**{**given, tensor: wrong}))
        allowed = "a Tensor or None" if optional else "a Tensor"
        assert f"{tensor} must be {allowed}" in message or f"{tensor} must be a Tensor" in message
        assert message.endswith(f"got {type(wrong).__name__}")


STATS = torch.zeros(4), torch.ones(4)
FLAGS = {
    "avg_pool2d-ceil_mode": lambda v: F.avg_pool2d(IMAGE, 2, ceil_mode=v),
    "avg_pool2d-count_include_pad": lambda v: F.avg_pool2d(IMAGE, 2, count_include_pad=v),
    "max_pool2d-ceil_mode": lambda v: F.max_pool2d(IMAGE, 2, ceil_mode=v),
    "batch_norm-training": lambda v: F.batch_norm(IMAGE, *STATS, training=v),
    "batch_norm_backward-training": lambda v: F.batch_norm_backward(
        IMAGE, IMAGE, None, *STATS, training=v
    ),
    "instance_norm-use_input_stats": lambda v: F.instance_norm(IMAGE, *STATS, use_input_stats=v),
    "fused_add_rms_norm-inplace": lambda v: F.fused_add_rms_norm(ROWS, ROWS, (8,), inplace=v),
    "fused_add_layer_norm-inplace": lambda v: F.fused_add_layer_norm(ROWS, ROWS, (8,), inplace=v),
    "rope_neox-inplace": lambda v: F.rope_neox(ROWS, inplace=v),
    "rope_yarn-inplace": lambda v: F.rope_yarn(ROWS, inplace=v),
    "rope_neox_position_ids-inplace": lambda v: F.rope_neox_position_ids(
        ROWS[:, None], torch.arange(3), max_position=3, inplace=v
    ),
    "mhc_pre-return_h_post": lambda v: F.mhc_pre(
        torch.randn(2, 3), torch.randn(4, 2), torch.randn(3), 1.0, 1.0, 1.0, 2, return_h_post=v
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_bools(name):
    before = [t.clone() for t in (IMAGE, ROWS, *STATS)]
    for wrong in ("False", "no", 0, 1, 1.0, None, torch.tensor(True)):
        message = message_of(lambda wrong=wrong: FLAGS[name](wrong))
        assert f"{name.split('-')[1]} must be a bool, got {wrong!r}" in message
    assert all(map(torch.equal, before, (IMAGE, ROWS, *STATS)))
    FLAGS[name](False)


@pytest.mark.parametrize("flag", ["strict", "deterministic", "batch_invariant", "checks"])
def test_flags_of_use_are_bools(flag):
    with pytest.raises(TypeError, match=f"{flag} must be a bool, got 'no'"):
        opkiln.use(**{flag: "no"}).__enter__()


def test_return_indices_is_truthy_as_in_torch():
    for wanted in ("no", 1, [0], np.True_):
        assert len(F.max_pool2d(IMAGE, 2, return_indices=wanted)) == 2
        assert len(F.adaptive_max_pool2d(IMAGE, 2, return_indices=wanted)) == 2
    for unwanted in ("", 0, None, []):
        assert isinstance(F.max_pool2d(IMAGE, 2, return_indices=unwanted), torch.Tensor)


CONV = partial(F.conv2d, IMAGE, torch.randn(6, 4, 3, 3))
RIGHT_THEN_WRONG = {
    "kernel_size": (partial(F.max_pool2d, IMAGE), 2, 2.0),
    "kernel_size-bool": (partial(F.max_pool2d, IMAGE), 1, True),
    "kernel_size-in-a-tuple": (partial(F.max_pool2d, IMAGE), (2, 1), (2, True)),
    "kernel_size-in-a-list": (partial(F.max_pool2d, IMAGE), [2, 2], [2, 2.0]),
    "normalized_shape": (partial(F.layer_norm, ROWS), (8,), (8.0,)),
    "eps": (lambda v: F.layer_norm(ROWS, (8,), eps=v), 1, True),
    "eps-float": (lambda v: F.layer_norm(ROWS, (8,), eps=v), 1.0, True),
    "groups": (lambda v: CONV(groups=v), 1, True),
    "stride": (lambda v: CONV(stride=v), 1, 1.0),
    "ceil_mode": (lambda v: F.max_pool2d(IMAGE, 2, ceil_mode=v), False, 0),
    "num_groups": (partial(F.group_norm, IMAGE), 2, 2.0),
    "topk": (
        partial(
            F.topk_selector,
            torch.randn(1, 2, 9, 1),
            torch.zeros(1, 2, dtype=torch.int32),
            torch.full((1, 2), 9, dtype=torch.int32),
        ),
        1,
        True,
    ),
}


@pytest.mark.parametrize("name", RIGHT_THEN_WRONG)
def test_a_right_call_does_not_make_a_wrong_one_pass(name):
    call, right, wrong = RIGHT_THEN_WRONG[name]
    call(right)
    call(right)
    message_of(lambda: call(wrong))


def test_a_wrong_call_does_not_make_a_right_one_fail():
    message_of(lambda: F.avg_pool2d(IMAGE, 3.0))
    torch.testing.assert_close(F.avg_pool2d(IMAGE, 3), torch.nn.functional.avg_pool2d(IMAGE, 3))


INTS = {
    "int64": np.int64(2),
    "int32": np.int32(2),
    "uint8": np.uint8(2),
    "array": np.array(2),
    "tensor": torch.tensor(2),
    "int32 tensor": torch.tensor(2, dtype=torch.int32),
}


@pytest.mark.parametrize("kind", INTS)
def test_ints_of_other_kinds(kind):
    two = INTS[kind]
    x = torch.randn(3, 8, dtype=torch.complex64)
    for _ in range(2):  # once planned, once from the plans
        assert torch.equal(F.max_pool2d(IMAGE, two), F.max_pool2d(IMAGE, 2))
        assert torch.equal(F.max_pool2d(IMAGE, (two, 3)), F.max_pool2d(IMAGE, (2, 3)))
        assert torch.equal(F.group_norm(IMAGE, two), F.group_norm(IMAGE, 2))
        assert torch.equal(F.fft(x, two), F.fft(x, 2))
        assert torch.equal(F.adaptive_avg_pool2d(IMAGE, two), F.adaptive_avg_pool2d(IMAGE, 2))
        assert torch.equal(F.mean_pooling(TOKENS, two), F.mean_pooling(TOKENS, 2))


@pytest.mark.parametrize(
    "eps",
    [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor(0.5).half(), Fraction(1, 2)],
    ids=lambda v: type(v).__name__,
)
def test_numbers_of_other_kinds(eps):
    for _ in range(2):
        assert torch.equal(F.layer_norm(ROWS, (8,), eps=eps), F.layer_norm(ROWS, (8,), eps=0.5))


def test_a_tensor_argument_is_read_at_every_call():
    kernel = torch.tensor(2)
    first = F.max_pool2d(IMAGE, kernel)
    kernel.fill_(3)
    assert first.shape[-1] == 3 and F.max_pool2d(IMAGE, kernel).shape[-1] == 2


def test_plans_are_not_kept_for_arguments_that_may_change():
    F.max_pool2d(IMAGE, 2)
    before = len(dispatch.PLANS)
    for _ in range(3):
        F.max_pool2d(IMAGE, torch.tensor(2))
    assert len(dispatch.PLANS) == before


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([2, 2]),
        np.eye(3),
        deque([2, 2]),
        {2: 2},
        {2},
        torch.tensor([2, 2]),
        torch.eye(40),
        torch.tensor(True),
        torch.tensor(2.0),
        np.float32(2),
        "2",
        2.0,
        True,
    ],
    ids=lambda v: f"{type(v).__name__}",
)
def test_what_is_no_int_is_named(wrong):
    assert "kernel_size must be one int or a tuple of 2, got" in message_of(
        lambda: F.max_pool2d(IMAGE, wrong)
    )
    assert "kernel_size must be an int, got" in message_of(lambda: F.max_pool2d(IMAGE, (2, wrong)))
    assert "stride must be" in message_of(lambda: F.max_pool2d(IMAGE, 2, wrong))
    assert "output_size must be an int" in message_of(lambda: F.adaptive_avg_pool2d(IMAGE, wrong))
    assert "normalized_shape must be an int" in message_of(lambda: F.layer_norm(ROWS, wrong))
    assert "num_groups must be an int" in message_of(lambda: F.group_norm(IMAGE, wrong))


@pytest.mark.parametrize(
    "wrong", [np.array([0.5]), [0.5], "0.5", True, torch.ones(1), torch.tensor(True), 1j]
)
def test_what_is_no_number_is_named(wrong):
    message = message_of(lambda: F.layer_norm(ROWS, (8,), eps=wrong))
    assert "layer_norm: eps must be a number, got" in message


def test_a_number_too_large_for_a_float_is_an_argument_error():
    message = message_of(lambda: F.layer_norm(ROWS, (8,), eps=10**400), opkiln.ArgumentError)
    assert message.startswith("layer_norm: eps must fit a float, got 1000")


@pytest.mark.parametrize("wrong", ["4", None, 4.0, True])
def test_a_chunk_size_that_is_no_int(wrong):
    for offsets in (None, torch.tensor([0, 3, 9])):
        message = message_of(lambda offsets=offsets: F.mean_pooling(TOKENS, wrong, offsets))
        assert message == f"mean_pooling: chunk_size must be an int, got {wrong!r}"


@pytest.mark.parametrize("wrong", [1.0, "x", {1.0: 2}, torch.ones(2, 2), torch.tensor(1.0), {1.0}])
def test_rescale_factors_are_a_list(wrong):
    x = torch.randn(5, 4)
    assert "rescale_factors must be" in message_of(
        lambda: F.rope_longrope(x, rescale_factors=wrong)
    )


KERNEL = torch.randn(6, 4, 3, 3)
MESSAGES = {
    "unknown size": (
        lambda: F.batch_norm(torch.zeros(4), torch.zeros(4), torch.ones(4)),
        "batch_norm: input has shape [4], expected [N, C, *S]",
    ),
    "known sizes": (
        lambda: F.layer_norm(ROWS, (7,)),
        "layer_norm: input has shape [3, 8], expected [*B, *normalized_shape] = [3, 7]",
    ),
    "rope without dims": (
        lambda: F.rope_neox(torch.tensor(1.0)),
        "rope_neox: x has 0 dims, expected [S, D] or [B, S, H, D]",
    ),
    "position ids without dims": (
        lambda: F.rope_neox_position_ids(torch.tensor(1.0), torch.arange(3), max_position=4),
        "rope_neox_position_ids: x has shape [], expected [T, H, D]",
    ),
    "negative padding": (
        lambda: F.conv2d(IMAGE, KERNEL, padding=-1),
        "conv2d: padding must not be negative, got [-1, -1]",
    ),
    "kernel larger than the input": (
        lambda: F.conv2d(IMAGE, KERNEL, dilation=5, padding=(1, 2)),
        "conv2d: the kernel [3, 3] with dilation [5, 5] is larger than the input [6, 6] with "
        "padding [1, 2]",
    ),
    "stride": (
        lambda: F.conv2d(IMAGE, KERNEL, stride=0),
        "conv2d: stride must be positive, got [0, 0]",
    ),
    "divisor": (
        lambda: F.avg_pool2d(IMAGE, 2, divisor_override=0),
        "avg_pool2d: divisor_override must not be zero, got 0",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_in_the_users_terms(name):
    call, expected = MESSAGES[name]
    assert message_of(call, opkiln.ArgumentError) == expected
