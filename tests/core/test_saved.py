"""What autograd keeps for a backward: no more than the docstrings of opkiln.functional say."""

from collections.abc import Callable
from typing import Any

import opkiln
import pytest
import torch
from opkiln import functional as F

BF16, F32 = torch.bfloat16, torch.float32
ROWS = torch.randn(3, 8, dtype=BF16)
W = torch.randn(8, dtype=BF16)
IMAGE = torch.randn(2, 4, 9, 9, dtype=BF16)
LINE = torch.randn(1, 1, 70000, dtype=BF16)
PHI, STREAMS = torch.randn(16, 24), torch.randn(3, 16, dtype=BF16)
# The call, which of its tensors are kept, and dtype and size of what is kept beside them.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...], list[Any]]] = {
    "layer_norm": (F.layer_norm, (ROWS, (8,), W, W), (0, 2), [(F32, 3), (F32, 3)]),
    "rms_norm": (F.rms_norm, (ROWS, (8,), W), (0, 2), [(F32, 3)]),
    "fused_add_layer_norm": (F.fused_add_layer_norm, (ROWS, ROWS, (8,), W, W), (3,), [(BF16, 24)]),
    "fused_add_rms_norm": (F.fused_add_rms_norm, (ROWS, ROWS, (8,), W), (3,), [(BF16, 24)]),
    "ada_layer_norm": (F.ada_layer_norm, (ROWS, ROWS, ROWS), (0, 1), [(F32, 3), (F32, 3)]),
    "ada_layer_norm_zero": (
        F.ada_layer_norm_zero, (ROWS, ROWS, ROWS, ROWS), (0, 1, 2, 3), [(F32, 3), (F32, 3)],
    ),
    "group_norm": (F.group_norm, (IMAGE, 2, W[:4], W[:4]), (0, 2), [(F32, 4), (F32, 4)]),
    "instance_norm": (
        F.instance_norm, (IMAGE, None, None, W[:4], W[:4]), (0, 3), [(F32, 8), (F32, 8)],
    ),
    "conv2d": (F.conv2d, (IMAGE, torch.randn(2, 4, 3, 3, dtype=BF16)), (0, 1), []),
    "max_pool2d": (F.max_pool2d, (IMAGE, 3), (), [(torch.uint8, 72)]),
    "max_pool1d of 256": (F.max_pool1d, (LINE, 256, 70000), (), [(torch.uint8, 1)]),
    "max_pool1d of 257": (F.max_pool1d, (LINE, 257, 70000), (), [(torch.int16, 1)]),
    "max_pool1d of 32768": (F.max_pool1d, (LINE, 32768, 70000), (), [(torch.int16, 1)]),
    "max_pool1d of 32769": (F.max_pool1d, (LINE, 32769, 70000), (), [(torch.int32, 1)]),
    "adaptive_max_pool2d": (F.adaptive_max_pool2d, (IMAGE, 2), (), [(torch.uint8, 32)]),
    "avg_pool2d": (F.avg_pool2d, (IMAGE, 3), (), []),
    "adaptive_avg_pool2d": (F.adaptive_avg_pool2d, (IMAGE, 2), (), []),
    "mean_pooling": (F.mean_pooling, (torch.randn(1, 9, 2, 4), 4), (), []),
    "rope_neox": (F.rope_neox, (ROWS,), (), []),
    "fft": (F.fft, (torch.randn(3, 8, dtype=torch.complex64),), (), []),
    "mhc_pre": (F.mhc_pre, (PHI, STREAMS, torch.randn(24), 0.1, 0.1, 0.1, 2), (0, 1, 2), []),
    "mhc_post": (F.mhc_post, (STREAMS[:, :4], torch.randn(3, 4), STREAMS), (0, 1), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept(name: str) -> None:
    function, arguments, tensors_kept, others = CASES[name]
    given = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments]
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is not None:
            kept.append(t)
        return t

    # Any backend: what is kept is the spec's. torch's needs no kernels, which are slow interpreted.
    with opkiln.use("torch"), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(*given)
    places = {a.data_ptr(): i for i, a in enumerate(given) if isinstance(a, torch.Tensor)}
    found = sorted(places[t.data_ptr()] for t in kept if t.data_ptr() in places)
    assert tuple(found) == tensors_kept
    rest = [(t.dtype, t.numel()) for t in kept if t.data_ptr() not in places]
    assert rest == others
