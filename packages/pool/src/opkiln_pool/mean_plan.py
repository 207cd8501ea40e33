"""How mean_pooling is launched: the layout of its columns, and the tiling."""

import math
from dataclasses import dataclass
from typing import Any

from opkiln import tilings

from opkiln_pool.pool_plan import power_of_two, tuning_rows

KERNEL = "mean_pooling"  # what a tiling of the user's is for
MAX_SEQUENCES = 1024  # offsets that a program looks at together


@dataclass(frozen=True, slots=True)
class MeanTiling:
    """block_n: columns a program. step: tokens a step, whose loads are in flight together."""

    block_n: int
    num_warps: int
    step: int
    stages: int = 1
    evict: str = ""


@dataclass(frozen=True, slots=True)
class MeanPlan:
    """A tiling, the grid, and the kernel's arguments after its tensors."""

    tiling: MeanTiling
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constexprs: dict[str, Any]


def rule(itemsize: int, columns: int, longest: int, whole: bool) -> MeanTiling:
    """A tiling for any number of columns and length of a chunk: a vector of columns a thread.

    whole: each 16 bytes are one load, never needed again. The hint that says so took dense rows of
    8192 columns from 25.79 to 21.22 us and from 44.19 to 39.58 (H200).
    """
    vector = 16 // itemsize
    block_n = min(power_of_two(columns), 128 * vector)
    num_warps = max(block_n // (32 * vector), 1)
    step = min(power_of_two(longest), 8)
    return MeanTiling(block_n, num_warps, step, evict="evict_first" if whole else "")


def key_of(call: Any) -> dict[str, Any]:
    """What a row of tuning/sm90.json is found by: never the number of tokens."""
    x = call.tensors.input
    return {
        "op": "mean_pooling",
        "itemsize": x.dtype.itemsize,
        "columns": x.shape[2] * x.shape[3],
        "chunk_size": call.params.chunk_size,
        "varlen": call.tensors.cu_seqlens is not None,
    }


def tuned(call: Any) -> MeanTiling | None:
    """The table's tiling for this call, whose columns lie together and allow whole vectors."""
    key = key_of(call)
    for row in tuning_rows():
        if all(row.get(k) == v for k, v in key.items()):
            return MeanTiling(**row["use"])
    return None


def plan_for(call: Any) -> MeanPlan:
    """The plan of a mean_pooling call."""
    x, offsets, p = call.tensors.input, call.tensors.cu_seqlens, call.params
    batch, tokens, heads, dim = x.shape
    # No chunk is longer than all tokens, whatever the size asked for.
    chunk_size = max(min(p.chunk_size, tokens), 1)
    columns, chunks = heads * dim, call.outputs[0].shape[1]
    itemsize = x.dtype.itemsize
    dense_d = x.stride[3] == 1 or dim == 1
    flat = dense_d and (heads == 1 or x.stride[2] == dim)
    align = 1
    if dense_d and x.aligned:
        others = [s for n, s in zip(x.shape[:3], x.stride[:3], strict=True) if n > 1]
        align = math.gcd(16 // itemsize, dim, *others)
    steps = [s // align for s in x.stride[:3]]
    whole = flat and align == 16 // itemsize
    found = tuned(call) if whole else None
    own = tilings.taken(call, KERNEL, MeanTiling)
    tiling = own or found or rule(itemsize, columns, chunk_size, whole)
    sequences = 0 if offsets is None else offsets.shape[0] - 1
    constexprs = {
        "D": dim,
        "N": columns,
        "ALIGN": align,
        "FLAT": flat,
        "BLOCK_N": tiling.block_n,
        "STEP": tiling.step,
        "BLOCK_S": min(power_of_two(max(sequences, 1)), MAX_SEQUENCES),
        "STAGES": tiling.stages,
        "EVICT": tiling.evict,
    }
    arguments = (
        tokens, chunks, sequences, chunk_size, 0 if offsets is None else offsets.stride[0],
        *steps, None if dense_d else x.stride[3], *constexprs.values(),
    )  # fmt: skip
    blocks = -(-columns // tiling.block_n)
    return MeanPlan(tiling, (batch * chunks * blocks, 1, 1), arguments, constexprs)
