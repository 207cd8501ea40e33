"""What the peers share; the libraries themselves run on a GPU only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln.spec import Call
from opkiln_bench import check
from opkiln_bench.catalogue import load_rows
from opkiln_bench.contestants import Subject, bring, canonical
from opkiln_bench.peers import (
    PEERS,
    absent,
    common,
    compositions,
    rope_table,
    torch_compile,
    torch_direct,
    unmeasured,
)


def rms_call(n: int = 8, **arguments: Any) -> Call:
    values = {"input": torch.randn(3, n), "weight": torch.ones(n), "normalized_shape": [n]}
    return Call.of(*canonical("rms_norm", values | arguments))


def test_torch_compile_serves_every_op_by_name_only() -> None:
    impls = torch_compile.implementations()
    assert {i.op for i in impls} == set(CATALOGUE)
    assert not any(i.auto for i in impls)
    assert "torch-compile" in REGISTRY.of("rms_norm")


def test_a_library_that_is_absent_registers_nothing() -> None:
    table = {"rms_norm": (common.rows_only(), lambda: None)}
    assert common.peer("x", "no-such-distribution", table) == []
    (impl,) = common.peer("x", "pytest", table)
    assert (impl.backend, impl.version, impl.auto) == ("x", pytest.__version__, False)


def test_no_peer_is_imported_to_be_listed() -> None:
    import sys

    for peer in PEERS:
        peer.implementations()
    assert not {"quack", "flashinfer", "liger_kernel", "flag_gems"} & set(sys.modules)


def on_cuda(call: Call) -> Call:
    """The same call as its metadata would be on a GPU."""
    call.device = torch.device("cuda", 0)
    return call


@pytest.mark.parametrize(
    ("call", "needed", "reason"),
    [
        (rms_call(), (), "needs a CUDA GPU"),
        (on_cuda(rms_call(weight=None)), ("weight",), "needs weight"),
        (on_cuda(rms_call(normalized_shape=[3, 8], weight=None)), (), "takes one normalized dim"),
        (on_cuda(rms_call()), (), "takes float16 and bfloat16"),
        (on_cuda(rms_call(input=torch.randn(8, 3).half().T, weight=None)), (), "takes contiguous"),
    ],
    ids=["cpu", "weight", "dims", "dtype", "strides"],
)
def test_refusals_have_a_reason(call: Call, needed: tuple[str, ...], reason: str) -> None:
    refused = common.rows_only(*needed, dtypes=common.HALF)(call)
    assert refused is not None and reason in refused.reason


def test_an_accepted_call() -> None:
    half = {"input": torch.randn(3, 8).half(), "weight": torch.ones(8).half()}
    assert common.rows_only("weight", dtypes=common.HALF)(on_cuda(rms_call(**half))) is None


def test_an_in_place_add_leaves_the_inputs_alone() -> None:
    def inplace(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        residual += x
        x.copy_(residual * weight)

    launch = common.on_copies(inplace)
    x, residual, weight = torch.randn(4), torch.randn(4), torch.full((4,), 2.0)
    before = x.clone(), residual.clone()
    out, total = launch(x, residual, weight)
    assert torch.equal(total, before[0] + before[1])
    assert torch.equal(out, 2 * (before[0] + before[1]))
    launch(x, residual, weight)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_a_weight_is_converted_once() -> None:
    once = common.Once(torch.float32)
    weight = torch.ones(4).half()
    first = once(weight)
    assert first.dtype == torch.float32
    assert once(weight) is first
    assert once(torch.zeros(4).half()) is not first
    assert once(first) is first and once(None) is None


def test_absent_peers_have_a_reason() -> None:
    found = absent()
    assert set(unmeasured()) <= set(found)
    assert all(found.values())
    for name in ("quack", "flashinfer", "liger", "flaggems"):
        assert (name in found) == (name not in REGISTRY.backends())


ROWS = {r.key: r for r in load_rows(["opkiln_bench.conf"])}
CPU = torch.device("cpu")


def is_right(subject: Subject, out: Any) -> bool:
    outputs = list(out) if isinstance(out, tuple) else [out]
    found = check.against_reference(subject, {"peer": outputs})["peer"]
    assert found.ok, found.reason
    return True


@pytest.mark.parametrize(
    ("key", "prepare"),
    [
        (("BatchNormBwd", "resnet50-stage2", "f16"), torch_direct.native_gradients),
        (("BatchNormBwd", "resnet50-stage2", "f16"), torch_direct.autograd_gradients),
        (("BatchNormBwd", "resnet50-fc", "f16"), torch_direct.autograd_gradients),
        (("FFTC2CFwd", "fft-4k-c64-unbatched", "c64"), torch_direct.transform),
        (("MeanPoolingForward", "dense-batched", "f16"), torch_direct.view_mean),
    ],
    ids=["native", "autograd", "autograd-2d", "fft", "view-mean"],
)
def test_torchs_own_calls(key: tuple[str, str, str], prepare: Any) -> None:
    subject = bring(ROWS[key], CPU)
    launch = prepare(subject.call)
    assert is_right(subject, launch(*subject.tensors))
    assert is_right(subject, launch(*subject.tensors))  # a second call is as good


def test_torchs_own_calls_refuse_the_rest() -> None:
    varlen = on_cuda(bring(ROWS["MeanPoolingForward", "varlen-tail", "f16"], CPU).call)
    refused = torch_direct.whole_chunks(varlen)
    assert refused is not None and refused.reason == "takes dense sequences"
    conv = bring(ROWS["Conv1dFwd", "encodec-init", "f16"], CPU).call
    refused = torch_direct.even_padding(conv)
    assert refused is not None and refused.reason == "needs a CUDA GPU"


@pytest.mark.parametrize("name", rope_table.ROTATIONS)
def test_the_table_for_flashinfers_rotation(name: str) -> None:
    """Turned by hand from the table, the row comes out as the op's reference has it."""
    row = min((r for r in ROWS.values() if r.name == name), key=lambda r: r.input_bytes)
    subject = bring(row, CPU)
    x = subject.tensors[0]
    assert x is not None
    table = rope_table.cos_sin_table(subject.call, x.shape[0]).double()
    half = x.shape[-1] // 2
    lead = (x.shape[0], *[1] * (x.ndim - 2), half)
    cos, sin = table[:, :half].view(lead), table[:, half:].view(lead)
    if name == rope_table.INTERLEAVED:
        a, b = x.double()[..., 0::2], x.double()[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = x.double()[..., :half], x.double()[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    assert table.shape == (x.shape[0], 2 * half)
    assert is_right(subject, out.to(x.dtype))


def test_top_k_of_all_rows_at_once() -> None:
    scores = torch.randn(1, 5, 64, 2)
    starts, ends = (torch.tensor([values]) for values in ([0, 3, 9, 0, 1], [64, 40, 20, 8, 60]))
    spec = CATALOGUE["topk_selector"]
    found = compositions.whole_topk(scores, starts, ends, topk=8)
    expected = spec.reference(scores.double(), starts, ends, topk=8)
    assert found.dtype == torch.int32
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)


SMALLEST = {
    name: min((r for r in ROWS.values() if r.name == name), key=lambda r: r.input_bytes)
    for name in {r.name for r in ROWS.values()}
}


@pytest.mark.parametrize("name", sorted(n for n, r in SMALLEST.items() if r.input_bytes < 1e7))
def test_torch_compile_gets_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph break, and the right result: torch-compile is not slowed down by what we hand it."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda fn, dynamic: compile_(fn, backend="eager", fullgraph=True)
    )
    torch._dynamo.reset()
    subject = bring(SMALLEST[name], CPU)
    tensors = subject.fresh_tensors()
    out = torch_compile.prepare(subject.call)(*tensors)
    names = subject.spec.mutates(subject.call)
    pairs = zip(subject.spec.tensor_names, tensors, strict=True)
    written = [t for n, t in pairs if n in names]
    outputs = list(out) if isinstance(out, tuple) else [out]
    assert is_right(subject, (*outputs, *written))
