"""Convolution in one, two and three dimensions (cross-correlation, as in torch).

out[n, o] = bias[o] + sum over i, k of weight[o, i, k] * input[n, i of o's group, position + k], in
float32 (float64) arithmetic: a float32 convolution is IEEE float32 unless `allow_tf32`. `padding`
holds the zeros before and after each spatial dim, in pairs, so that an even kernel can keep sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.common import wide
from opkiln.ops.conv.products import Window, convolution, float32_precision
from opkiln.ops.derive import with_backward
from opkiln.spec import FLOAT, Call, OpSpec, OutputSpec, ParamSpec, TensorMeta, TensorSpec

Ints = Sequence[int]
# From here on the reference counts in three dims: torch's float64 convolutions in one and two go
# group by group, minutes for 65,539 groups.
MANY_GROUPS = 1024


def pad_uneven(input: torch.Tensor, padding: Ints) -> tuple[torch.Tensor, list[int], list[int]]:
    """Input padded by what one side has more than the other; the even rest; what was put before."""
    even = [min(pair) for pair in zip(padding[::2], padding[1::2], strict=True)]
    before = [p - e for p, e in zip(padding[::2], even, strict=True)]
    after = [p - e for p, e in zip(padding[1::2], even, strict=True)]
    if not any(before) and not any(after):
        return input, even, before
    pairs = zip(reversed(before), reversed(after), strict=True)
    return torch.nn.functional.pad(input, [p for pair in pairs for p in pair]), even, before


def native(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    allow_tf32: bool,
) -> torch.Tensor:
    x, even, _ = pad_uneven(input, padding)
    return convolution(x, weight, bias, Window(stride, even, dilation, groups, allow_tf32))


def reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    allow_tf32: bool,
) -> torch.Tensor:
    b = None if bias is None else wide(bias)
    n = len(stride)
    extra = 3 - n if groups > MANY_GROUPS else 0

    def lifted(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(*t.shape[:-n], *[1] * extra, *t.shape[-n:])

    ones, zeros = [1] * extra, [0] * (2 * extra)
    window = [*ones, *stride], [*zeros, *padding], [*ones, *dilation]
    out = native(lifted(wide(input)), lifted(wide(weight)), b, *window, groups, False)
    return out.reshape(*out.shape[: -n - extra], *out.shape[-n:]).to(input.dtype)


def backward_native(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    allow_tf32: bool,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    n = len(stride)
    # Torch sums 16-bit groups of volumes in 16 bits, and float16 on CPUs that lack it.
    on_cpu = input.device.type == "cpu" and input.dtype == torch.float16
    if on_cpu or (n == 3 and groups > 1 and input.dtype.itemsize == 2):
        return backward_reference(
            grad_out, input, weight, stride, padding, dilation, groups, allow_tf32, output_mask
        )
    x, even, before = pad_uneven(input, padding)
    batched = input.ndim == n + 2
    if not batched:
        x, grad_out = x.unsqueeze(0), grad_out.unsqueeze(0)
    sizes = ([weight.shape[0]], stride, even, dilation, False, [0] * n, groups)
    with float32_precision(input, allow_tf32):
        grads = torch.ops.aten.convolution_backward(grad_out, x, weight, *sizes, output_mask)
    grad_input, grad_weight, grad_bias = grads
    if grad_input is not None:
        grad_input = grad_input if batched else grad_input.squeeze(0)
        inner = zip(before, input.shape[-n:], strict=True)
        grad_input = grad_input[(..., *[slice(b, b + size) for b, size in inner])]
    return grad_input, grad_weight, grad_bias


def backward_reference(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    allow_tf32: bool,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    tensors = (wide(grad_out), wide(input), wide(weight))
    grads = backward_native(*tensors, stride, padding, dilation, groups, False, output_mask)
    return tuple(None if g is None else g.to(input.dtype) for g in grads)


def output_sizes(call: Call) -> tuple[int, ...]:
    """Spatial sizes of the result: positions at which the dilated kernel fits."""
    t, p = call.tensors, call.params
    n = len(p.stride)
    dims = zip(
        t.input.shape[-n:], t.weight.shape[2:], p.stride, p.dilation, p.padding[::2],
        p.padding[1::2], strict=True,
    )  # fmt: skip
    return tuple(
        (size + before + after - d * (k - 1) - 1) // s + 1 for size, k, s, d, before, after in dims
    )


def convolved(call: Call) -> TensorMeta:
    x, n = call.tensors.input, len(call.params.stride)
    shape = (*x.shape[: -n - 1], call.tensors.weight.shape[0], *output_sizes(call))
    return call.new(shape, x.dtype, x.channels_last)


def check(call: Call) -> None:
    name, x, w = call.spec.name, call.tensors.input.shape, call.tensors.weight.shape
    p, n = call.params, len(call.params.stride)
    if len(w) != n + 2:
        raise ArgumentError(f"{name}: weight has {len(w)} dims, expected {n + 2}: [O, I, *kernel]")
    if len(x) not in (n + 1, n + 2):
        raise ArgumentError(
            f"{name}: input has {len(x)} dims, expected {n + 1} (unbatched) or {n + 2}"
        )
    for what in ("stride", "dilation"):
        if any(v < 1 for v in getattr(p, what)):
            raise ArgumentError(f"{name}: {what} must be positive, got {list(getattr(p, what))}")
    if any(v < 0 for v in p.padding):
        raise ArgumentError(f"{name}: padding must not be negative, got {per_dim(p.padding)}")
    if any(size < 1 for size in (*w, *x[-n - 1 :])):
        raise ArgumentError(
            f"{name}: only the batch may be empty, got input {list(x)} and weight {list(w)}"
        )
    check_groups(call)
    if any(size < 1 for size in output_sizes(call)):
        raise ArgumentError(
            f"{name}: the kernel {list(w[2:])} with dilation {list(p.dilation)} is larger than the "
            f"input {list(x[-n:])} with padding {per_dim(p.padding)}"
        )


def per_dim(padding: Ints) -> list[Any]:
    """Padding as a user writes it: one number a dim, or a pair where its two sides differ."""
    pairs = zip(padding[::2], padding[1::2], strict=True)
    return [before if before == after else (before, after) for before, after in pairs]


def check_groups(call: Call) -> None:
    """Channels of input, weight and groups agree."""
    name, groups = call.spec.name, call.params.groups
    out_channels, of_group = call.tensors.weight.shape[:2]
    channels = call.tensors.input.shape[-len(call.params.stride) - 1]
    if groups < 1 or out_channels % groups != 0:
        raise ArgumentError(
            f"{name}: groups must be positive and divide the {out_channels} output channels, "
            f"got {groups}"
        )
    if channels != of_group * groups:
        raise ArgumentError(
            f"{name}: input has {channels} channels, expected {of_group * groups}: "
            f"{of_group} of the weight in each of {groups} groups"
        )


def terms(call: Call) -> int:
    """Products that one output element sums."""
    return math.prod(call.tensors.weight.shape[1:])


def flops(call: Call) -> int:
    """Every tap counted, those on padding too, and one addition for the bias."""
    return convolved(call).numel * (2 * terms(call) + (call.tensors.bias is not None))


def channel_bias(call: Call) -> TensorMeta:
    w = call.tensors.weight
    return call.new(w.shape[:1], w.dtype)


def conv_specs(ndim: int) -> tuple[OpSpec, OpSpec]:
    """The spec of one convolution and of its backward."""
    return with_backward(
        OpSpec(
            op=f"Conv{ndim}dFwd",
            name=f"conv{ndim}d",
            family="conv",
            tensors=(
                TensorSpec("input", "*NC_spatial", FLOAT),
                TensorSpec("weight", "O I *kernel"),
                TensorSpec("bias", "O", optional=True),
            ),
            params=(
                ParamSpec("stride", "int[]"),
                ParamSpec("padding", "int[]", "zeros before and after each dim, in pairs"),
                ParamSpec("dilation", "int[]"),
                ParamSpec("groups", "int"),
                ParamSpec("allow_tf32", "bool", "float32 may be computed in TF32"),
            ),
            outputs=(OutputSpec("out", convolved),),
            reference=reference,
            native=native,
            flops=flops,
            check=check,
            reduction=terms,
            rounds_at_scale=True,
            autocast="lower",
            doc=f"{ndim}-D convolution.",
        ),
        wrt=("input", "weight", "bias"),
        needs=("input", "weight"),
        reference=backward_reference,
        native=backward_native,
        grad_dims="*NO_spatial",
        grad_meta={"bias": channel_bias},
        flops=lambda call: 4 * call.tensors.grad_out.numel * terms(call),
    )


SPECS = tuple(spec for n in (1, 2, 3) for spec in conv_specs(n))
