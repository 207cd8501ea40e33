"""Mutants whose formula is wrong: one for every rule that a kernel gets wrong most easily."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from conformance.mutants import EXACT, VALUE, Tensor, as_if_contiguous, wrong_formula, wrong_result
from opkiln.ops import CATALOGUE


def reference(op: str, *tensors: Any, **params: Any) -> tuple[Any, ...]:
    """The caller's outputs of an op's reference."""
    spec = CATALOGUE[op]
    outs = spec.reference(*tensors, **params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return outs[: len(spec.returns)]


@wrong_formula("eps_outside_the_root", "rms_norm")
def _(x: Tensor, weight: Any, normalized_shape: Any, eps: float) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    y = x.double() / (x.double().square().mean(dims, keepdim=True).sqrt() + eps)
    return y if weight is None else y * weight


@wrong_formula("dropped_tail", "rms_norm")
def _(x: Tensor, weight: Any, normalized_shape: Any, eps: float) -> Tensor:
    flat = x.double().flatten(x.ndim - len(normalized_shape))
    n = flat.shape[-1]
    total = flat[..., : n - n % 64 or n].square().sum(-1, keepdim=True)
    y = (flat * torch.rsqrt(total / n + eps)).view(x.shape)
    return y if weight is None else y * weight


@wrong_formula("ignored_stride", "rms_norm", EXACT)
def _(x: Tensor, weight: Any, **params: Any) -> Any:
    return reference("rms_norm", as_if_contiguous(x), weight, **params)


def layer_norm(
    x: Tensor, weight: Any, bias: Any, shape: Any, mean: Any, var: Any, eps: float
) -> Tensor:
    y = (x - mean) * torch.rsqrt(var + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@wrong_formula("mean_of_squares_minus_squared_mean", "layer_norm")
def _(x: Tensor, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = x.mean(dims, keepdim=True)
    var = (x.square().mean(dims, keepdim=True) - mean.square()).clamp(min=0)
    return layer_norm(x, weight, bias, normalized_shape, mean, var, eps)


@wrong_formula("unbiased_variance", "layer_norm")
def _(x: Tensor, weight: Any, bias: Any, normalized_shape: Any, eps: float) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    n = max(math.prod(normalized_shape) - 1, 1)
    x = x.double()
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().sum(dims, keepdim=True) / n
    return layer_norm(x, weight, bias, normalized_shape, mean, var, eps)


@wrong_formula("statistics_in_the_input_dtype", "rms_norm", EXACT)
def _(x: Tensor, weight: Any, normalized_shape: Any, eps: float) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    y = x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)
    return y if weight is None else y * weight


@wrong_formula("weight_rounded_to_the_input_dtype", "layer_norm")
def _(x: Tensor, weight: Any, bias: Any, **params: Any) -> Any:
    rounded = [None if t is None else t.to(x.dtype) for t in (weight, bias)]
    return reference("layer_norm", x, *rounded, **params)


@wrong_formula("gate_misses_the_shift", "ada_layer_norm_zero")
def _(x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor, **params: Any) -> Tensor:
    (y,) = reference(
        "ada_layer_norm", x.double(), scale.double(), torch.zeros_like(x).double(), **params
    )
    return gate * y + shift


@wrong_formula("norm_of_the_input_alone", "fused_add_rms_norm")
def _(x: Tensor, residual: Tensor, weight: Any, **params: Any) -> Any:
    return *reference("rms_norm", x, weight, **params), x + residual


@wrong_formula("affine_per_group", "group_norm")
def _(x: Tensor, weight: Any, bias: Any, num_groups: int, eps: float) -> Any:
    repeated = weight
    if weight is not None:
        repeated = weight[:num_groups].repeat_interleave(weight.numel() // num_groups)
    return reference("group_norm", x, repeated, bias, num_groups=num_groups, eps=eps)


@wrong_formula("statistics_of_the_batch", "instance_norm")
def _(
    x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, use_input_stats: bool, **params: Any
) -> Any:
    stats = [None if t is None else t.clone() for t in (mean, var)]
    return reference("batch_norm", x, *stats, weight, bias, training=use_input_stats, **params)


@wrong_formula("nan_lost", "max_pool2d", EXACT)
def _(x: Tensor, **window: Any) -> Any:
    return reference(
        "max_pool2d", x.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), **window
    )


@wrong_formula("padding_counts_as_zero", "max_pool2d", EXACT)
def _(x: Tensor, padding: Any, **window: Any) -> Any:
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    return F.max_pool2d(padded, padding=0, **{**window, "ceil_mode": window["ceil_mode"]})


@wrong_formula("padding_in_the_divisor", "avg_pool2d")
def _(x: Tensor, count_include_pad: bool, **params: Any) -> Any:
    return reference("avg_pool2d", x, count_include_pad=True, **params)


@wrong_formula("divided_by_chunk_size", "mean_pooling")
def _(x: Tensor, cu_seqlens: Any, chunk_size: int, num_chunks: Any) -> Tensor:
    (right,) = reference("mean_pooling", x.double(), cu_seqlens, chunk_size, num_chunks)
    counts = torch.ones_like(x[:1].double())
    whole = F.pad(counts, (0, 0, 0, 0, 0, -counts.shape[1] % chunk_size))
    if cu_seqlens is not None or whole.numel() == 0:
        return right
    length = whole.view(1, -1, chunk_size, *x.shape[2:]).sum(2)
    return right * length / chunk_size


@wrong_formula("sequences_ignored", "mean_pooling", EXACT)
def _(x: Tensor, cu_seqlens: Any, chunk_size: int, num_chunks: Any) -> Tensor:
    (dense,) = reference("mean_pooling", x, None, chunk_size, None)
    missing = 0 if num_chunks is None else num_chunks - dense.shape[1]
    return F.pad(dense, (0, 0, 0, 0, 0, missing))


@wrong_formula("interleaved_pairs", "rope_neox")
def _(x: Tensor, **params: Any) -> Any:
    return reference("rope_non_neox", x, **params)


@wrong_formula("llama31_without_its_rule", "rope_llama31")
def _(x: Tensor, base: float, rotary_dim: Any, offset: int, **rule: Any) -> Any:
    return reference("rope_neox", x, base=base, rotary_dim=rotary_dim, offset=offset)


@wrong_formula("no_attention_factor", "rope_yarn")
def _(x: Tensor, attn_factor: float, **params: Any) -> Any:
    return reference("rope_yarn", x, attn_factor=1.0, **params)


def bound_ignored(op: str, name: str, default: float) -> None:
    """A rule that has the default of one of its bands' bounds built in."""

    @wrong_formula(f"{name}_ignored", op)
    def _(x: Tensor, **params: Any) -> Any:
        return reference(op, x, **params | {name: default})


