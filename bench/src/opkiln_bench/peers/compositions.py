"""What torch-compile is given where an op's own torch call does not trace into one graph.

The spec's call looks up shared rope tables under a lock, switches cuDNN's precision for float32,
and walks through top-k in chunks: a graph break, another, and 128 unrolled loops. Of a norm's
gradient Inductor gets the formula, which it fuses, rather than ATen's operator; of a max pool's the
operator that it has kernels of its own for, after our offsets are turned into indices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.ops.common import wide
from opkiln.spec import Call

from opkiln_bench.peers.pool_gradients import Plane, window_indices
from opkiln_bench.peers.rope_table import INTERLEAVED, ROTATIONS, WITH_IDS, cos_sin_table

Tensor = torch.Tensor
Composition = Callable[..., Any]
aten = torch.ops.aten
CONVOLUTIONS = {
    "conv1d": torch.nn.functional.conv1d,
    "conv2d": torch.nn.functional.conv2d,
    "conv3d": torch.nn.functional.conv3d,
}


def composition(call: Call) -> Composition:
    """A function of the call's tensors, the call's parameters fixed."""
    name, p = call.spec.name.removesuffix("_backward"), call.params
    backward = name != call.spec.name
    if name in ROTATIONS and p.rotary_dim == first(call).shape[-1]:
        return rotation(call, -1 if backward else 1)
    evenly = name in CONVOLUTIONS and list(p.padding[::2]) == list(p.padding[1::2])
    if evenly and call.tensors.input.dtype in (torch.float16, torch.bfloat16):
        return convolution_gradient(call) if backward else convolution(call)
    if name == "topk_selector":
        return partial(whole_topk, topk=p.topk)
    if backward and name in GRADIENTS:
        return GRADIENTS[name](call)
    return partial(call.spec.native or call.spec.reference, **vars(p))


def first(call: Call) -> Any:
    """Meta of the first tensor: the input of a forward, the gradient that comes into a backward."""
    return next(iter(vars(call.tensors).values()))


def convolution(call: Call) -> Composition:
    p = call.params
    sizes = (list(p.stride), list(p.padding[::2]), list(p.dilation), p.groups)
    return lambda x, weight, bias: CONVOLUTIONS[call.spec.name](x, weight, bias, *sizes)


def convolution_gradient(call: Call) -> Composition:
    p = call.params
    padding = list(p.padding[::2])
    sizes = (list(p.stride), padding, list(p.dilation), False, [0] * len(padding), p.groups)

    def gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        mask = list(p.output_mask)
        return aten.convolution_backward(grad, x, weight, [weight.shape[0]], *sizes, mask)

    return gradient


def by_formula(call: Call) -> Composition:
    return partial(call.spec.reference, **vars(call.params))


def max_pool_gradient(call: Call) -> Composition:
    """Inductor's kernel for a plane sums in float32; ATen's for a volume, which it falls back to,
    adds atomically in the gradient's dtype, so that one gets float32 where windows overlap.
    """
    p = call.params
    plane = Plane(p)
    pool = aten.max_pool3d_with_indices_backward
    if len(p.kernel_size) < 3:
        pool = aten.max_pool2d_with_indices_backward
    reach = [(k - 1) * d + 1 for k, d in zip(p.kernel_size, p.dilation, strict=True)]
    overlap = any(r > s for r, s in zip(reach, p.stride, strict=True))
    atomic = len(p.kernel_size) == 3 and overlap

    def gradient(grad: Tensor, offset: Tensor) -> Tensor:
        g = plane.enter(wide(grad) if atomic else grad)
        like = g.new_empty(plane.shape)  # only its shape is read
        window = (plane.kernel_size, plane.stride, plane.padding, plane.dilation)
        indices = plane.enter(window_indices(offset, p))
        return plane.leave(pool(g, like, *window, p.ceil_mode, indices))

    return gradient


def avg_pool_gradient(call: Call) -> Composition:
    """ATen's operator, which Inductor has kernels for that sum in float32."""
    p = call.params
    plane = Plane(p)
    pool = aten.avg_pool3d_backward if len(p.kernel_size) == 3 else aten.avg_pool2d_backward
    rest = (p.ceil_mode, p.count_include_pad, getattr(p, "divisor_override", None))

    def gradient(grad: Tensor) -> Tensor:
        g = plane.enter(grad)
        window = (plane.kernel_size, plane.stride, plane.padding)
        return plane.leave(pool(g, g.new_empty(plane.shape), *window, *rest))

    return gradient


def through_forward(call: Call) -> Composition:
    """The vector-Jacobian product of the forward's formula, which the backward's own formula is:
    by torch.func, which dynamo follows where it does not follow torch.autograd.grad. In float32, as
    the formula: a gradient that is a sum of several is rounded once.
    """
    forward = CATALOGUE[call.spec.forward_op or ""]
    back = forward.backward
    assert back is not None
    p = vars(call.params)
    params = {name: p[name] for name in forward.param_names}
    grads = len(call.spec.tensors) - len(back.needs)
    metas = list(vars(call.tensors).values())[:grads]
    present = sum(m is not None and m.numel > 0 for m in metas)  # outputs that are absent come last
    order = [back.needs.index(name) for name in forward.tensor_names]
    outs_of_wrt = [forward.tensor_names.index(name) for name in back.wrt]

    def gradient(*tensors: Tensor) -> Any:
        read = tensors[grads:]
        given = [wide(read[i]) for i in order]
        _, pull = torch.func.vjp(lambda *t: forward.reference(*t, **params)[:present], *given)
        found = pull(tuple(wide(t) for t in tensors[:present]))
        return tuple(found[i] for i in outs_of_wrt)

    return gradient


GRADIENTS: dict[str, Callable[[Call], Composition]] = {
    **dict.fromkeys(
        (
            "rms_norm",
            "layer_norm",
            "fused_add_rms_norm",
            "fused_add_layer_norm",
            "group_norm",
            "instance_norm",
        ),
        by_formula,
    ),
    **{f"max_pool{n}d{form}": max_pool_gradient for n in (1, 2, 3) for form in ("", "_indices")},
    **{f"avg_pool{n}d": avg_pool_gradient for n in (1, 2, 3)},
    "mhc_pre": through_forward,
}


def rotation(call: Call, sign: int = 1) -> Composition:
    """The rotation by tables that exist before the call, as every model keeps them; -1: back."""
    shape, p = first(call).shape, call.params
    offset = getattr(p, "offset", 0)
    tokens = shape[1] if len(shape) == 4 else shape[0]
    table = cos_sin_table(call, getattr(p, "max_position", offset + tokens))
    name = call.spec.name.removesuffix("_backward")
    interleaved = name == INTERLEAVED

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        sin = sin if sign > 0 else -sin
        if len(shape) > 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if interleaved:
            a, b = x[..., 0::2], x[..., 1::2]
        else:
            a, b = x.chunk(2, -1)
        pair = (a * cos - b * sin, b * cos + a * sin)
        joined = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return joined.to(x.dtype)

    if name == WITH_IDS:
        return lambda x, ids: turn(x, *table[ids].chunk(2, -1))
    cos, sin = table[offset : offset + tokens].chunk(2, -1)
    return lambda x: turn(x, cos, sin)


def whole_topk(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
    """Top-k of all rows at once, for topk up to the window's length."""
    position = torch.arange(scores.shape[2], device=scores.device)[:, None]
    inside = (position >= starts[:, :, None, None]) & (position < ends[:, :, None, None])
    masked = scores.masked_fill(~inside, float("-inf"))
    return masked.topk(topk, dim=2, sorted=False).indices.transpose(2, 3).int()
