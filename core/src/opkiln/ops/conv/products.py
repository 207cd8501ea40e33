"""A convolution that can be differentiated any number of times in one float32 precision.

torch's own derivatives of a convolution read cuDNN's TF32 setting when they run, which is after the
block that set it has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from opkiln.meta import is_wrapped

TORCH = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}
OUT, INPUT, WEIGHT = 0, 1, 2


@dataclass(frozen=True)  # no tuple: torch.func would look for tensors in it
class Window:
    """Parameters of a convolution; padding: the same on both sides of a dim."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    allow_tf32: bool


@dataclass(frozen=True)
class Wanted:
    """The derivative by OUT, INPUT or WEIGHT; shape: its own, where it is not by OUT."""

    by: int
    window: Window
    shape: Sequence[int] = ()


@contextlib.contextmanager
def float32_precision(x: torch.Tensor, allow_tf32: bool) -> Iterator[None]:
    """Let cuDNN use TF32 inside the block, or not (torch's default does). Process-wide."""
    setting: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, wanted = setting.fp32_precision, "tf32" if allow_tf32 else "ieee"
    if not x.is_cuda or x.dtype != torch.float32 or before == wanted:
        yield
        return
    setting.fp32_precision = wanted
    try:
        yield
    finally:
        setting.fp32_precision = before


class Products(torch.autograd.Function):
    """A derivative of sum(out * convolution(input, weight)), of the two it is not by.

    By out it is the convolution, by input or weight a gradient of it. The sum is linear in all
    three, so the derivatives of this function are this function again, whatever their order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, wanted: Wanted) -> torch.Tensor:
        """a, b: in the order out, input, weight; with a batch."""
        w = wanted.window
        with float32_precision(a, w.allow_tf32):
            if wanted.by == OUT:
                return torch_convolution(a, b, None, w)
            unread = a.new_empty(wanted.shape)  # only its size matters
            x, weight = (unread, b) if wanted.by == INPUT else (b, unread)
            mask = [wanted.by == INPUT, wanted.by == WEIGHT, False]
            rest = (w.stride, w.padding, w.dilation, False, [0] * len(w.stride), w.groups, mask)
            grads = torch.ops.aten.convolution_backward(a, x, weight, None, *rest)
            found: torch.Tensor = grads[mask.index(True)]
            return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        a, b, ctx.wanted = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        three = list(ctx.saved_tensors)
        three.insert(ctx.wanted.by, grad)
        found: list[torch.Tensor | None] = []
        others = [i for i in (OUT, INPUT, WEIGHT) if i != ctx.wanted.by]
        for by, needed in zip(others, ctx.needs_input_grad, strict=False):
            two = [x for i, x in enumerate(three) if i != by]
            wanted = Wanted(by, ctx.wanted.window, three[by].shape)
            found.append(product(*two, wanted) if needed else None)
        return *found, None


product: Callable[..., torch.Tensor] = Products.apply


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window
) -> torch.Tensor:
    """torch's convolution; by way of Products where a gradient may be taken.

    Not under forward-mode AD: two levels of it give wrong derivatives of an autograd.Function
    (torch 2.13). A gradient taken there, as torch.func.hessian does, has torch's own precision.
    """
    tensors = [t for t in (x, weight, bias) if t is not None]
    recorded = torch.is_grad_enabled() and any(t.requires_grad or is_wrapped(t) for t in tensors)
    if recorded and not under_forward_mode():
        batched = x if x.ndim == weight.ndim else x.unsqueeze(0)
        out = product(batched, weight, Wanted(OUT, window))
        out = out if x.ndim == weight.ndim else out.squeeze(0)
        return out if bias is None else out + bias.view(-1, *[1] * len(window.stride))
    with float32_precision(x, window.allow_tf32):
        return torch_convolution(x, weight, bias, window)


def torch_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window
) -> torch.Tensor:
    w = window
    return TORCH[len(w.stride)](x, weight, bias, w.stride, w.padding, w.dilation, w.groups)


def under_forward_mode() -> bool:
    """Inside jvp of torch.func, or a level of forward-mode AD."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    jvp = torch._C._functorch.TransformType.Jvp
    return forward_ad._current_level >= 0 or any(level.key() == jvp for level in levels)
