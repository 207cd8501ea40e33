"""opkiln.nn's modules against torch.nn's of the same name, on the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import opkiln
import pytest
import torch
from opkiln import nn
from opkiln.errors import BackendError


@pytest.fixture(autouse=True)
def kernels_of_torch():
    """Who computes is no matter here, and Triton's interpreter is slow."""
    with opkiln.use("torch"):
        yield


IMAGE = {1: (4, 6, 10), 2: (4, 6, 7, 9), 3: (2, 6, 4, 5, 6)}

# class, constructor arguments, input shape
CASES: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("LayerNorm", dict(normalized_shape=(6, 10)), (4, 6, 10)),
    ("LayerNorm", dict(normalized_shape=10, bias=False, eps=1e-3), (4, 10)),
    ("LayerNorm", dict(normalized_shape=10, elementwise_affine=False), (4, 10)),
    ("RMSNorm", dict(normalized_shape=10), (4, 6, 10)),
    ("RMSNorm", dict(normalized_shape=[6, 10], eps=1e-3, elementwise_affine=False), (4, 6, 10)),
    ("GroupNorm", dict(num_groups=3, num_channels=6), IMAGE[2]),
    ("GroupNorm", dict(num_groups=2, num_channels=6, affine=False), IMAGE[1]),
    ("AdaptiveAvgPool2d", dict(output_size=(3, None)), IMAGE[2]),
    ("AdaptiveMaxPool2d", dict(output_size=3), IMAGE[2]),
    ("AdaptiveMaxPool2d", dict(output_size=3, return_indices=True), IMAGE[2]),
    *[
        (f"BatchNorm{n}d", dict(num_features=6, **how), IMAGE[n])
        for n in IMAGE
        for how in (
            {},
            {"momentum": None},
            {"affine": False, "momentum": 0.5},
            {"track_running_stats": False},
        )
    ],
    ("BatchNorm1d", dict(num_features=6), (4, 6)),
    *[
        (f"InstanceNorm{n}d", dict(num_features=6, **how), IMAGE[n])
        for n in IMAGE
        for how in ({}, {"affine": True}, {"affine": True, "track_running_stats": True})
    ],
    ("InstanceNorm2d", dict(num_features=6, affine=True), IMAGE[2][1:]),
    *[
        (f"Conv{n}d", dict(in_channels=6, out_channels=4, kernel_size=3, **how), IMAGE[n])
        for n in IMAGE
        for how in (
            {},
            {"padding": 1, "stride": 2, "bias": False},
            {"padding": "same", "dilation": 1},
            {"padding": 1, "padding_mode": "circular", "groups": 2},
        )
    ],
    *[
        (f"{kind}Pool{n}d", dict(kernel_size=3, **how), IMAGE[n])
        for n in IMAGE
        for kind in ("Avg", "Max")
        for how in ({}, {"stride": 2, "padding": 1, "ceil_mode": True})
    ],
    ("MaxPool2d", dict(kernel_size=(2, 3), dilation=2, return_indices=True), IMAGE[2]),
    ("AvgPool2d", dict(kernel_size=2, divisor_override=3), IMAGE[2]),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]


def tensors(out: Any) -> list[torch.Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def run(module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Outputs, then the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    outs = tensors(module(x))
    torch.manual_seed(1)
    outs[0].backward(torch.randn_like(outs[0]))
    return [*outs, x.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("name", "arguments", "shape"), CASES, ids=IDS)
def test_as_torch(name: str, arguments: dict[str, Any], shape: Any, training: bool) -> None:
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(**arguments)
    ours = getattr(nn, name)(**arguments)
    assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape)
    for module in (ours, theirs):
        module.train(training)
        run(module, x + 1)  # moves the running statistics
        module.zero_grad()
    for a, b in zip(run(ours, x), run(theirs, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value)


def test_every_module_is_tested() -> None:
    fused = {"FusedAddLayerNorm", "FusedAddRMSNorm"}
    assert {name for name, _, _ in CASES} | fused == set(nn.__all__)


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_fused_adds(name: str, inplace: bool) -> None:
    plain = getattr(nn, name)(10, eps=1e-6)
    fused = getattr(nn, f"FusedAdd{name}")(10, eps=1e-6, inplace=inplace)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    fused.load_state_dict(plain.state_dict())
    x, residual = torch.randn(4, 10), torch.randn(4, 10)
    total = x + residual
    with torch.no_grad():
        out, kept = fused(x, residual)
    torch.testing.assert_close(out, plain(total), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept, total)
    assert (kept.data_ptr() == residual.data_ptr()) == inplace


def test_backend_is_strict_shown_and_copied() -> None:
    module = nn.RMSNorm(8, backend="torch-ref")
    assert repr(module).endswith("backend='torch-ref')")
    assert copy.deepcopy(module).backend == "torch-ref"
    x = torch.randn(3, 8)
    torch.testing.assert_close(module(x), torch.nn.RMSNorm(8)(x))
    with pytest.raises(BackendError, match="no-such"):
        nn.MaxPool2d(2, backend="no-such")(torch.randn(1, 2, 4, 4))


def test_wrong_channels_of_an_instance_norm() -> None:
    with pytest.raises(ValueError, match="num_features"):
        nn.InstanceNorm2d(5, affine=True)(torch.randn(IMAGE[2]))
    with pytest.warns(UserWarning, match="not used because affine=False"):
        nn.InstanceNorm2d(5)(torch.randn(IMAGE[2]))


def test_nn_comes_with_the_library() -> None:
    assert opkiln.nn is nn
