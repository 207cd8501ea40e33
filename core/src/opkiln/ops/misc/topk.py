"""Top-k selection within a window: for each row the positions of its `topk` largest scores.

scores [B, S, KV, G], starts and ends [B, S] -> int32 [B, S, G, topk]: positions in [start, end),
clamped to [0, KV], empty if end <= start. The set is fixed: NaN ranks highest, +0 equals -0, and of
equal scores the lowest positions win. The order within a row is free (here ascending); unused slots
are -1 and come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from opkiln.errors import ArgumentError
from opkiln.spec import INDEX, WIDE, Call, OpSpec, OutputSpec, ParamSpec, TensorMeta, TensorSpec

Tensor = torch.Tensor
CHUNK_ELEMENTS = 1 << 24  # scores at a time: a sort of these takes 0.4 GB of workspace
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def sortable(scores: Tensor, inside: Tensor) -> Tensor:
    """Integers in the order of the scores: outside the window < -inf < ... < +inf < NaN."""
    bits_dtype = BITS[scores.dtype]
    limits = torch.iinfo(bits_dtype)
    bits = (scores + 0.0).view(bits_dtype)  # -0 + 0 = +0
    key = torch.where(bits < 0, bits ^ limits.max, bits)
    key = torch.where(scores.isnan(), limits.max, key)
    return torch.where(inside, key, limits.min)


def chunks(scores: Tensor, starts: Tensor, ends: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Some rows at a time: keys [rows, G, KV], and which are inside [rows, 1, KV], their number."""
    kv, groups = scores.shape[2:]
    rows = max(CHUNK_ELEMENTS // max(kv * groups, 1), 1)
    position = torch.arange(kv, device=scores.device)
    first = starts.flatten().long().clamp(0, kv).view(-1, 1, 1)
    end = ends.flatten().long().clamp(0, kv).view(-1, 1, 1)
    flat = scores.flatten(0, 1)
    for at in range(0, flat.shape[0], rows):
        part = slice(at, at + rows)
        inside = (position >= first[part]) & (position < end[part])
        yield (
            sortable(flat[part].transpose(1, 2).contiguous(), inside),
            inside,
            (end[part] - first[part]).clamp(min=0),
        )


def by_rows(select: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """A selection of [rows, G, min(topk, KV)] positions -> the op."""

    def selector(scores: Tensor, starts: Tensor, ends: Tensor, topk: int) -> Tensor:
        batch, length, kv, groups = scores.shape
        k = min(topk, kv)
        parts = [select(*chunk, k).to(torch.int32) for chunk in chunks(scores, starts, ends)]
        found = torch.cat(parts) if parts else scores.new_empty((0, groups, k), dtype=torch.int32)
        found = torch.nn.functional.pad(found, (0, topk - k), value=-1)
        return found.view(batch, length, groups, topk)

    return selector


def by_sorting(keys: Tensor, inside: Tensor, count: Tensor, k: int) -> Tensor:
    """Stable, so that equal keys keep their order, the lowest position first."""
    kv = keys.shape[-1]
    best = torch.sort(keys, dim=-1, descending=True, stable=True).indices[..., :k]
    used = torch.arange(k, device=keys.device) < count
    ascending = torch.where(used, best, kv).sort(-1).values
    return torch.where(ascending < kv, ascending, -1)


def by_threshold(keys: Tensor, inside: Tensor, count: Tensor, k: int) -> Tensor:
    """All above the k-th largest key, and the first of those equal to it."""
    if k == 0:
        return keys[..., :0]
    kth = torch.topk(keys, k, sorted=True).values[..., -1:]
    above, equal = keys > kth, keys == kth
    wanted = k - above.sum(-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= wanted))) & inside
    slot = torch.where(chosen, chosen.cumsum(-1) - 1, k)  # slot k is thrown away
    found = torch.full((*keys.shape[:-1], k + 1), -1, dtype=torch.int32, device=keys.device)
    position = torch.arange(keys.shape[-1], dtype=torch.int32, device=keys.device)
    return found.scatter_(-1, slot, position.expand_as(slot))[..., :k]


def selected(call: Call) -> TensorMeta:
    batch, length, _, groups = call.tensors.scores.shape
    return call.new((batch, length, groups, call.params.topk), torch.int32)


def check(call: Call) -> None:
    kv = call.tensors.scores.shape[2]
    if call.params.topk < 0:
        raise ArgumentError(f"topk_selector: topk must not be negative, got {call.params.topk}")
    if kv >= 2**31:
        raise ArgumentError(f"topk_selector: scores has {kv} positions, allowed: below 2**31")


SPEC = OpSpec(
    op="TopkSelectorFwd",
    name="topk_selector",
    family="misc",
    tensors=(
        TensorSpec("scores", "B S KV G", WIDE),
        TensorSpec("starts", "B S", INDEX),
        TensorSpec("ends", "B S", INDEX),
    ),
    params=(ParamSpec("topk", "int"),),
    outputs=(OutputSpec("indices", selected, differentiable=False),),
    reference=by_rows(by_sorting),
    native=by_rows(by_threshold),
    flops=lambda call: call.tensors.scores.numel,
    check=check,
    doc="Positions of the largest scores of each row within a window.",
)
SPECS = (SPEC,)
