"""opkiln.override_torch: torch's functional calls inside the block, served by ours."""

from __future__ import annotations

import threading

import opkiln
import pytest
import torch
from opkiln import functional
from opkiln.override import SERVED
from torch._subclasses.fake_tensor import FakeTensorMode

N = torch.nn.functional


@pytest.fixture(autouse=True)
def kernels_of_torch():
    """Who computes is no matter here, and Triton's interpreter is slow."""
    with opkiln.use("torch"):
        yield


def test_every_function_is_served() -> None:
    x, w = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    calls = {
        "layer_norm": lambda: N.layer_norm(x, (8,)),
        "rms_norm": lambda: N.rms_norm(x, (8,)),
        "group_norm": lambda: N.group_norm(x, 2),
        "batch_norm": lambda: N.batch_norm(x, None, None, training=True),
        "instance_norm": lambda: N.instance_norm(x),
        "conv1d": lambda: N.conv1d(x[0], torch.ones(4, 8, 3)),
        "conv2d": lambda: N.conv2d(x, w, padding=1),
        "conv3d": lambda: N.conv3d(x[None], torch.ones(3, 2, 1, 1, 3)),
        "avg_pool1d": lambda: N.avg_pool1d(x[0], 2),
        "avg_pool2d": lambda: N.avg_pool2d(x, 2),
        "avg_pool3d": lambda: N.avg_pool3d(x, 2),
        "max_pool1d": lambda: N.max_pool1d(x[0], 2),
        "max_pool2d": lambda: N.max_pool2d(x, 2, return_indices=True),
        "max_pool3d": lambda: N.max_pool3d(x, 2),
        "adaptive_avg_pool2d": lambda: N.adaptive_avg_pool2d(x, 3),
        "adaptive_max_pool2d": lambda: N.adaptive_max_pool2d(x, 3),
        "fft": lambda: torch.fft.fft(x.to(torch.complex64)),
    }
    assert set(calls) == {ours.__name__ for ours, _ in SERVED.values()}
    for name, call in calls.items():
        expected = call()
        with opkiln.override_torch() as mode:
            found = call()
        assert (dict(mode.served), dict(mode.left)) == ({name: 1}, {}), name
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_opkiln_does_not_have_is_left_to_torch() -> None:
    x = torch.randn(3, 8, device="meta")
    with opkiln.override_torch() as mode:
        assert N.layer_norm(x, (8,)).shape == (3, 8)
        with pytest.raises(RuntimeError):  # torch's own error
            N.layer_norm(torch.randn(3, 8), (7,))
    assert dict(mode.left) == {"layer_norm": 2} and not mode.served


def test_the_block_ends_also_by_an_exception() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ZeroDivisionError), opkiln.override_torch() as mode:
        N.layer_norm(x, (8,))
        raise ZeroDivisionError
    N.layer_norm(x, (8,))
    assert dict(mode.served) == {"layer_norm": 1}


def test_blocks_nest_and_the_backend_is_strict() -> None:
    x = torch.randn(3, 8)
    with opkiln.override_torch() as outer, opkiln.override_torch("torch-ref") as inner:
        N.rms_norm(x, (8,))
    assert dict(inner.served) == {"rms_norm": 1} and not outer.served
    with pytest.raises(opkiln.BackendError, match="no-such"), opkiln.override_torch("no-such"):
        N.rms_norm(x, (8,))


def test_other_threads_are_left_alone() -> None:
    x, started, done = torch.randn(3, 8), threading.Event(), threading.Event()

    def other() -> None:
        started.wait(10)
        N.layer_norm(x, (8,))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with opkiln.override_torch() as mode:
        started.set()
        assert done.wait(10)
    thread.join()
    assert not mode.served


def test_a_model_and_its_gradients() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.GroupNorm(2, 8),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.LayerNorm(8),
    )
    x = torch.randn(4, 3, 12, 12)
    grads = []
    for ours in (False, True):
        model.zero_grad()
        if ours:
            with opkiln.override_torch() as mode:
                model(x).square().sum().backward()
        else:
            model(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    names = "conv2d batch_norm max_pool2d group_norm adaptive_avg_pool2d layer_norm"
    assert mode.served == dict.fromkeys(names.split(), 1)
    assert set(functional.__all__) >= set(mode.served)


def test_fake_tensors_are_served() -> None:
    with FakeTensorMode(), opkiln.override_torch() as mode:
        assert N.layer_norm(torch.empty(3, 8), (8,)).shape == (3, 8)
    assert dict(mode.served) == {"layer_norm": 1} and not mode.left
