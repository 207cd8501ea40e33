"""Peers timed on the rows of gradients: each is right, called in the order its library wants."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gradient_rows import CPU, GRADIENTS, OWN, SMALLEST, in_float32, is_right, small
from opkiln.ops import CATALOGUE
from opkiln_bench.contestants import Subject, bring
from opkiln_bench.peers import (
    common,
    compositions,
    fault_of,
    liger,
    pool_gradients,
    quack,
    torch_autograd,
    torch_compile,
)


def rms_norm_backward_of_torch(
    grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any
) -> Any:
    """aten._fused_rms_norm_backward, which a CPU does not have."""
    spec = CATALOGUE["rms_norm_backward"]
    return spec.reference(grad, x, weight, rstd.squeeze(-1), shape, mask)


class Aten:
    """torch.ops.aten with what a CPU lacks."""

    _fused_rms_norm_backward = staticmethod(rms_norm_backward_of_torch)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.aten, name)


@pytest.mark.parametrize("name", SMALLEST)
def test_torch_autograd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right in the first call, and in the next, which goes on with what the first one kept."""
    monkeypatch.setattr(torch_autograd, "aten", Aten())
    subject = bring(in_float32(name), CPU)
    (impl,) = [i for i in torch_autograd.implementations() if i.op == name]
    assert (impl.backend, impl.auto) == ("torch-autograd", False)
    assert impl.supports(subject.call).reason == "needs a CUDA GPU"  # type: ignore[union-attr]
    launch = impl.loader()(subject.call)
    assert is_right(subject, launch(*subject.tensors))
    assert is_right(subject, launch(*subject.tensors))


def test_torchs_rms_norm_backward_has_the_order_of_the_stub() -> None:
    schema = torch.ops.aten._fused_rms_norm_backward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == ["grad_out", "input", "normalized_shape", "rstd", "weight", "output_mask"]


def test_the_parameters_that_a_backward_lacks_are_the_rows() -> None:
    for row in GRADIENTS:
        if row.name in ("instance_norm_backward", "group_norm_backward") or "ada_" in row.name:
            assert row.args["eps"] == torch_autograd.DROPPED["eps"], row


def on_cuda(subject: Subject) -> Any:
    call = subject.call
    call.device = torch.device("cuda", 0)
    return call


def test_torch_autograd_takes_every_row_on_a_gpu() -> None:
    impls = {i.op: i for i in torch_autograd.implementations()}
    for row in SMALLEST.values():
        assert impls[row.name].supports(on_cuda(bring(row, CPU))) is None, row


def test_torch_autograd_refuses_the_rest() -> None:
    bare = small(next(r for r in OWN if r.label == "dit-xl-2" and r.op == "LayerNormFwd"))
    bare = replace(bare, op="LayerNormBwd", name="layer_norm_backward", forward=bare.op)
    refused = torch_autograd.with_weight(on_cuda(bring(bare, CPU)))
    assert refused is not None and refused.reason == "takes a weight of the input's dtype"
    conv = SMALLEST["conv1d_backward"]
    uneven = replace(conv, args=conv.args | {"padding": "same", "stride": [1]})
    refused = torch_autograd.even_padding(on_cuda(bring(uneven, CPU)))
    assert refused is not None and refused.reason == "takes padding that is equal before and after"


def test_cudnn_tries_its_algorithms_and_the_setting_comes_back() -> None:
    subject = bring(SMALLEST["conv2d_backward"], CPU)
    seen = []

    def backward(*arguments: Any) -> Any:
        seen.append(torch.backends.cudnn.benchmark)
        raise RuntimeError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_autograd, "aten", SimpleNamespace(convolution_backward=backward))
        with pytest.raises(RuntimeError):
            torch_autograd.convolution(subject.call)(*subject.tensors)
    assert seen == [True] and torch.backends.cudnn.benchmark is False


def test_autograds_double_rounding_is_told() -> None:
    assert "rounds the norm's gradient" in fault_of("torch-autograd", "fused_add_rms_norm_backward")
    assert fault_of("torch-autograd", "rms_norm_backward") == ""