bound_ignored("rope_llama31", "low_freq_factor", 1.0)
bound_ignored("rope_llama31", "high_freq_factor", 4.0)
bound_ignored("rope_yarn", "beta_fast", 32.0)
bound_ignored("rope_yarn", "beta_slow", 1.0)


@wrong_formula("offset_ignored", "rope_neox")
def _(x: Tensor, offset: int, **params: Any) -> Any:
    return reference("rope_neox", x, offset=0, **params)


@wrong_formula("ids_ignored", "rope_neox_position_ids")
def _(x: Tensor, position_ids: Tensor, **params: Any) -> Any:
    ids = torch.arange(position_ids.numel(), dtype=position_ids.dtype)
    return reference("rope_neox_position_ids", x, ids, **params)


@wrong_formula("true_convolution", "conv2d", EXACT)
def _(x: Tensor, weight: Tensor, bias: Any, **params: Any) -> Any:
    return reference("conv2d", x, weight.flip(-1, -2), bias, **params)


@wrong_formula("tf32_products", "conv2d")
def _(x: Tensor, weight: Tensor, bias: Any, **params: Any) -> Any:
    def tf32(t: Tensor) -> Tensor:
        if t.dtype != torch.float32:
            return t
        return ((t.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)

    return reference("conv2d", tf32(x), tf32(weight), bias, **params)


@wrong_formula("weight_stride_ignored", "conv1d", EXACT)
def _(x: Tensor, weight: Tensor, bias: Any, **params: Any) -> Any:
    return reference("conv1d", x, as_if_contiguous(weight), bias, **params)


@wrong_formula("floor_at_both_ends", "adaptive_avg_pool2d", EXACT)
def _(x: Tensor, output_size: Any) -> Tensor:
    sizes = [n or s for n, s in zip(output_size, x.shape[-2:], strict=True)]
    y = x.double()
    for dim, count in zip((-2, -1), sizes, strict=True):
        size = y.shape[dim]
        cuts = [
            (i * size // count, max((i + 1) * size // count, i * size // count + 1))
            for i in range(count)
        ]
        y = torch.cat([y.narrow(dim, a, b - a).mean(dim, keepdim=True) for a, b in cuts], dim)
    return y


@wrong_formula("inverse_transform", "fft")
def _(x: Tensor, n: Any, dim: int, norm: Any) -> Tensor:
    length = n if n is not None else x.shape[dim]
    return torch.fft.ifft(x, n, dim, norm) * length if x.numel() else x.clone()


@wrong_formula("columns_first", "mhc_pre")
def _(phi: Tensor, x: Tensor, b: Tensor, **params: Any) -> Any:
    n = math.isqrt(phi.shape[1] + 1) - 1
    order = torch.arange(n * n).view(n, n).t().flatten() + 2 * n
    index = torch.cat([torch.arange(2 * n), order])
    outs = reference("mhc_pre", phi[:, index], x, b[index], **params)
    return tuple(o for o in outs if o is not None)


@wrong_formula("residual_missing", "mhc_post")
def _(x_layer_out: Tensor, h_post: Tensor, x_res: Tensor) -> Any:
    return reference("mhc_post", x_layer_out, h_post, torch.zeros_like(x_res))


@wrong_formula("k_smallest", "topk_selector", EXACT)
def _(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Any:
    return reference("topk_selector", -scores, starts, ends, topk)


@wrong_formula("bfloat16_scores", "topk_selector", EXACT)
def _(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Any:
    return reference("topk_selector", scores.bfloat16().float(), starts, ends, topk)


@wrong_formula("last_of_the_ties", "topk_selector", EXACT)
def _(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Any:
    kv = scores.shape[2]
    (found,) = reference("topk_selector", scores.flip(2), kv - ends, kv - starts, topk)
    return torch.where(found < 0, found, kv - 1 - found)


@wrong_result("positions_relative_to_start", "topk_selector", EXACT)
def _(call: Any, tensors: Any, outs: Any) -> Any:
    starts = tensors[1].clamp(min=0)[:, :, None, None]
    return torch.where(outs[0] < 0, outs[0], outs[0] - starts)


@wrong_result("mean_term_dropped", "layer_norm_backward", EXACT)
def _(call: Any, tensors: Any, outs: Any) -> Any:
    named = dict(zip(call.spec.tensor_names, tensors, strict=True))
    if not call.params.output_mask[0]:
        return outs
    g = named["grad_out"].double()
    g = g if named["weight"] is None else g * named["weight"]
    dims = tuple(range(-len(call.params.normalized_shape), 0))
    rstd = named["rstd"].view(*named["rstd"].shape, *[1] * len(dims))
    return ((outs[0] + rstd * g.mean(dims, keepdim=True)).to(outs[0].dtype), *outs[1:])


@wrong_result("gradient_of_the_weight_halved", "rms_norm_backward", VALUE)
def _(call: Any, tensors: Any, outs: Any) -> Any:
    return (*outs[:-1], outs[-1] / 2) if call.params.output_mask[-1] else outs


@wrong_formula("evaluation_gradient_in_training", "batch_norm_backward", EXACT)
def _(*tensors: Any, training: bool, output_mask: Any) -> Any:
    outs = reference("batch_norm_backward", *tensors, training=False, output_mask=output_mask)
    return tuple(o for o in outs if o is not None)


@wrong_formula("offset_ignored", "max_pool2d_backward", EXACT)
def _(grad: Tensor, offset: Tensor, **params: Any) -> Any:
    return reference("max_pool2d_backward", grad, torch.zeros_like(offset), **params)
