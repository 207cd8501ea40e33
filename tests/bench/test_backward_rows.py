"""Rows of gradients: which there are, their calls, who is timed on them, where they are shown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln_bench import check, html, pages, report, rows_csv, summary
from opkiln_bench.analysis import results
from opkiln_bench.catalogue import (
    CatalogueError,
    Row,
    in_suite,
    load_rows,
    parse_gradients,
    select,
)
from opkiln_bench.contestants import Subject, bring, cost_of
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
from opkiln_bench.records import Run
from opkiln_bench.settings import Bench
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.sweep import Sweep
from opkiln_bench.timing.wall import WallTimer
from opkiln_bench.validate import check_calls, check_config, check_ops

CPU = torch.device("cpu")
OWN = load_rows(["opkiln_bench.conf"])
BACKWARD = load_rows(["opkiln_bench.conf"], "bwd")
GRADIENTS = [r for r in BACKWARD if r.forward]


def test_the_modes() -> None:
    everything = load_rows(["opkiln_bench.conf"], "all")
    assert len(OWN) == 243 and not any(r.forward for r in OWN)
    assert everything == [*OWN, *GRADIENTS]
    assert {r.op for r in BACKWARD} - {r.op for r in GRADIENTS} == {"BatchNormBwd"}
    assert {r.op for r in BACKWARD} & {r.op for r in OWN} == {"BatchNormBwd"}
    assert len({r.key for r in everything}) == len(everything)


def test_every_backward_has_two_rows_or_more() -> None:
    names = [r.name for r in BACKWARD]
    assert set(names) == {n for n in CATALOGUE if n.endswith("_backward")}
    assert min(names.count(n) for n in names) >= 2
    check_ops(GRADIENTS)
    check_calls(GRADIENTS)


MILD = {"alpha_pre", "alpha_post", "alpha_res"}


def test_a_gradient_is_of_a_row_of_the_pages() -> None:
    known = {r.key: r for r in OWN}
    for row in GRADIENTS:
        forward = known[str(row.forward), row.label, row.dtype]
        assert (row.tensors, row.function) == (forward.tensors, forward.function)
        changed = {k for k, v in row.args.items() if forward.args.get(k) != v}
        assert changed == (MILD if row.op == "MHCPreBwd" else set())
        assert row.pages == {} and row.family == forward.family
        assert "decode" not in row.label  # no training step has one token


def test_no_suite_of_a_page_has_a_gradient() -> None:
    assert in_suite(GRADIENTS, page="all") == in_suite(GRADIENTS, page="norm") == []
    assert {r.op for r in select(GRADIENTS, "*rms_norm*", "*", "bf16")} == {
        "RMSNormBwd",
        "FusedAddRMSNormBwd",
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"op": "ABwd", "rows": {}}, r"x\.yaml: gradient 1 has no of"),
        ({"op": "ABwd", "of": "RMSNormFwd", "rows": ["a"]}, r"x\.yaml: gradient 1 cannot be read"),
        (
            {"op": "ABwd", "of": "RMSNormFwd", "rows": {"llama-8b-decode": ["f32"]}},
            r"x\.yaml: ABwd: there is no row RMSNormFwd llama-8b-decode f32",
        ),
    ],
    ids=["key", "shape", "row"],
)
def test_a_broken_file_of_gradients_is_one_line(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogueError, match=message) as error:
        parse_gradients({"gradients": [entry]}, OWN, "x.yaml")
    assert "\n" not in str(error.value)


def test_another_mode_is_one_line() -> None:
    with pytest.raises(CatalogueError, match="mode must be one of fwd, bwd, all, got 'backward'"):
        check_config(Bench(mode="backward"))


# Axis -> size: a batch, channels, rows or heads that the op treats independently.
POOL = {0: 1, 1: 3}
FEWER: dict[str, dict[int, int]] = {
    "mean_pooling": {2: 2, 3: 8},
    "rope_neox_position_ids": {1: 2},
    **{n: {0: 8} for n in CATALOGUE if "layer_norm" in n or "rms_norm" in n},
    **{n: POOL for n in CATALOGUE if "max_pool" in n or "avg_pool" in n},
}


def small(row: Row, dtype: str | None = None) -> Row:
    """The row with the axes of FEWER cut, in another dtype where one is given."""
    fewer = FEWER.get(row.name.removesuffix("_backward"), {})
    tensors = {
        n: replace(
            t,
            shape=tuple(fewer.get(i, s) for i, s in enumerate(t.shape))
            if len(t.shape) > 1
            else t.shape,
            dtype=dtype if dtype and t.dtype == row.dtype else t.dtype,
        )
        for n, t in row.tensors.items()
    }
    return replace(row, tensors=tensors, dtype=dtype or row.dtype)


SMALLEST = {
    name: min((small(r) for r in GRADIENTS if r.name == name), key=lambda r: r.input_bytes)
    for name in dict.fromkeys(r.name for r in GRADIENTS)
}


def is_right(subject: Subject, out: Any) -> bool:
    outputs = list(out) if isinstance(out, tuple) else [out]
    found = check.against_reference(subject, {"peer": outputs})["peer"]
    assert found.ok, found.reason
    return True


@pytest.mark.parametrize("name", SMALLEST)
def test_the_call_of_a_gradient(name: str) -> None:
    """What the backward's spec demands, the same in every run; torch takes it and is right."""
    subject, again = bring(SMALLEST[name], CPU), bring(SMALLEST[name], CPU)
    assert subject.spec is CATALOGUE[name]
    pairs = list(zip(subject.tensors, again.tensors, strict=True))
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)  # type: ignore[arg-type]
    given = [t for t in subject.tensors if t is not None]
    assert cost_of(subject)["bytes_read"] == sum(t.nbytes for t in given)
    assert (given[0] != given[0].flatten()[0]).any()  # not the ones of a sum()
    shown = subject.shown_tensors
    assert [t.shape for t in shown.values()] == [tuple(t.shape) for t in given if t.numel()]
    assert next(iter(shown)).startswith("grad_")
    launch = REGISTRY.of(name)["torch"].loader()(subject.call)
    assert is_right(subject, launch(*subject.tensors))


