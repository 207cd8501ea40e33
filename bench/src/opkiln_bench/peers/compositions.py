"""What torch-compile is given where an op's own torch call does not trace into one graph.

The spec's call looks up shared rope tables under a lock, switches cuDNN's precision for float32,
and walks through top-k in chunks: a graph break, another, and 128 unrolled loops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from opkiln.spec import Call

from opkiln_bench.peers.rope_table import INTERLEAVED, ROTATIONS, WITH_IDS, cos_sin_table

Tensor = torch.Tensor
Composition = Callable[..., Any]
CONVOLUTIONS = {
    "conv1d": torch.nn.functional.conv1d,
    "conv2d": torch.nn.functional.conv2d,
    "conv3d": torch.nn.functional.conv3d,
}


def composition(call: Call) -> Composition:
    """A function of the call's tensors, the call's parameters fixed."""
    name, p = call.spec.name, call.params
    if name in ROTATIONS and p.rotary_dim == call.tensors.x.shape[-1]:
        return rotation(call)
    evenly = name in CONVOLUTIONS and list(p.padding[::2]) == list(p.padding[1::2])
    if evenly and call.tensors.input.dtype in (torch.float16, torch.bfloat16):
        sizes = (list(p.stride), list(p.padding[::2]), list(p.dilation), p.groups)
        return lambda x, weight, bias: CONVOLUTIONS[name](x, weight, bias, *sizes)
    if name == "topk_selector":
        return partial(whole_topk, topk=p.topk)
    return partial(call.spec.native or call.spec.reference, **vars(p))


def rotation(call: Call) -> Composition:
    """The rotation by tables that exist before the call, as every model keeps them."""
    shape, p = call.tensors.x.shape, call.params
    offset = getattr(p, "offset", 0)
    tokens = shape[1] if len(shape) == 4 else shape[0]
    table = cos_sin_table(call, getattr(p, "max_position", offset + tokens))
    interleaved = call.spec.name == INTERLEAVED

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if len(shape) > 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
        else:
            a, b = x.chunk(2, -1)
        pair = (a * cos - b * sin, b * cos + a * sin)
        joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return joined.to(x.dtype)

    if call.spec.name == WITH_IDS:
        return lambda x, ids: turn(x, *table[ids].chunk(2, -1))
    cos, sin = table[offset : offset + tokens].chunk(2, -1)
    return lambda x: turn(x, cos, sin)


def whole_topk(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    """Top-k of all rows at once, for topk up to the window's length."""
    position = torch.arange(scores.shape[2], device=scores.device)[:, None]
    inside = (position >= starts[:, :, None, None]) & (position < ends[:, :, None, None])
    masked = scores.masked_fill(~inside, float("-inf"))
    return masked.topk(topk, dim=2, sorted=False).indices.transpose(2, 3).int()