@pytest.mark.parametrize("name", SMALLEST)
def test_torch_compile_gets_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph break, the right gradients in the right dtypes. Pools in float32 and convolutions in
    bfloat16: eager torch sums 16-bit pools, and on some CPUs float16 convolutions, in 16 bits.
    """
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda fn, dynamic, mode: compile_(fn, backend="eager", fullgraph=True)
    )
    torch._dynamo.reset()
    row = in_float32(name) if "pool" in name else SMALLEST[name]
    subject = bring(small(row, "bf16") if "conv" in name else row, CPU)
    assert is_right(subject, torch_compile.prepare(subject.call)(*subject.tensors))


@pytest.mark.parametrize("label", ["medicalnet-stem", "c3d-pool2"])
def test_volumes_that_overlap_get_float32(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen's kernel for them adds in the gradient's dtype: a 16-bit one is rounded often."""
    row = next(r for r in GRADIENTS if r.label == label and r.op == "MaxPool3dIndicesBwd")
    subject = bring(small(row), CPU)
    seen = []
    real = torch.ops.aten.max_pool3d_with_indices_backward

    def spy(grad: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(grad.dtype)
        return real(grad, *rest)

    monkeypatch.setattr(compositions, "aten", SimpleNamespace(max_pool3d_with_indices_backward=spy))
    out = compositions.composition(subject.call)(*subject.tensors)
    assert is_right(subject, out.to(subject.call.outputs[0].dtype))
    assert (seen[0] == torch.float32) == (label == "medicalnet-stem")


@pytest.mark.parametrize("label", ["ecg-cnn-dilated", "resnet-stem", "medicalnet-stem"])
def test_indices_of_maxima_are_torchs(label: str) -> None:
    row = small(next(r for r in OWN if r.label == label and "IndicesFwd" in r.op))
    forward = bring(row, CPU)
    _, indices, offset = forward.spec.reference(*forward.tensors, **forward.params)
    p = bring(replace(row, op=forward.spec.backward.spec.op, forward=row.op), CPU).call.params  # type: ignore[union-attr]
    assert torch.equal(pool_gradients.window_indices(offset, p), indices)


def test_indices_of_adaptive_maxima_are_torchs() -> None:
    row = small(next(r for r in OWN if r.op == "AdaptiveMaxPool2dIndicesFwd" and "7x7" in r.label))
    forward = bring(row, CPU)
    _, indices, offset = forward.spec.reference(*forward.tensors, **forward.params)
    p = SimpleNamespace(**forward.params, input_shape=forward.tensors[0].shape)  # type: ignore[union-attr]
    assert torch.equal(pool_gradients.adaptive_indices(offset, p), indices)


def stub(monkeypatch: pytest.MonkeyPatch, path: str, **functions: Any) -> None:
    """A library of one module, whose functions stand for those that need a GPU."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[path]).update(functions)


def rms_gradients(grad: Any, x: Any, weight: Any, rstd: Any) -> Any:
    assert grad.shape == x.shape and rstd.shape == x.shape[:1] and rstd.dtype == torch.float32
    spec = CATALOGUE["rms_norm_backward"]
    return spec.reference(grad, x, weight, rstd, x.shape[1:], [True, True])


@pytest.mark.parametrize("name", ["rms_norm_backward", "fused_add_rms_norm_backward"])
def test_quacks_rms_norm_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """rmsnorm_bwd as of quack 0.2.4: (x, weight, dout, rstd, dresidual_out)."""

    def rmsnorm_bwd(x: Any, weight: Any, dout: Any, rstd: Any, dresidual_out: Any = None) -> Any:
        to_x, to_weight = rms_gradients(dout.float(), x.float(), weight.float(), rstd)
        to_x = to_x if dresidual_out is None else to_x + dresidual_out.float()
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None, None

    stub(monkeypatch, "quack.rmsnorm", rmsnorm_bwd=rmsnorm_bwd)
    load = quack.load_rms_norm_backward
    if name != "rms_norm_backward":
        load = quack.load_fused_add_rms_norm_backward
    subject = bring(SMALLEST[name], CPU)
    launch = load()(subject.call)
    assert is_right(subject, launch(*subject.tensors))
    assert is_right(subject, launch(*subject.tensors))


GEMMA, NO_OFFSET = 1, 0.0
BLOCK_AND_WARPS = (4096, 8)


def ligers_rms_norm_backward(dY: Any, X: Any, W: Any, RSTD: Any, *more: Any) -> Any:
    """liger 0.8.5: offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode."""
    assert more == (NO_OFFSET, GEMMA, *BLOCK_AND_WARPS, True, None)
    to_x, to_weight = rms_gradients(dY.view(X.shape).float(), X.float(), W.float(), RSTD)
    return dY.copy_(to_x.view(dY.shape)), to_weight.to(W.dtype)


def ligers_fused_backward(dY: Any, dS_out: Any, S: Any, W: Any, RSTD: Any, *more: Any) -> Any:
    """offset, casting_mode, BLOCK_SIZE, num_warps, num_stages, in_place."""
    assert more == (NO_OFFSET, GEMMA, *BLOCK_AND_WARPS, 2, True)
    to_x, to_weight = rms_gradients(dY.view(S.shape).float(), S.float(), W.float(), RSTD)
    dY.copy_((to_x + dS_out.float()).view(dY.shape))
    return dY, dY, to_weight.to(W.dtype)


def ligers_layer_norm_backward(dY: Any, X: Any, W: Any, B: Any, Mean: Any, RSTD: Any) -> Any:
    spec = CATALOGUE["layer_norm_backward"]
    assert B.dtype == W.dtype and Mean.shape == RSTD.shape == X.shape[:1]
    return spec.reference(dY, X, W, Mean, RSTD, X.shape[1:], [True, True, True])


LIGER = {
    "rms_norm_backward": ligers_rms_norm_backward,
    "fused_add_rms_norm_backward": ligers_fused_backward,
    "layer_norm_backward": ligers_layer_norm_backward,
}


@pytest.mark.parametrize("name", LIGER)
def test_ligers_backwards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = name.removesuffix("_backward")
    stub(monkeypatch, f"liger_kernel.ops.{forward}", **{name: LIGER[name]})
    utils = ModuleType("liger_kernel.ops.utils")
    utils.calculate_settings = lambda n: BLOCK_AND_WARPS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.utils", utils)
    load: Callable[[], Any] = getattr(liger, f"load_{name}")
    subject = bring(SMALLEST[name], CPU)
    before = [t.clone() for t in subject.tensors if t is not None]
    launch = load()(subject.call)
    assert is_right(subject, launch(*subject.tensors))
    launch(*subject.tensors)  # goes on from its own result
    pairs = zip(before, [t for t in subject.tensors if t is not None], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_peers_want_all_gradients() -> None:
    subject = bring(SMALLEST["rms_norm_backward"], CPU)
    assert common.all_gradients(on_cuda(subject)) is None
    subject.params["output_mask"] = [True, False]
    refused = common.all_gradients(on_cuda(subject))
    assert refused is not None and refused.reason == "takes calls that want all gradients"
