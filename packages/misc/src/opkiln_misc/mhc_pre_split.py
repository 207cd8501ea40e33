"""How mhc_pre is launched: csrc/mhc_pre_split.cu, two kernels, slabs' sums between them."""

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
MAX_GRID_Y = 65535


@dataclass(frozen=True, slots=True)
class Tiling:
    """See csrc/mhc_pre_split.cu. All but `rows` is the same for every batch, for the same bits."""

    rows: int
    threads: int = 256
    unroll: int = 2
    mix_threads: int = 160


@dataclass(frozen=True, slots=True)
class Plan:
    """macros: what is compiled in. columns: of a stream."""

    macros: dict[str, Any]
    batch: int
    columns: int
    slabs: int
    sums: int


def rule(batch: int) -> Tiling:
    return Tiling(rows=4 if batch > 2 else batch)


def vector_of(meta: TensorMeta, width: int) -> int:
    """Elements of a 16-byte access along the last dim of a matrix of rows of `width`, or 1."""
    vector = 16 // meta.dtype.itemsize
    row_stride, stride = meta.stride
    dense = stride == 1 and meta.aligned and row_stride % vector == 0
    return vector if dense and width % vector == 0 else 1


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan:
    """ValueError says what the kernel cannot serve."""
    phi, x = call.tensors.phi, call.tensors.x
    m, (batch, width) = phi.shape[1], x.shape
    n = expansions(m)
    if n > MAX_STREAMS:
        raise ValueError(f"serves up to {MAX_STREAMS} streams, phi is for {n}")
    if batch > MAX_GRID_Y:
        raise ValueError(f"serves up to {MAX_GRID_Y} rows, x has {batch}")
    t = tiling or rule(batch)
    macros = {
        "T": TYPES[x.dtype],
        "N": n,
        "ROWS": t.rows,
        "THREADS": t.threads,
        "UNROLL": t.unroll,
        "MIX_THREADS": t.mix_threads,
        "PHI_VECTOR": vector_of(phi, m),
        "X_VECTOR": vector_of(x, width // n),
    }
    vectors = m // macros["PHI_VECTOR"]
    group = min(1 << vectors.bit_length(), 32)
    return Plan(macros, batch, width // n, -(-width // (t.threads // group * t.unroll)), m + 1)


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Compile and plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    m, p, device = plan.macros, call.params, call.device
    phi, x, b = call.tensors.phi, call.tensors.x, call.tensors.b
    add, mix = (
        cuda.load(source("mhc_pre_split"), name, device, m) for name in ("mhc_sums", "mhc_mix")
    )
    row_blocks = -(-plan.batch // m["ROWS"])
    run_add = add.configure(
        (plan.slabs, row_blocks, 1),
        (m["THREADS"], 1, 1),
        4 * m["THREADS"] // 32 * m["ROWS"] * plan.sums,
    )
    gates = m["N"] ** 2 + m["N"]
    run_mix = mix.configure(
        (-(-plan.columns // (m["MIX_THREADS"] * m["X_VECTOR"])), plan.batch, 1),
        (m["MIX_THREADS"], 1, 1),
        4 * (m["MIX_THREADS"] // 32 * (2 * plan.sums + gates) + plan.sums - 1),
    )
    add_sizes = (plan.batch, x.shape[1], plan.slabs, *phi.stride, *x.stride)
    mix_sizes = (
        plan.columns, plan.slabs, *x.stride, *b.stride,
        float(p.alpha_pre), float(p.alpha_post), float(p.alpha_res),
        p.sinkhorn_repeat, float(p.sinkhorn_eps), 1 / x.shape[1],
    )  # fmt: skip
    partial_sums, metas = (plan.batch, plan.slabs, plan.sums), call.outputs

    def launch(phi: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = tuple(m.empty() for m in metas)
        partials = torch.empty(partial_sums, dtype=torch.float32, device=device)
        run_add(phi, x, partials, *add_sizes)
        h_post = outputs[2] if len(outputs) > 2 else 0
        run_mix(partials, x, b, outputs[0], outputs[1], h_post, *mix_sizes)
        return outputs

    return launch
