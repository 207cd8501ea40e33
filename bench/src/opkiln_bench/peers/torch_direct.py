"""Torch's own calls that the pages name one by one: cuDNN, cuFFT, ATen's batch norm, autograd.

Each goes straight to the operator that does the work. torch-cudnn lets cuDNN try its algorithms
on each new shape (`benchmark`), which the backend `torch` does not.
"""

from __future__ import annotations

from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import Implementation, Launch, Prepare, Refusal
from opkiln.spec import Call

from opkiln_bench.peers.common import Once, Supports, even_padding, on_gpu

aten = torch.ops.aten

# Normalization.cuh makes its two sums of `Float2<scalar_t, accscalar_t>`, whose constructor takes
# scalar_t: on an H200 28 to 57 times off the tolerance with float16, 228 times with bfloat16.
ROUNDED_SUMS = (
    "torch's kernel rounds each product and each partial sum of a warp to the input's dtype "
    "(Float2 in ATen/native/cuda/Normalization.cuh)"
)
FAULTS = {
    ("torch-native-batch-norm", "batch_norm_backward"): ROUNDED_SUMS,
    ("torch-autograd", "batch_norm_backward"): ROUNDED_SUMS,  # bfloat16, which cuDNN is not given
}


def implementations() -> list[Implementation]:
    table: list[tuple[str, str, Supports, Prepare]] = [
        ("torch-cudnn", "conv1d", with_cudnn(even_padding), convolution),
        ("torch-cudnn", "conv2d", with_cudnn(even_padding), convolution),
        ("torch-cudnn", "conv3d", with_cudnn(even_padding), convolution),
        ("torch-cudnn", "batch_norm", with_cudnn(float32_statistics), batch_norm),
        ("torch-cufft", "fft", whole_transform, transform),
        ("torch-native-batch-norm", "batch_norm_backward", training_gradients, native_gradients),
        ("torch-autograd", "batch_norm_backward", training_gradients, autograd_gradients),
        ("torch-view-mean", "mean_pooling", whole_chunks, view_mean),
    ]
    return [
        Implementation(
            op=op,
            backend=backend,
            version=torch.__version__,
            spec_version=CATALOGUE[op].version,
            supports=supports,
            loader=lambda prepare=prepare: prepare,
            auto=False,
        )
        for backend, op, supports, prepare in table
        if op in CATALOGUE
    ]


def with_cudnn(rule: Supports) -> Supports:
    def supports(call: Call) -> Refusal | None:
        if call.device.type == "cuda" and not torch.backends.cudnn.is_available():
            return Refusal("this torch has no cuDNN")
        return rule(call)

    return supports


def convolution(call: Call) -> Launch:
    p = call.params
    stride, padding, dilation = list(p.stride), list(p.padding[::2]), list(p.dilation)
    flat = len(stride) == 1  # cuDNN has no 1D convolution: a 2D one of height 1
    if flat:
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
    benchmark, deterministic = True, False
    rest = (padding, stride, dilation, p.groups, benchmark, deterministic, p.allow_tf32)
    ones = [1] * len(stride)

    def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if flat:
            x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        out = aten.cudnn_convolution(x, weight, *rest)
        if bias is not None:
            out.add_(bias.view(-1, *ones))
        return out.squeeze(2) if flat else out

    return launch


def float32_statistics(call: Call) -> Refusal | None:
    t = call.tensors
    if t.running_mean is not None and t.running_mean.dtype != torch.float32:
        return Refusal("takes float32 statistics")
    if t.input.dtype == torch.float64:
        return Refusal("takes float16, bfloat16 and float32")
    return on_gpu(call)


def batch_norm(call: Call) -> Launch:
    """cuDNN's, with float32 weights: converted once, ones and zeros where absent.

    torch hands cuDNN bfloat16 only with bfloat16 weights and statistics, which would lose the
    running ones: such input is widened in the call, and the result rounded.
    """
    x, p = call.tensors.input, call.params
    ones = torch.ones(x.shape[1], device=call.device)
    zeros = torch.zeros(x.shape[1], device=call.device)
    wide_weight, wide_bias = Once(torch.float32), Once(torch.float32)
    taken = torch.float32 if x.dtype == torch.bfloat16 else x.dtype

    def launch(x: Any, mean: Any, var: Any, weight: Any, bias: Any) -> torch.Tensor:
        scale = ones if weight is None else wide_weight(weight)
        shift = zeros if bias is None else wide_bias(bias)
        args = (x.to(taken), scale, shift, mean, var, p.training, p.momentum, p.eps)
        return aten.cudnn_batch_norm(*args)[0].to(x.dtype)

    return launch


def whole_transform(call: Call) -> Refusal | None:
    p, shape = call.params, call.tensors.input.shape
    if p.norm != "backward" or p.n != shape[p.dim]:
        return Refusal("takes unscaled transforms of the whole dim")
    return on_gpu(call)


def transform(call: Call) -> Launch:
    dims, unscaled, forward = [call.params.dim], 0, True
    return lambda x: aten._fft_c2c(x, dims, unscaled, forward)


def training_gradients(call: Call) -> Refusal | None:
    t, p = call.tensors, call.params
    if not p.training or not all(p.output_mask) or t.weight is None:
        return Refusal("takes the training form with weight and all gradients")
    return on_gpu(call)


def native_gradients(call: Call) -> Launch:
    mask = [True, True, True]

    def launch(grad_out: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
        args = (grad_out, x, weight, None, None, mean, rstd, True, 0.0, mask)
        return aten.native_batch_norm_backward(*args)

    return launch


def autograd_gradients(call: Call) -> Launch:
    """The backward of torch's batch_norm; its forward ran once, and is not timed.

    It takes its own mean and rstd of the input, eps 1e-5: the rows hand over the same.
    """
    graph: list[torch.Tensor] = []

    def launch(grad_out: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
        if not graph:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (x, weight)]
                leaves.append(torch.zeros_like(weight).requires_grad_())
                out = torch.nn.functional.batch_norm(
                    leaves[0], None, None, leaves[1], leaves[2], training=True, eps=1e-5
                )
            graph.extend((out, *leaves))
        return torch.autograd.grad(graph[0], graph[1:], grad_out, retain_graph=True)

    return launch


def whole_chunks(call: Call) -> Refusal | None:
    if call.tensors.cu_seqlens is not None:
        return Refusal("takes dense sequences")
    if call.tensors.input.shape[1] % call.params.chunk_size:
        return Refusal("takes whole chunks")
    return on_gpu(call)


def view_mean(call: Call) -> Launch:
    batch, tokens, *rest = call.tensors.input.shape
    shape = (batch, tokens // call.params.chunk_size, call.params.chunk_size, *rest)
    return lambda x, cu_seqlens: x.view(shape).mean(2)
