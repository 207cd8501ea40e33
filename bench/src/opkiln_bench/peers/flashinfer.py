"""flashinfer: CUDA row norms, rotary embeddings and top-k, built by nvcc at first use.

Its layer norm takes bfloat16 with float32 weights, which are converted once; its fused add works in
place, on copies. Its rotation turns queries and keys in one launch: the heads are handed over as
both. Its top-k takes windows that start at 0, and keeps any of equal scores at the threshold.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from opkiln.registry import Implementation, Launch, Prepare, Refusal
from opkiln.spec import Call

from opkiln_bench.peers.common import HALF, Once, as_rows, on_copies, on_gpu, peer, rows_only
from opkiln_bench.peers.rope_table import INTERLEAVED, ROTATIONS, cos_sin_table

BACKEND = "flashinfer"
DISTRIBUTION = "flashinfer-python"

HEAD_DIMS = (64, 128, 256, 512)


def implementations() -> list[Implementation]:
    bf16 = (torch.bfloat16,)
    return peer(
        BACKEND,
        DISTRIBUTION,
        {
            "rms_norm": (rows_only("weight", dtypes=HALF), load_rms_norm),
            "layer_norm": (rows_only("weight", "bias", dtypes=bf16), load_layer_norm),
            "fused_add_rms_norm": (rows_only("weight", dtypes=HALF), load_fused_add_rms_norm),
            **dict.fromkeys(ROTATIONS, (whole_half_heads, load_rotation)),
            "topk_selector": (one_group, load_topk),
        },
    )


def load_rms_norm() -> Prepare:
    import flashinfer

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)
        eps = call.params.eps
        return lambda x, weight: flashinfer.rmsnorm(x.view(rows), weight, eps).view(shape)

    return prepare


def load_layer_norm() -> Prepare:
    from flashinfer.norm import layernorm

    def prepare(call: Call) -> Launch:
        shape, rows = as_rows(call)
        eps = call.params.eps
        wide_weight, wide_bias = Once(torch.float32), Once(torch.float32)

        def launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
            return layernorm(x.view(rows), wide_weight(weight), wide_bias(bias), eps).view(shape)

        return launch

    return prepare


def load_fused_add_rms_norm() -> Prepare:
    import flashinfer

    def prepare(call: Call) -> Launch:
        return on_copies(partial(flashinfer.fused_add_rmsnorm, eps=call.params.eps))

    return prepare


def whole_half_heads(call: Call) -> Refusal | None:
    x, p = call.tensors.x, call.params
    if x.dtype not in HALF:
        return Refusal("takes float16 and bfloat16")
    if x.shape[-1] not in HEAD_DIMS or p.rotary_dim != x.shape[-1]:
        return Refusal(f"takes whole heads of {HEAD_DIMS} channels")
    return on_gpu(call)


def load_rotation() -> Prepare:
    from flashinfer.rope import _apply_rope_pos_ids_cos_sin_cache as turn

    def prepare(call: Call) -> Launch:
        shape, p = call.tensors.x.shape, call.params
        offset = getattr(p, "offset", 0)
        tokens = shape[1] if len(shape) == 4 else shape[0]
        batch = shape[0] if len(shape) == 4 else 1
        heads = shape[-2] if len(shape) > 2 else 1
        table = cos_sin_table(call, getattr(p, "max_position", offset + tokens))
        positions = torch.arange(offset, offset + tokens, dtype=torch.int32, device=call.device)
        own_positions = positions.repeat(batch)
        queries = (heads + 1) // 2  # the keys may be no heads at all

        def launch(x: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
            out = torch.empty_like(x)
            flat, turned = (t.view(batch * tokens, heads, shape[-1]) for t in (x, out))
            ids = own_positions if position_ids is None else position_ids
            turn(
                flat[:, :queries],
                flat[:, queries:],
                turned[:, :queries],
                turned[:, queries:],
                table,
                ids,
                call.spec.name == INTERLEAVED,
            )
            return out

        return launch

    return prepare


def one_group(call: Call) -> Refusal | None:
    scores = call.tensors.scores
    if scores.dtype != torch.float32 or scores.shape[-1] != 1:
        return Refusal("takes one group of float32 scores")
    return on_gpu(call)


def load_topk() -> Prepare:
    from flashinfer.topk import top_k_ragged_transform

    def prepare(call: Call) -> Launch:
        batch, length, kv, _ = call.tensors.scores.shape
        shape = (batch, length, 1, call.params.topk)
        zeros = torch.zeros(batch * length, dtype=torch.int32, device=call.device)

        def launch(scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> Any:
            rows = scores.view(batch * length, kv)
            found = top_k_ragged_transform(rows, zeros, ends.flatten(), call.params.topk)
            return found.view(shape)

        return launch

    return prepare
