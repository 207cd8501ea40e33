"""Residual addition and row norm in one op: residual_out = input + residual, out = norm(sum).

The norm reads the sum before it is rounded to the input's dtype. The backward reads `residual_out`,
which the next layer keeps anyway, and takes the row's statistics from it again: the op saves
nothing of its own, and its gradient is exactly that of the norm at the rounded sum, which the
statistics of the unrounded one would not fit. It makes one gradient for input and residual, as
torch's addition does: a copy of it would be a fifth of the kernel's bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from opkiln.ops.common import wide, wide_like
from opkiln.ops.derive import inplace_of, with_backward
from opkiln.ops.norm import layer_norm, rms_norm
from opkiln.ops.norm.formulas import parameter_dtype, row_parameter
from opkiln.spec import OpSpec, OutputSpec, TensorSpec, like


def fused_add_specs(op: str, norm: OpSpec, norm_backward: OpSpec) -> tuple[OpSpec, ...]:
    """Forward, backward and in-place form of input + residual followed by `norm`."""

    def after_add(fn: Any, input: Any, residual: Any, *affine: Any, **params: Any) -> Any:
        total = wide(input) + wide(residual)
        outs = fn(total, *[wide_like(t, total) for t in affine], **params)
        out = outs[0] if isinstance(outs, tuple) else outs
        return out.to(input.dtype), total.to(input.dtype)

    def reference(*tensors: Any, **params: Any) -> Any:
        return after_add(norm.reference, *tensors, **params)

    def native(*tensors: Any, **params: Any) -> Any:
        return after_add(norm.native, *tensors, **params)

    def backward_by(forward: Any, backward: Any) -> Any:
        """The backward whose statistics come from `forward` and whose gradients from `backward`."""

        def fn(
            grad_out: torch.Tensor,
            grad_residual_out: torch.Tensor,
            residual_out: torch.Tensor,
            weight: torch.Tensor | None,
            eps: float,
            **params: Any,
        ) -> Any:
            x = wide(residual_out)
            no_affine = [None] * (len(norm.tensors) - 1)
            _, *saved = forward(x, *no_affine, params["normalized_shape"], eps)
            return gradients(backward, grad_out, grad_residual_out, x, weight, *saved, **params)

        return fn

    names = tuple(t.name for t in norm.tensors[1:])
    parameter = row_parameter("residual_out")
    forward, backward = with_backward(
        OpSpec(
            op=op,
            name=f"fused_add_{norm.name}",
            family="norm",
            tensors=(
                norm.tensors[0],
                TensorSpec("residual", norm.tensors[0].dims),
                *norm.tensors[1:],
            ),
            params=norm.params,
            outputs=(
                norm.outputs[0],
                OutputSpec("residual_out", like("input"), doc="input + residual"),
            ),
            reference=reference,
            native=native,
            flops=lambda call: norm.flops(call) + call.tensors.input.numel,
            reduction=norm.reduction,
            autocast=norm.autocast,
            doc=f"input + residual, and {norm.name} of the sum.",
        ),
        wrt=("input", *names),
        needs=("residual_out", "weight"),
        reference=backward_by(norm.reference, norm_backward.reference),
        native=backward_by(norm.native_train, norm_backward.native),
        grad_dims=norm.tensors[0].dims,
        grad_meta={
            "input": like("residual_out"),
            **dict.fromkeys(names, parameter),
        },
        double="backward",
        alike={"residual": "input"},
    )
    return forward, backward, inplace_of(forward, {"input": "out", "residual": "residual_out"})


def gradients(
    fn: Any,
    grad_out: torch.Tensor,
    grad_residual_out: torch.Tensor,
    *tensors: Any,
    **params: Any,
) -> Any:
    """The norm's gradients by `fn`; the first is that of input and of residual."""
    x, weight, *saved = tensors
    grad, *rest = fn(wide(grad_out), x, wide_like(weight, x), *saved, **params)
    dtype = parameter_dtype(grad_out, weight)
    rest = [None if g is None else g.to(dtype) for g in rest]
    if grad is None:
        return None, *rest
    total = (grad + wide(grad_residual_out)).to(grad_out.dtype)  # rounded once, after the sum
    return total, *rest


SPECS = (
    *fused_add_specs("FusedAddLayerNormFwd", layer_norm.SPEC, layer_norm.BACKWARD),
    *fused_add_specs("FusedAddRMSNormFwd", rms_norm.SPEC, rms_norm.BACKWARD),
)
