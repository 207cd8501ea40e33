"""How mhc_pre is launched: csrc/mhc_pre.cu, two kernels, slabs' sums between them."""

import importlib
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
    """See csrc/mhc_pre.cu. All but `rows` is the same for every batch, for the same bits."""

    rows: int
    threads: int = 256
    unroll: int = 2
    mix_threads: int = 160
    mix_bytes: int = 16  # of an access to x and the outputs
    overlap: bool = False  # the second kernel starts while the first one runs


@dataclass(frozen=True, slots=True)
class Plan:
    """macros: what is compiled in. columns: of a stream."""

    macros: dict[str, Any]
    batch: int
    columns: int
    slabs: int
    sums: int
    overlap: bool


def rule(batch: int) -> Tiling:
    """One row a CTA reads phi from L2 for each row, and still wins with four rows."""
    return Tiling(rows=1 if batch <= 4 else 4)


def vector_of(meta: TensorMeta, width: int, most_bytes: int = 16) -> int:
    """Elements of an access along the last dim of a matrix of rows of `width`: all bytes, or 1."""
    vector = max(most_bytes // meta.dtype.itemsize, 1)
    row_stride, stride = meta.stride
    dense = stride == 1 and meta.aligned and row_stride % vector == 0
    return vector if dense and width % vector == 0 else 1


def common_macros(call: Any, rows: int, threads: int, unroll: int, x_bytes: int) -> dict[str, Any]:
    """Those of csrc/mhc_gates.cuh. ValueError says what the kernels cannot serve."""
    phi, x = call.tensors.phi, call.tensors.x
    n = expansions(phi.shape[1])
    if n > MAX_STREAMS:
        raise ValueError(f"serves up to {MAX_STREAMS} streams, phi is for {n}")
    return {
        "T": TYPES[x.dtype],
        "N": n,
        "ROWS": rows,
        "THREADS": threads,
        "UNROLL": unroll,
        "PHI_VECTOR": vector_of(phi, phi.shape[1]),
        "PHI_DENSE": int(phi.stride == (phi.shape[1], 1)),
        "X_VECTOR": vector_of(x, x.shape[1] // n, x_bytes),
    }


def slab_step(macros: dict[str, Any]) -> int:
    """Rows of phi that a CTA loads at once: STEP of csrc/mhc_gates.cuh."""
    vectors = (macros["N"] ** 2 + 2 * macros["N"]) // macros["PHI_VECTOR"]
    return macros["THREADS"] // min(1 << vectors.bit_length(), 32)


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan:
    """ValueError says what the kernel cannot serve."""
    batch, width = call.tensors.x.shape
    if batch > MAX_GRID_Y:
        raise ValueError(f"serves up to {MAX_GRID_Y} rows, x has {batch}")
    t = tiling or rule(batch)
    macros = common_macros(call, t.rows, t.threads, t.unroll, t.mix_bytes)
    macros["MIX_THREADS"] = t.mix_threads
    slabs = -(-width // (slab_step(macros) * t.unroll))
    return Plan(
        macros, batch, width // macros["N"], slabs, call.tensors.phi.shape[1] + 1, t.overlap
    )


def configure_overlapping(
    kernel: cuda.Kernel, grid: cuda.Dim3, block: cuda.Dim3, shared_bytes: int
) -> Callable[..., None]:
    """kernel.configure, for a kernel that starts when all CTAs of the one before it let it."""
    core: Any = importlib.import_module("cuda.core")
    config = core.LaunchConfig(
        grid=grid, block=block, shmem_size=shared_bytes, programmatic_stream_serialization=True
    )
    handle, send, index = kernel.handle, core.launch, kernel.device.index

    def launch(*args: Any) -> None:
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        send(
            cuda.stream_of(index, torch.cuda.current_stream().cuda_stream), config, handle, *values
        )

    return launch


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Compile and plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    m, p, device = plan.macros, call.params, call.device
    phi, x, b = call.tensors.phi, call.tensors.x, call.tensors.b
    add, mix = (cuda.load(source("mhc_pre"), name, device, m) for name in ("mhc_sums", "mhc_mix"))
    run_add = add.configure(
        (plan.slabs, -(-plan.batch // m["ROWS"]), 1),
        (m["THREADS"], 1, 1),
        4 * m["THREADS"] // 32 * m["ROWS"] * plan.sums,
    )
    gates = m["N"] ** 2 + m["N"]
    mix_launch = (
        (-(-plan.columns // (m["MIX_THREADS"] * m["X_VECTOR"])), plan.batch, 1),
        (m["MIX_THREADS"], 1, 1),
        4 * (m["MIX_THREADS"] // 32 * (2 * plan.sums + gates) + plan.sums - 1),
    )
    run_mix = (
        configure_overlapping(mix, *mix_launch) if plan.overlap else mix.configure(*mix_launch)
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
