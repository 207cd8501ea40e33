"""How mhc_pre is launched: csrc/mhc_pre.cu, one cluster of CTAs for a few rows of x."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opkiln.device import cuda
from opkiln.ops.misc.mhc import expansions
from opkiln.spec import TensorMeta

from opkiln_misc.sources import source

TYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
MAX_STREAMS = 8
MAX_SHARED_BYTES = 227 << 10  # of a CTA on compute capability 9.0
UNROLL = 10  # rows of phi in flight a thread: 10 x 64 rows are all that a CTA reads of 10240


@dataclass(frozen=True, slots=True)
class Tiling:
    """See csrc/mhc_pre.cu."""

    rows: int
    cluster: int = 16
    threads: int = 384


@dataclass(frozen=True, slots=True)
class Plan:
    """macros: what is compiled in. strides: of phi, x and b, in the kernel's order."""

    tiling: Tiling
    macros: dict[str, Any]
    batch: int
    columns: int
    most_width: int
    strides: tuple[int, ...]
    shared_bytes: int


def rule(batch: int) -> Tiling:
    """More rows a cluster read phi less often, fewer reduce less: measured on the H200's rows."""
    return Tiling(rows=4 if batch > 2 else batch)


def vector_of(meta: TensorMeta, width: int) -> int:
    """Elements of a 16-byte access along the last dim of a matrix of rows of `width`, or 1."""
    vector = 16 // meta.dtype.itemsize
    row_stride, stride = meta.stride
    dense = stride == 1 and meta.aligned and row_stride % vector == 0
    return vector if dense and width % vector == 0 else 1


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan:
    """ValueError says what the kernel cannot serve."""
    phi, x, b = call.tensors.phi, call.tensors.x, call.tensors.b
    n = expansions(phi.shape[1])
    if n > MAX_STREAMS:
        raise ValueError(f"serves up to {MAX_STREAMS} streams, phi is for {n}")
    batch, columns = x.shape[0], x.shape[1] // n
    t = tiling or rule(batch)
    macros = {
        "T": TYPES[x.dtype],
        "N": n,
        "ROWS": t.rows,
        "CLUSTER": t.cluster,
        "THREADS": t.threads,
        "PHI_VECTOR": vector_of(phi, phi.shape[1]),
        "X_VECTOR": vector_of(x, columns),
        "UNROLL": UNROLL,
    }
    most_width = math.ceil(columns / macros["X_VECTOR"] / t.cluster) * macros["X_VECTOR"]
    m = phi.shape[1]
    step = t.threads // (m // macros["PHI_VECTOR"])
    floats = t.rows * (n * most_width + (t.cluster + 1) * (m + 1) + n * n + n + step * (m + 1)) + m
    if 4 * floats > MAX_SHARED_BYTES:
        raise ValueError(
            f"{n} x {columns} columns need {4 * floats} bytes of shared memory, there are "
            f"{MAX_SHARED_BYTES}"
        )
    strides = (*phi.stride, *x.stride, *b.stride)
    return Plan(t, macros, batch, columns, most_width, strides, 4 * floats)


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Compile and plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    t, p = plan.tiling, call.params
    kernel = cuda.load(source("mhc_pre"), "mhc_pre", call.device, plan.macros)
    run = kernel.configure(
        (-(-plan.batch // t.rows) * t.cluster, 1, 1),
        (t.threads, 1, 1),
        plan.shared_bytes,
        t.cluster,
    )
    alphas = (float(p.alpha_pre), float(p.alpha_post), float(p.alpha_res))
    fixed = (
        plan.batch, plan.columns, plan.most_width, *plan.strides,
        *alphas, p.sinkhorn_repeat, float(p.sinkhorn_eps),
    )  # fmt: skip
    metas = call.outputs

    def launch(phi: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = tuple(m.empty() for m in metas)
        h_post = outputs[2] if len(outputs) > 2 else 0
        run(phi, x, b, outputs[0], outputs[1], h_post, *fixed)
        return outputs

    return launch