def test_saved_tensors_are_the_forwards() -> None:
    row = SMALLEST["layer_norm_backward"]
    _, x, weight, mean, rstd = bring(row, CPU).tensors
    assert x is not None and weight is not None and mean is not None and rstd is not None
    assert mean.dtype == rstd.dtype == torch.float32
    assert torch.allclose(mean, x.float().mean(-1), atol=1e-6)
    assert torch.allclose(rstd, x.float().var(-1, correction=0).add(1e-6).rsqrt())


def test_a_wrong_gradient_is_found() -> None:
    subject = bring(SMALLEST["mhc_post_backward"], CPU)
    grads = list(subject.spec.reference(*subject.tensors, **subject.params))
    grads[1] = grads[1] * 1.01
    found = check.against_reference(subject, {"opkiln": grads})["opkiln"]
    assert not found.ok and found.reason.startswith("grad_h_post[")


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


def in_float32(name: str) -> Row:
    """A small row in the dtype in which torch sums in float32 on a CPU too."""
    row = SMALLEST[name]
    return row if row.dtype.startswith("c") else small(row, "f32")


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
        torch, "compile", lambda fn, dynamic: compile_(fn, backend="eager", fullgraph=True)
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


@pytest.fixture
def measured() -> dict[str, Any]:
    settings = TimerSettings(min_samples=4, max_samples=4, warmup_calls=1, host_calls=1)
    sweep = Sweep(CPU, WallTimer(settings), settings, ["opkiln", "torch", "torch-ref"], "test")
    return sweep.measure(SMALLEST["max_pool1d_backward"])


def test_the_record_of_a_gradient(measured: dict[str, Any]) -> None:
    assert (measured["op"], measured["forward"], measured["pages"]) == (
        "MaxPool1dBwd",
        "MaxPool1dFwd",
        {},
    )
    assert measured["backends"]["torch"]["status"] == "ok", measured["backends"]
    assert list(measured["tensors"]) == ["grad_out", "offset"]
    assert measured["tensors"]["offset"]["dtype"] == "u8"
    assert pages.dims(measured) == "`grad_out: [N, C, L]` `offset: [N, C, L], u8`"


Make = Callable[..., Any]


@pytest.fixture
def mixed(measured: dict[str, Any], make_row: Make, make_run: Make) -> Run:
    """A run with a row of the pages, and a gradient that ours has a time of."""
    page_row = make_row()
    gradient = {**measured, "timer": page_row["timer"], "gpu": page_row["gpu"]}
    gradient["backends"] = make_row(times_us={"opkiln": 4.0, "torch": 6.0})["backends"]
    return make_run("mixed", [page_row, gradient])


def test_gradients_are_published_apart(mixed: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report.publish_into([mixed.path], out)
    assert [line["op"] for line in rows_csv.read_csv(out / "rows.csv")] == ["RMSNormFwd"]
    assert [line["op"] for line in rows_csv.read_csv(out / "rows_bwd.csv")] == ["MaxPool1dBwd"]
    heads = {(out / name).read_text().splitlines()[0] for name in ("rows.csv", "rows_bwd.csv")}
    assert heads == {",".join(rows_csv.COLUMNS)}
    page = (out / "backward.md").read_text("utf-8")
    assert page.startswith("# Backward\n") and "## MaxPool1dBwd" in page and "1.50×" in page
    assert "MaxPool1dBwd" not in (out / "all.md").read_text("utf-8")
    assert not (out / "pooling.md").exists()
    assert "Bwd" not in (out / "normalization.md").read_text("utf-8")


def test_gradients_on_the_offline_page_and_in_the_summary(mixed: Run) -> None:
    rows = results([mixed])
    assert [html.row_data(r)["family"] for r in rows] == ["normalization", "backward"]
    text = summary.summary(rows, "NVIDIA H200", ["abc"], ["2026-11-30"])
    assert text.startswith("1 rows: 1 ahead")  # the pages' rows
    assert "| Backward | 1 | 1 | 0 | 0 | 1.50× | torch |" in text


def test_a_cpu_run_of_gradients(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opkiln_bench", "device=cpu", "mode=bwd", "op=mhc_post*", "run=b",
         "suite=smoke", "backends=[torch,torch-ref]"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OPKILN_COMMIT": "test"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = rows_csv.read_csv(tmp_path / "runs/b/rows_bwd.csv")
    assert (line["op"], line["label"], line["status"]) == ("MHCPostBwd", "post-small", "missing")
    assert line["best_alt"] in ("torch", "torch-ref")
