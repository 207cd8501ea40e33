"""Backend `demo`: RMS normalization and dense mean pooling as plain torch functions."""

import torch
from opkiln import Implementation, Refusal, hookimpl, inference_only, simple

OPKILN_API = 1  # the level of opkiln's plugin interface that this was written for


def rms_norm(input, weight, normalized_shape, eps):
    """Statistics and product in float32 (float64 for float64), the result in the input's dtype."""
    x = input.double() if input.dtype == torch.float64 else input.float()
    dims = tuple(range(-len(normalized_shape), 0))
    y = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y.to(input.dtype).contiguous()


def mean_pooling(input, cu_seqlens, chunk_size, num_chunks):
    batch, tokens, *rest = input.shape
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    chunks = input.reshape(batch, tokens // chunk_size, chunk_size, *rest)
    return chunks.mean(2, dtype=dtype).to(input.dtype).contiguous()


def whole_chunks_only(call):
    """None, or why not: dispatch goes on to the next backend, and `explain` shows the reason."""
    if call.tensors.cu_seqlens is not None or call.tensors.input.shape[1] % call.params.chunk_size:
        return Refusal("takes dense input whose length is a multiple of chunk_size")
    return None


@hookimpl
def opkiln_implementations():
    return [
        Implementation("rms_norm", "demo", "0.1.0", 1, inference_only, simple(rms_norm)),
        Implementation("mean_pooling", "demo", "0.1.0", 1, whole_chunks_only, simple(mean_pooling)),
    ]
