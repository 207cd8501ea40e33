"""What the peers share; the libraries themselves run on a GPU only."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln.spec import Call
from opkiln_bench import check
from opkiln_bench.catalogue import Row, load_rows
from opkiln_bench.contestants import Subject, bring, canonical
from opkiln_bench.peers import (
    PEERS,
    absent,
    common,
    compositions,
    flaggems,
    quack,
    rope_table,
    torch_compile,
    torch_direct,
    unmeasured,
    unmeasured_figures,
)


def rms_call(n: int = 8, **arguments: Any) -> Call:
    values = {"input": torch.randn(3, n), "weight": torch.ones(n), "normalized_shape": [n]}
    return Call.of(*canonical("rms_norm", values | arguments))


def test_torch_compile_serves_every_op_by_name_only() -> None:
    impls = torch_compile.implementations()
    assert {i.op for i in impls if i.backend == "torch-compile"} == set(CATALOGUE)
    assert not any(i.auto for i in impls)
    assert "torch-compile" in REGISTRY.of("rms_norm")


def test_inductor_searches_for_convolutions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {i.op for i in torch_compile.implementations() if i.backend == "torch-max-autotune"}
    assert tuned == {"conv1d", "conv2d", "conv3d"}
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: asked.append(options))
    for backend in ("torch-compile", "torch-max-autotune"):
        REGISTRY.of("conv1d")[backend].loader()(
            bring(ROWS["Conv1dFwd", "encodec-init", "f16"], CPU).call
        )
    assert [options["mode"] for options in asked] == [None, "max-autotune-no-cudagraphs"]


def test_a_library_that_is_absent_registers_nothing() -> None:
    table = {"rms_norm": (common.rows_only(), lambda: None)}
    assert common.peer("x", "no-such-distribution", table) == []
    (impl,) = common.peer("x", "pytest", table)
    assert (impl.backend, impl.version, impl.auto) == ("x", pytest.__version__, False)


def test_no_peer_is_imported_to_be_listed() -> None:
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


def test_figures_of_peers_that_are_not_measured() -> None:
    """Every figure is of a row, and every row's figures come with the fastest first."""
    listed = [tuple(f) for peer in unmeasured().values() for f in peer.get("figures", ())]
    assert {f[:3] for f in listed} <= set(ROWS)
    assert len({f[:3] for f in listed if f in map(tuple, unmeasured()["vllm"]["figures"])}) == 44
    assert sum(len(unmeasured_figures(*key)) for key in ROWS) == len(listed) == 56
    assert unmeasured_figures("MaxPool3dFwd", "medicalnet-stem", "bf16") == [("cudnn", 263.9)]
    assert unmeasured_figures("MaxPool3dFwd", "medicalnet-stem", "f32") == []


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


def cudnn_like(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *rule: Any) -> Any:
    """aten.cudnn_batch_norm's demands on dtypes, and its result."""
    assert x.dtype in (torch.float16, torch.float32)
    assert {t.dtype for t in (weight, bias, mean, var) if t is not None} == {torch.float32}
    return torch.native_batch_norm(x, weight, bias, mean, var, *rule)


@pytest.mark.parametrize(
    ("label", "dtype"),
    [("resnet50-stage1", "f16"), ("resnet50-stage1", "bf16"), ("resnet-stem", "bf16")],
)
def test_cudnn_batch_norm_takes_every_row(
    label: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_direct, "aten", SimpleNamespace(cudnn_batch_norm=cudnn_like))
    subject = bring(ROWS["BatchNormFwd", label, dtype], CPU)
    tensors = subject.fresh_tensors()
    out = torch_direct.batch_norm(subject.call)(*tensors)
    written = [t for t, old in zip(tensors, subject.tensors, strict=True) if t is not old]
    assert is_right(subject, (out, *written))
    assert torch_direct.float32_statistics(on_cuda(subject.call)) is None


def test_a_known_fault_is_told() -> None:
    """Sums of products rounded to float16, as ATen's CUDA kernel makes them, are wrong: and why."""
    subject = bring(ROWS["BatchNormBwd", "resnet50-stage1", "f16"], CPU)
    grads = list(torch_direct.native_gradients(subject.call)(*subject.tensors))
    grad_out, x, _, mean, rstd = subject.tensors
    centred = x.float() - mean.view(1, -1, 1, 1)
    products = (grad_out.float() * centred).half().double()
    grads[1] = (products.sum([0, 2, 3]) * rstd).float()
    names = ("torch-native-batch-norm", "quack")
    told, plain = check.against_reference(subject, dict.fromkeys(names, grads)).values()
    assert not told.ok and not plain.ok
    assert told.reason == f"{plain.reason}: {torch_direct.ROUNDED_SUMS}"


def test_torchs_own_calls_refuse_the_rest() -> None:
    varlen = on_cuda(bring(ROWS["MeanPoolingForward", "varlen-tail", "f16"], CPU).call)
    refused = torch_direct.whole_chunks(varlen)
    assert refused is not None and refused.reason == "takes dense sequences"
    conv = bring(ROWS["Conv1dFwd", "encodec-init", "f16"], CPU).call
    refused = torch_direct.even_padding(conv)
    assert refused is not None and refused.reason == "needs a CUDA GPU"


