"""Fourier transform, hyper-connections and top-k selection."""

from __future__ import annotations

from typing import Any

import torch

from opkiln.functional.arguments import bind, flag, integer, real, tensor
from opkiln.road import Bound, run

Tensor = torch.Tensor


def _fft(input: Tensor, n: Any, dim: Any, norm: str | None) -> Bound:
    dim = integer("fft", "dim", dim)
    ndim = tensor("fft", "input", input).ndim
    dim = dim + ndim if -ndim <= dim < 0 else dim
    if n is None:
        n = input.shape[dim] if 0 <= dim < ndim else 1
    return bind(
        "fft",
        input,
        n=integer("fft", "n", n),
        dim=dim,
        norm="backward" if norm is None else norm,
    )


def fft(
    input: Tensor,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Discrete Fourier transform of complex64 or complex128 numbers along `dim`.

    n: number of points, the dim is cropped or zero-padded to it; None: the dim's size, any size.
    norm: "backward" (None; no scale), "ortho" (1 / sqrt(n)) or "forward" (1 / n). The result has
    the input's dtype and is contiguous. Gradient: input, the conjugate transform; nothing
    is kept for it.
    Raises ArgumentError for n < 1 or an unknown norm, DimError (an IndexError) for a missing dim.
    """
    out: Tensor = run(_fft, (input,), (n, dim, norm), backend)
    return out


def _mhc_pre(
    phi: Tensor,
    x: Tensor,
    b: Tensor,
    alpha_pre: Any,
    alpha_post: Any,
    alpha_res: Any,
    sinkhorn_repeat: Any,
    sinkhorn_eps: Any,
    return_h_post: bool,
) -> Bound:
    op = "mhc_pre"
    return bind(
        op,
        phi,
        x,
        b,
        alpha_pre=real(op, "alpha_pre", alpha_pre),
        alpha_post=real(op, "alpha_post", alpha_post),
        alpha_res=real(op, "alpha_res", alpha_res),
        sinkhorn_repeat=integer(op, "sinkhorn_repeat", sinkhorn_repeat),
        sinkhorn_eps=real(op, "sinkhorn_eps", sinkhorn_eps),
        return_h_post=flag(op, "return_h_post", return_h_post),
    )


def mhc_pre(
    phi: Tensor,
    x: Tensor,
    b: Tensor,
    alpha_pre: float,
    alpha_post: float,
    alpha_res: float,
    sinkhorn_repeat: int,
    sinkhorn_eps: float = 0.02,
    *,
    return_h_post: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Mix n residual streams of c columns before a layer -> (x_res [B, n*c], x_layer [B, c]).

    x: [B, n*c] float16, bfloat16, float32 or float64; phi: [n*c, n*n + 2n] and b: [n*n + 2n]
    float32 (float64 for a float64 x); n follows from phi. sinkhorn_repeat: rounds of row and column
    normalization of the mixing matrix, each sum plus sinkhorn_eps. Arithmetic in float32; x_res and
    x_layer in x's dtype. return_h_post: also h_post [B, n] in phi's dtype, for mhc_post.
    Gradients: phi, x, b; the backward keeps the three. Raises ArgumentError for shapes that fit no
    n.
    Formulas: the module docstring of opkiln.ops.misc.mhc.
    Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025.
    """
    alphas = (alpha_pre, alpha_post, alpha_res)
    args = (*alphas, sinkhorn_repeat, sinkhorn_eps, return_h_post)
    outs: tuple[Tensor, ...] = run(_mhc_pre, (phi, x, b), args, backend)
    return outs if return_h_post else outs[:2]


def _mhc_post(x_layer_out: Tensor, h_post: Tensor, x_res: Tensor) -> Bound:
    return bind("mhc_post", x_layer_out, h_post, x_res)


def mhc_post(
    x_layer_out: Tensor, h_post: Tensor, x_res: Tensor, *, backend: str | None = None
) -> Tensor:
    """Add a layer's output to the residual streams: h_post[i] * x_layer_out + x_res[i], [B, n*c].

    x_layer_out: [B, c] and x_res: [B, n*c] of one dtype, h_post: [B, n] float32 (float64 for
    float64). Arithmetic in float32, result in x_res's dtype. Gradients: all three; the
    backward keeps x_layer_out and h_post.
    """
    out: Tensor = run(_mhc_post, (x_layer_out, h_post, x_res), (), backend)
    return out


def _topk_selector(scores: Tensor, starts: Tensor, ends: Tensor, topk: Any) -> Bound:
    return bind("topk_selector", scores, starts, ends, topk=integer("topk_selector", "topk", topk))


def topk_selector(
    scores: Tensor, starts: Tensor, ends: Tensor, topk: int, *, backend: str | None = None
) -> Tensor:
    """Positions of the `topk` largest scores of each row within its window, int32 [B, S, G, topk].

    scores: [B, S, KV, G] float32 or float64; starts, ends: [B, S] int32 or int64. A row's window is
    [start, end), clamped to [0, KV], empty if end <= start. NaN ranks highest, of equal scores the
    lowest positions win; the order within a row is free. Unused slots are -1 and come last. Exact
    for every input; topk may exceed KV. No gradient. Raises ArgumentError for a negative topk.
    """
    out: Tensor = run(_topk_selector, (scores, starts, ends), (topk,), backend)
    return out
