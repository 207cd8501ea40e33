"""How mhc_pre is launched: csrc/mhc_pre.cu, a cluster of CTAs for each row or few of x."""

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
MIX_BYTES = 4  # of an access to x and the outputs: 3.97 us, with 8 bytes 4.42
ONE_WAVE = 8  # clusters of 16 CTAs that 132 multiprocessors hold
SHORT = 5120  # rows of phi: 320 a CTA, what 256 threads load at once with up to 4 streams


@dataclass(frozen=True, slots=True)
class Tiling:
    """See csrc/mhc_pre.cu. rows, unroll: any, for the same bits."""

    rows: int = 1
    threads: int = 512
    unroll: int = 10
    cluster: int = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """macros: what is compiled in. share: rows of phi a CTA; own_columns: of a stream, a CTA."""

    macros: dict[str, Any]
    batch: int
    columns: int
    share: int
    own_columns: int
    shared_bytes: int


def rule(batch: int, width: int, streams: int) -> Tiling:
    """Measured on an H200 up to four rows: a cluster each. More than fill the GPU share phi's
    loads by fours, with fewer in flight for want of registers.
    """
    threads = 256 if width <= SHORT and streams <= 4 else 512
    return Tiling(1, threads, 10) if batch <= ONE_WAVE else Tiling(4, threads, 8)


def vector_of(meta: TensorMeta, width: int, most_bytes: int = 16) -> int:
    """Elements of an access along the last dim of a matrix of rows of `width`: all bytes, or 1."""
    vector = max(most_bytes // meta.dtype.itemsize, 1)
    row_stride, stride = meta.stride
    dense = stride == 1 and meta.aligned and row_stride % vector == 0
    return vector if dense and width % vector == 0 else 1


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan:
    """ValueError says what the kernel cannot serve."""
    phi, x = call.tensors.phi, call.tensors.x
    (batch, width), m = x.shape, phi.shape[1]
    n = expansions(m)
    if n > MAX_STREAMS:
        raise ValueError(f"serves up to {MAX_STREAMS} streams, phi is for {n}")
    t = tiling or rule(batch, width, n)
    macros: dict[str, Any] = {
        "T": TYPES[x.dtype],
        "N": n,
        "ROWS": t.rows,
        "THREADS": t.threads,
        "UNROLL": t.unroll,
        "CLUSTER": t.cluster,
        "PHI_VECTOR": vector_of(phi, m),
        "PHI_DENSE": int(phi.stride == (m, 1)),
        "X_VECTOR": vector_of(x, width // n, MIX_BYTES),
    }
    vector = macros["X_VECTOR"]
    own_columns = -(-(width // n) // (vector * t.cluster)) * vector
    floats = t.rows * ((t.threads // 32 + t.cluster + 1) * (m + 1) + n * n + n) + m
    return Plan(macros, batch, width // n, -(-width // t.cluster), own_columns, 16 + 4 * floats)


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Compile and plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    m, p = plan.macros, call.params
    phi, x, b = call.tensors.phi, call.tensors.x, call.tensors.b
    kernel = cuda.load(source("mhc_pre"), "mhc_pre", call.device, m)
    clusters = -(-plan.batch // m["ROWS"])
    run = kernel.configure(
        (clusters * m["CLUSTER"], 1, 1), (m["THREADS"], 1, 1), plan.shared_bytes, m["CLUSTER"]
    )
    sizes = (
        plan.batch, plan.columns, plan.share, plan.own_columns, *phi.stride, *x.stride, *b.stride,
        float(p.alpha_pre), float(p.alpha_post), float(p.alpha_res),
        p.sinkhorn_repeat, float(p.sinkhorn_eps), 1 / x.shape[1],
    )  # fmt: skip
    metas = call.outputs

    def launch(phi: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = tuple(m.empty() for m in metas)
        h_post = outputs[2] if len(outputs) > 2 else 0
        run(phi, x, b, outputs[0], outputs[1], h_post, *sizes)
        return outputs

    return launch