def stub(monkeypatch: pytest.MonkeyPatch, path: str, **functions: Any) -> None:
    """A library of one module, whose functions stand for those that need a GPU."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[path]).update(functions)


def max_pool_of_torch(input: Any, kernel_size: Any, *window: Any, **more: Any) -> Any:
    return torch.nn.functional.max_pool2d(input, kernel_size, *window, **more, return_indices=True)


@pytest.mark.parametrize(
    "key",
    [
        ("MaxPool2dFwd", "alexnet-ceil", "f16"),
        ("MaxPool2dIndicesFwd", "resnet-stem", "bf16"),
        ("AvgPool2dFwd", "ceil-divisor", "bf16"),
    ],
    ids=str,
)
def test_flaggems_pools(key: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed to FlagGems' functions, which have the parameters of torch's."""
    path = "flag_gems.ops.max_pool2d_with_indices"
    stub(monkeypatch, path, max_pool2d_with_indices=max_pool_of_torch)
    subject = bring(shrunk(ROWS[key]), CPU)
    if key[0] == "AvgPool2dFwd":
        stub(monkeypatch, "flag_gems.ops.avg_pool2d", avg_pool2d=torch.nn.functional.avg_pool2d)
        load = flaggems.load_avg_pool
    else:
        load = flaggems.load_max_pool(with_indices="Indices" in key[0])
    assert is_right(subject, load()(subject.call)(*subject.tensors))
    assert flaggems.batched_window(on_cuda(subject.call)) is None


def test_flaggems_pools_take_batches() -> None:
    arguments = {"input": torch.randn(3, 8, 8), "kernel_size": 2}
    refused = flaggems.batched_window(on_cuda(Call.of(*canonical("max_pool2d", arguments))))
    assert refused is not None and refused.reason == "takes batched input"


def test_quacks_fused_add_layer_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*call: Any) -> None:
        x, weight, out, bias, rstd, mean, residual, residual_out, eps, is_layernorm = call
        assert is_layernorm and rstd is None and mean is None
        assert weight.dtype == bias.dtype == torch.float32
        total = x.float() + residual.float()
        residual_out.copy_(total)
        out.copy_(torch.nn.functional.layer_norm(total, x.shape[1:], weight, bias, eps))

    stub(monkeypatch, "quack.rmsnorm", _rmsnorm_fwd=forward)
    subject = bring(ROWS["FusedAddLayerNormFwd", "llama-8b-decode", "bf16"], CPU)
    assert is_right(subject, quack.load_fused_add_layer_norm()(subject.call)(*subject.tensors))


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


# Axis -> size of the tensors of ops without a small row: planes, heads and rows are independent.
POOL = {0: 1, 1: 3}
FEWER = {
    **dict.fromkeys(("max_pool2d", "max_pool2d_indices"), POOL),
    **dict.fromkeys(("max_pool3d", "max_pool3d_indices"), POOL),
    "mean_pooling": {2: 2, 3: 8},
    "rope_neox_position_ids": {1: 2},
    "topk_selector": {1: 5},
}


def shrunk(row: Row) -> Row:
    """The row with the axes of FEWER cut; a vector of positions or offsets stays whole."""
    fewer = FEWER.get(row.name, {})
    tensors = {
        n: replace(t, shape=tuple(fewer.get(i, size) for i, size in enumerate(t.shape)))
        if len(t.shape) > 1
        else t
        for n, t in row.tensors.items()
    }
    return replace(row, tensors=tensors)


SMALLEST = {
    name: min((shrunk(r) for r in ROWS.values() if r.name == name), key=lambda r: r.input_bytes)
    for name in CATALOGUE
    if any(r.name == name for r in ROWS.values())
}
COMPILED = [*SMALLEST.values(), *(shrunk(r) for r in ROWS.values() if r.name == "mean_pooling")]


def test_every_op_has_a_small_row() -> None:
    assert set(SMALLEST) == {r.name for r in ROWS.values()}
    assert all(r.input_bytes < 1e7 for r in COMPILED)


@pytest.mark.parametrize("row", COMPILED, ids=str)
def test_torch_compile_gets_one_graph(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph break, and the right result in the right dtype: it is not slowed down by us."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda fn, dynamic, mode: compile_(fn, backend="eager", fullgraph=True)
    )
    torch._dynamo.reset()
    subject = bring(row, CPU)
    tensors = subject.fresh_tensors()
    out = torch_compile.prepare(subject.call)(*tensors)
    names = subject.spec.mutates(subject.call)
    pairs = zip(subject.spec.tensor_names, tensors, strict=True)
    written = [t for n, t in pairs if n in names]
    outputs = list(out) if isinstance(out, tuple) else [out]
    assert is_right(subject, (*outputs, *written))
