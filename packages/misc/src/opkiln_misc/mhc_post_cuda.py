"""How mhc_post is launched: csrc/mhc_post.cu."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_misc.sources import source

TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass(frozen=True, slots=True)
class Tiling:
    """See csrc/mhc_post.cu. vector_bytes: of an access."""

    threads: int = 64
    per: int = 1
    vector_bytes: int = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """macros: what is compiled in. sizes: the kernel's arguments after its tensors."""

    macros: dict[str, Any]
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan:
    layer, h, res = (call.tensors.x_layer_out, call.tensors.h_post, call.tensors.x_res)
    (batch, columns), streams, t = layer.shape, h.shape[1], tiling or Tiling()
    dense = layer.stride[1] == res.stride[1] == h.stride[1] == 1
    together = math.gcd(columns, layer.stride[0], res.stride[0], t.vector_bytes)
    vector = min(together, t.vector_bytes // res.dtype.itemsize)
    vector = vector if dense and layer.aligned and res.aligned else 1
    per = math.gcd(streams, t.per)
    macros = {
        "T": TYPES[res.dtype],
        "N": streams,
        "PER": per,
        "VECTOR": vector,
        "DENSE": int(dense),
        "THREADS": t.threads,
    }
    grid = (batch, streams // per, -(-columns // (vector * t.threads)))
    return Plan(macros, grid, (columns, *layer.stride, *h.stride, *res.stride))


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., torch.Tensor]:
    """Compile and plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    kernel = cuda.load(source("mhc_post"), "mhc_post", call.device, plan.macros)
    run = kernel.configure(plan.grid, (plan.macros["THREADS"], 1, 1))
    (meta,) = call.outputs

    def launch(layer: torch.Tensor, h: torch.Tensor, res: torch.Tensor) -> torch.Tensor:
        out = meta.empty()
        run(layer, h, res, out, *plan.sizes)
        return out

    return launch
