"""Manifold-constrained hyper-connections: n residual streams of c columns, mixed before and after a
layer. Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025.

Pre: x [B, n*c], phi [n*c, n*n + 2n], b [n*n + 2n]; with r = sqrt(mean(x^2)) + 1e-4, H = x @ phi:
    pre    = sigmoid(alpha_pre * H[:, :n] / r + b[:n])                  x_layer = pre @ x   [B, c]
    h_post = alpha_post * H[:, n:2n] / r + b[n:2n]                                          [B, n]
    res    = sinkhorn(alpha_res * H[:, 2n:] / r + b[2n:] as [n, n])     x_res = res @ x     [B, n*c]
sinkhorn(z): exp(z - max of the row); then repeatedly rows / (row sum + eps), columns likewise.
Post: x_out[i] = h_post[i] * x_layer_out + x_res[i].
phi, b, h_post and all arithmetic in float32; all of it in float64 for a float64 x.
"""

from __future__ import annotations

import math

import torch

from opkiln.errors import ArgumentError
from opkiln.ops.common import wide
from opkiln.ops.derive import with_backward
from opkiln.spec import (
    FLOAT,
    WIDE,
    Call,
    OpSpec,
    OutputSpec,
    ParamSpec,
    TensorMeta,
    TensorSpec,
    dtype_name,
    like,
    wide_dtype,
)

Tensor = torch.Tensor
RMS_EPS = 1e-4


def expansions(columns: int) -> int:
    """n of the n*n + 2n columns of phi; 0 if there is no such n."""
    n = math.isqrt(int(columns) + 1) - 1
    return n if n * n + 2 * n == columns else 0


