"""mean_pooling's backward against the reference in float64, every layout and tiling."""

from typing import Any

import opkiln
import pytest
import torch
from opkiln.functional import mean_pooling
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool import mean_backward
from opkiln_pool.mean_backward import MeanBackwardTiling, mean_backward_kernel, plan_for, prepare
from opkiln_pool.plugin import supports_backward
from pool.test_mean_pooling_interpreter import (
    BF16,
    DEVICE,
    F16,
    RTOL,
    SEQUENCES,
    nan_filled_memory,
    random,
)

__all__ = ["nan_filled_memory"]  # a fixture of every test here
SPEC = CATALOGUE["mean_pooling_backward"]


def call_of(g: torch.Tensor, tokens: int, chunk_size: int, offsets: Any = None, mask=True) -> Call:
    params: dict[str, Any] = {"chunk_size": chunk_size, "num_chunks": None}
    if offsets is not None:
        params["num_chunks"] = g.shape[1]
    shape = (g.shape[0], tokens, *g.shape[2:])
    return Call.of(SPEC, [g, offsets], params | {"input_shape": shape, "output_mask": [mask]})


def run(g: torch.Tensor, tokens: int, chunk_size: int, offsets: Any = None,
        tiling: MeanBackwardTiling | None = None) -> dict[str, Any]:  # fmt: skip
    """Launch, compare with float64, return the constants of the plan that ran."""
    offsets = None if offsets is None else offsets.to(DEVICE)
    call = call_of(g, tokens, chunk_size, offsets)
    assert supports_backward(call) is None
    got = prepare(call, tiling)(g, offsets)
    (want,) = SPEC.reference(g.double(), offsets, **vars(call.params))
    (meta,) = call.outputs
    assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
    torch.testing.assert_close(got.double(), want, rtol=RTOL[g.dtype], atol=0)
    names = list(mean_backward_kernel.arg_names)[3:]
    return dict(zip(names, plan_for(call, tiling)[2], strict=True))


LAYOUTS = {  # id: (gradient of 3 chunks, what the plan's constants must hold)
    "flat": (lambda: random(2, 3, 2, 16, dtype=F16), {"FLAT": True, "ALIGN": 8}),
    "bf16": (lambda: random(1, 3, 3, 5, dtype=BF16), {"FLAT": True, "ALIGN": 1}),
    "one-head": (lambda: random(2, 3, 1, 8), {"FLAT": True, "ALIGN": 4}),
    "one-column": (lambda: random(2, 3, 3, 1), {"FLAT": True}),
    "heads-before-chunks": (lambda: random(2, 2, 3, 8).transpose(1, 2), {"FLAT": False}),
    "column-slice": (lambda: random(2, 3, 2, 12)[..., 2:10], {"FLAT": False, "ALIGN": 1}),
    "strided-columns": (lambda: random(2, 3, 2, 16)[..., ::2], {"FLAT": False, "stride_d": 2}),
    "expanded": (lambda: random(1).expand(3, 3, 2, 8), {"FLAT": False, "stride_d": 0}),
    "expanded-batch": (lambda: random(1, 3, 2, 8).expand(3, 3, 2, 8), {"FLAT": True}),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_dense(case):
    make, expected = case
    for tokens in (9, 11):  # the last chunk whole, and shorter
        assert expected.items() <= run(make(), tokens, -(-tokens // 3)).items()


@pytest.mark.parametrize("chunk_size", [20, 100])
def test_one_chunk_holds_all(chunk_size):
    found = run(random(2, 1, 2, 8), 40, 2 * chunk_size)
    assert (found["chunk_size"], found["parts"], found["TOKENS"]) == (40, 2, 32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", SEQUENCES.values(), ids=SEQUENCES)
def test_sequences(case, dtype):
    values, room = case
    offsets = torch.tensor(values, dtype=dtype)
    chunks = int((offsets.diff() + 3).div(4, rounding_mode="floor").sum()) + room
    run(random(1, chunks, 2, 8, dtype=F16), 20, 4, offsets)


def test_strided_offsets_and_more_than_a_program_looks_at_together(monkeypatch):
    monkeypatch.setattr(mean_backward, "MAX_SEQUENCES", 2)
    offsets = torch.tensor([0, 99, 4, 99, 4, 99, 11, 99, 12, 99, 20, 99])[::2]
    assert run(random(1, 9, 1, 4), 20, 3, offsets)["BLOCK_S"] == 2


TILINGS = (
    MeanBackwardTiling(8, 1, 1),
    MeanBackwardTiling(64, 2, 4, step=2, cache=".cs"),
    MeanBackwardTiling(32, 1, 16, step=16),
)


@pytest.mark.parametrize("tiling", TILINGS)
def test_tilings(tiling):
    found = run(random(2, 3, 3, 8, dtype=F16), 19, 7, tiling=tiling)
    assert (found["BLOCK_N"], found["TOKENS"], found["STEP"]) == (
        tiling.block_n, tiling.tokens, tiling.step,
    )  # fmt: skip
    run(random(1, 6, 3, 8), 19, 7, torch.tensor([0, 1, 10, 19]), tiling)


def test_tokens_past_the_tensor_are_not_written():
    """Offsets that rise too far are the caller's mistake, which checks=True finds."""
    room = torch.full((1, 14, 1, 8), 7.0, device=DEVICE)
    g = random(1, 3, 1, 8)
    _, programs, arguments = plan_for(call_of(g, 10, 4, torch.tensor([0, 12])))
    offsets = torch.tensor([0, 12], device=DEVICE)
    mean_backward_kernel[(programs, 1, 1)](g, offsets, room, *arguments)
    assert torch.equal(room[:, 10:], torch.full_like(room[:, 10:], 7.0))
    assert not (room[:, :10] == 7).any()


def test_through_autograd():
    """The gradient that loss.backward() takes is this kernel's."""
    x = random(1, 11, 2, 8).requires_grad_()
    with opkiln.use("opkiln", strict=True):
        out = mean_pooling(x, 4)
    g = torch.randn_like(out)
    out.backward(g)
    assert torch.equal(x.grad, prepare(call_of(g, 11, 4))(g, None))


def test_no_gradient_is_wanted():
    g = random(1, 2, 1, 4)
    assert prepare(call_of(g, 8, 4, mask=False))(g, None) == ()


def test_refused():
    innermost = random(2, 2, 4, 3).permute(0, 3, 1, 2)  # chunks
    assert "innermost" in supports_backward(call_of(innermost, 9, 3)).reason
    assert "float64" in supports_backward(call_of(random(1, 3, 2, 4).double(), 9, 3)).reason
