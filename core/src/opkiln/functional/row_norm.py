"""Normalizations of rows: over the trailing dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opkiln.functional.arguments import bind, flag, real, shape, tensor
from opkiln.road import Bound, run

Tensor = torch.Tensor


def _layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: Any, eps: Any
) -> Bound:
    return bind(
        "layer_norm",
        input,
        weight,
        bias,
        normalized_shape=shape("layer_norm", "normalized_shape", normalized_shape),
        eps=real("layer_norm", "eps", eps),
    )


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """(input - mean) / sqrt(variance + eps) * weight + bias over the trailing `normalized_shape`.

    input: [*, *normalized_shape] float16, bfloat16, float32 or float64; weight, bias:
    [*normalized_shape] of any of these dtypes. Statistics (biased variance) and affine in float32;
    result in the input's dtype, contiguous. Gradients: input, weight, bias;
    the backward keeps input, weight and each row's mean and rstd in float32.
    Raises ArgumentError for shapes or dtypes that do not fit.
    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    return run(_layer_norm, (input, weight, bias), (normalized_shape, eps), backend)


def default_eps(input: Tensor) -> float:
    """torch's eps for eps=None: float32's epsilon, for float64 inputs float64's."""
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    return torch.finfo(dtype).eps


def _rms_norm(input: Tensor, weight: Tensor | None, normalized_shape: Any, eps: Any) -> Bound:
    tensor("rms_norm", "input", input)
    return bind(
        "rms_norm",
        input,
        weight,
        normalized_shape=shape("rms_norm", "normalized_shape", normalized_shape),
        eps=default_eps(input) if eps is None else real("rms_norm", "eps", eps),
    )


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """input / sqrt(mean(input^2) + eps) * weight over the trailing dims `normalized_shape`.

    input: [*, *normalized_shape] float16, bfloat16, float32 or float64; weight: [*normalized_shape]
    of any of these dtypes. Statistics and product in float32; result in the input's dtype,
    contiguous. eps=None: torch.finfo(float32).eps, for float64 finfo(float64).eps.
    Gradients: input, weight; the backward keeps both and each row's rstd in float32.
    Raises ArgumentError for shapes or dtypes that do not fit.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return run(_rms_norm, (input, weight), (normalized_shape, eps), backend)


def _fused_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Any,
    eps: Any,
    inplace: bool,
) -> Bound:
    op = "fused_add_layer_norm"
    return bind(
        f"{op}_inplace" if flag(op, "inplace", inplace) else op,
        input,
        residual,
        weight,
        bias,
        normalized_shape=shape(op, "normalized_shape", normalized_shape),
        eps=real(op, "eps", eps),
    )


def fused_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(input + residual), input + residual).

    input, residual: [*, *normalized_shape] of one dtype; the rest as layer_norm's. The norm reads
    the float32 sum, the second result is that sum rounded to the input's dtype. Both are
    contiguous. inplace=True: the norm goes into `input`, the sum into `residual`, and these two are
    returned; no gradient. Gradients: input, residual, weight, bias; the backward keeps the second
    result and the weight. Raises ArgumentError for shapes or dtypes that do not fit; in place for
    tensors that want a gradient, overlap each other or are expanded.
    """
    tensors = (input, residual, weight, bias)
    outs = run(_fused_add_layer_norm, tensors, (normalized_shape, eps, inplace), backend)
    return (input, residual) if inplace else outs


def _fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    normalized_shape: Any,
    eps: Any,
    inplace: bool,
) -> Bound:
    op = "fused_add_rms_norm"
    return bind(
        f"{op}_inplace" if flag(op, "inplace", inplace) else op,
        input,
        residual,
        weight,
        normalized_shape=shape(op, "normalized_shape", normalized_shape),
        eps=real(op, "eps", eps),
    )


def fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(input + residual), input + residual). As fused_add_layer_norm, without a bias."""
    tensors = (input, residual, weight)
    outs = run(_fused_add_rms_norm, tensors, (normalized_shape, eps, inplace), backend)
    return (input, residual) if inplace else outs


def _ada_layer_norm(
    input: Tensor, scale: Tensor, shift: Tensor, eps: Any, scale_offset: Any
) -> Bound:
    op = "ada_layer_norm"
    return bind(
        op,
        input,
        scale,
        shift,
        eps=real(op, "eps", eps),
        scale_offset=real(op, "scale_offset", scale_offset),
    )


def ada_layer_norm(
    input: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float = 1e-5,
    *,
    scale_offset: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """(scale_offset + scale) * LN(input) + shift, LN over the last dim without parameters.

    input: [*, N]; scale, shift: the input's dtype and shape, or broadcastable to it ([B, 1, N]: one
    modulation a sample). All arithmetic in float32; result in the input's dtype, contiguous.
    scale_offset: 1.0 where the network learns scale - 1 (diffusers, DiT). Gradients: input, scale,
    shift, each of its own shape; the backward keeps input, scale (and for a gate shift and gate)
    and each row's mean and rstd in float32. Raises ArgumentError for shapes or dtypes that do not
    fit.
    Source: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023.
    """
    return run(_ada_layer_norm, (input, scale, shift), (eps, scale_offset), backend)


def _ada_layer_norm_zero(
    input: Tensor, scale: Tensor, shift: Tensor, gate: Tensor, eps: Any, scale_offset: Any
) -> Bound:
    op = "ada_layer_norm_zero"
    return bind(
        op,
        input,
        scale,
        shift,
        gate,
        eps=real(op, "eps", eps),
        scale_offset=real(op, "scale_offset", scale_offset),
    )


def ada_layer_norm_zero(
    input: Tensor,
    scale: Tensor,
    shift: Tensor,
    gate: Tensor,
    eps: float = 1e-5,
    *,
    scale_offset: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """gate * ((scale_offset + scale) * LN(input) + shift). As ada_layer_norm; gate as scale."""
    tensors = (input, scale, shift, gate)
    return run(_ada_layer_norm_zero, tensors, (eps, scale_offset), backend)