def sinkhorn(logits: Tensor, repeat: int, eps: float) -> Tensor:
    """[B, n, n] towards a doubly stochastic matrix."""
    m = torch.exp(logits - logits.amax(-1, keepdim=True))
    for _ in range(repeat):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def pre_reference(
    phi: Tensor,
    x: Tensor,
    b: Tensor,
    alpha_pre: float,
    alpha_post: float,
    alpha_res: float,
    sinkhorn_repeat: int,
    sinkhorn_eps: float,
    return_h_post: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    n = expansions(phi.shape[1])
    streams = wide(x).unflatten(1, (n, -1))
    # vector_norm and not a square root: its gradient at an all-zero token is 0, not NaN.
    rms = torch.linalg.vector_norm(wide(x), dim=1, keepdim=True) / math.sqrt(max(x.shape[1], 1))
    h = (wide(x) @ phi) / (rms + RMS_EPS)
    pre = torch.sigmoid(alpha_pre * h[:, :n] + b[:n])
    h_post = alpha_post * h[:, n : 2 * n] + b[n : 2 * n]
    logits = (alpha_res * h[:, 2 * n :] + b[2 * n :]).unflatten(1, (n, n))
    res = sinkhorn(logits, sinkhorn_repeat, sinkhorn_eps)
    x_res = mix(res, streams).flatten(1)
    x_layer = mix(pre.unsqueeze(1), streams).squeeze(1)
    return x_res.to(x.dtype), x_layer.to(x.dtype), h_post if return_h_post else None


def mix(weights: Tensor, streams: Tensor) -> Tensor:
    """weights [B, m, n] @ streams [B, n, c]; n is tiny, so a sum of products, never in TF32."""
    return (weights.unsqueeze(-1) * streams.unsqueeze(1)).sum(2)


def pre_check(call: Call) -> None:
    t, p = call.tensors, call.params
    n = expansions(t.phi.shape[1])
    if n < 1 or t.x.shape[1] % n:
        raise ArgumentError(
            f"mhc_pre: phi has shape {list(t.phi.shape)}, expected [n*c, n*n + 2*n] for n streams "
            "of c columns"
        )
    if t.phi.dtype != wide_dtype(t.x.dtype):
        raise ArgumentError(
            f"mhc_pre: phi has dtype {dtype_name(t.phi.dtype)}, for x of {dtype_name(t.x.dtype)} "
            f"it must have {dtype_name(wide_dtype(t.x.dtype))}"
        )
    if p.sinkhorn_repeat < 0:
        raise ArgumentError(
            f"mhc_pre: sinkhorn_repeat must not be negative, got {p.sinkhorn_repeat}"
        )


def layer_meta(call: Call) -> TensorMeta:
    rows, width = call.tensors.x.shape
    return call.new((rows, width // expansions(call.tensors.phi.shape[1])), call.tensors.x.dtype)


def h_post_meta(call: Call) -> TensorMeta | None:
    if not call.params.return_h_post:
        return None
    n = expansions(call.tensors.phi.shape[1])
    return call.new((call.tensors.x.shape[0], n), call.tensors.phi.dtype)


def pre_flops(call: Call) -> int:
    """2 for each product of x @ phi, res @ x and pre @ x."""
    rows, width = call.tensors.x.shape
    columns = call.tensors.phi.shape[1]
    return 2 * rows * width * (columns + expansions(columns) + 1)


PRE, PRE_BACKWARD = with_backward(
    OpSpec(
        op="MHCPreFwd",
        name="mhc_pre",
        family="misc",
        tensors=(
            TensorSpec("phi", "NC M", WIDE),
            TensorSpec("x", "B NC", FLOAT),
            TensorSpec("b", "M", doc="phi's dtype"),
        ),
        params=(
            ParamSpec("alpha_pre", "float"),
            ParamSpec("alpha_post", "float"),
            ParamSpec("alpha_res", "float"),
            ParamSpec("sinkhorn_repeat", "int"),
            ParamSpec("sinkhorn_eps", "float"),
            ParamSpec("return_h_post", "bool"),
        ),
        outputs=(
            OutputSpec("x_res", like("x")),
            OutputSpec("x_layer", layer_meta),
            OutputSpec("h_post", h_post_meta, doc="only with return_h_post"),
        ),
        reference=pre_reference,
        flops=pre_flops,
        check=pre_check,
        reduction=lambda call: call.tensors.x.shape[1],
        autocast="fp32",
        doc="Hyper-connections before a layer: mixed residual streams and the layer's input.",
    ),
    wrt=("x", "phi", "b"),
    needs=("phi", "x", "b"),
    grad_dims={"x_res": "B NC", "x_layer": "B C", "h_post": "*h_post_dims"},
    flops=lambda call: 3 * pre_flops(call),
)


def post_reference(x_layer_out: Tensor, h_post: Tensor, x_res: Tensor) -> Tensor:
    layer = h_post.unsqueeze(-1) * wide(x_layer_out).unsqueeze(1)
    return (layer.flatten(1) + wide(x_res)).to(x_res.dtype)


def post_backward_reference(
    grad_x_out: Tensor,
    x_layer_out: Tensor,
    h_post: Tensor,
    x_res_shape: tuple[int, ...],
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """grad_x_layer_out = sum_i h_post[i] g[i], grad_h_post[i] = g[i] . x_layer_out; x_res: g."""
    g = wide(grad_x_out).view(-1, h_post.shape[1], x_layer_out.shape[1])
    grads = (
        (h_post.unsqueeze(-1) * g).sum(1).to(x_layer_out.dtype),
        (g * wide(x_layer_out).unsqueeze(1)).sum(-1),
        grad_x_out.clone(),
    )
    return tuple(g if wanted else None for g, wanted in zip(grads, output_mask, strict=True))


def post_check(call: Call) -> None:
    t = call.tensors
    if t.x_res.shape[1] != t.h_post.shape[1] * t.x_layer_out.shape[1]:
        raise ArgumentError(
            f"mhc_post: x_res has shape {list(t.x_res.shape)}, expected [B, n*c] = "
            f"{[t.x_res.shape[0], t.h_post.shape[1] * t.x_layer_out.shape[1]]}"
        )
    wanted = wide_dtype(t.x_res.dtype)
    if t.h_post.dtype != wanted:
        raise ArgumentError(
            f"mhc_post: h_post has dtype {dtype_name(t.h_post.dtype)}, for x_res of "
            f"{dtype_name(t.x_res.dtype)} it must have {dtype_name(wanted)}"
        )


POST, POST_BACKWARD = with_backward(
    OpSpec(
        op="MHCPostFwd",
        name="mhc_post",
        family="misc",
        tensors=(
            TensorSpec("x_layer_out", "B C", FLOAT),
            TensorSpec("h_post", "B N", WIDE),
            TensorSpec("x_res", "B NC"),
        ),
        params=(),
        outputs=(OutputSpec("x_out", like("x_res")),),
        reference=post_reference,
        flops=lambda call: 2 * call.tensors.x_res.numel,
        check=post_check,
        autocast="fp32",
        doc="Hyper-connections after a layer: its output added to the residual streams.",
    ),
    wrt=("x_layer_out", "h_post", "x_res"),
    needs=("x_layer_out", "h_post"),
    reference=post_backward_reference,
    grad_dims="B NC",
    flops=lambda call: 4 * call.tensors.grad_x_out.numel,
)
SPECS = (PRE, PRE_BACKWARD, POST, POST_BACKWARD)
