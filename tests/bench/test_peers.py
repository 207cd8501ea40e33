"""What the peers share; the libraries themselves run on a GPU only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln.spec import Call
from opkiln_bench.contestants import canonical
from opkiln_bench.peers import PEERS, common, torch_compile


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
