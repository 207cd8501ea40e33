"""Backward of row norms in CUDA C++ (csrc/row_backward.cu): rows come ahead through shared memory.

Serves rms_norm, layer_norm and fused_add_rms_norm where all gradients are wanted, every tensor has
one dtype but for the weight, rows are of whole 16-byte vectors, and `rule` names a tiling; the
Triton kernel of row_backward serves the rest, under batch invariance and without cuda-core all.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_norm.row_backward_plan import GRAD_INPUT, BackwardPlan
from opkiln_norm.row_cluster import EXTRA, TYPES

OPS = ("rms_norm_backward", "layer_norm_backward", "fused_add_rms_norm_backward")
VECTOR_BYTES = 16
Run = Callable[[list[Any], torch.Tensor, list[Any]], None]


@dataclass(frozen=True, slots=True)
class RingTiling:
    """threads x vectors of 16 bytes a row; the rest: the macros of csrc/row.cuh and its own."""

    threads: int
    vectors: int
    stages: int
    resident: int = 1
    weight_at: int = 1

    @property
    def slice_bytes(self) -> int:
        return VECTOR_BYTES * self.threads * self.vectors

    def shared_bytes(self, residual: bool, weight_vector: int) -> int:
        """weight_vector: bytes of the weight beside a vector of x."""
        rows = (2 * self.stages + 2 * residual) * self.slice_bytes
        kept = weight_vector * self.threads * self.vectors if self.weight_at == 2 else 0
        # cuda.py raises a kernel's limit only for more than 48 KB, beside which are the barriers
        return rows + kept + 1024


def rule(call: Any, plan: BackwardPlan) -> RingTiling | None:
    """For 16-bit rows of which the Triton kernel would read a part twice: one CTA an SM, as many
    stages as fit. 1024 threads have registers for the sums of a weight alone (rms_norm 2048 x
    16384: 59.8 us, with 512 threads 61.8), 512 for more.
    """
    weight = call.tensors.weight.dtype
    if not plan.tiling.again or weight.itemsize != 2 or call.outputs[0].dtype.itemsize != 2:
        return None
    center, residual = "layer_norm" in call.spec.name, hasattr(call.tensors, "grad_residual_out")
    vectors = 4 if center or residual else 2
    threads = 32 * -(-plan.n * 2 // (32 * vectors * VECTOR_BYTES))
    return RingTiling(threads, vectors, 2 if residual else 3, weight_at=2 if center else 1)


@functools.cache
def source() -> str:
    folder = resources.files("opkiln_norm").joinpath("csrc")
    return "".join(folder.joinpath(n).read_text("utf-8") for n in ("row.cuh", "row_backward.cu"))


def serves(call: Any, plan: BackwardPlan) -> bool:
    t = vars(call.tensors)
    x, weight = t.get("input") or t["residual_out"], t.get("weight")
    streamed = [m for m in (t["grad_out"], x, t.get("grad_residual_out")) if m is not None]
    rows = [r for r in plan.tensors[:3] if r is not None]
    values = VECTOR_BYTES // x.dtype.itemsize
    return (
        call.spec.name in OPS
        and not call.policy.batch_invariant
        and all(call.params.output_mask)
        and weight is not None
        and plan.rows > 1
        and not plan.inner_sizes
        and x.dtype in TYPES
        and all(m.dtype == x.dtype for m in streamed)
        and all(m.aligned for m in (*streamed, weight))
        and plan.n % values == 0
        and all(r.column is None and r.strides is not None for r in rows)
        and all((r.strides or (0,))[0] * plan.align % values == 0 for r in rows)
        and plan.tensors[GRAD_INPUT] is not None
    )


def macros(call: Any, plan: BackwardPlan, t: RingTiling) -> dict[str, int]:
    tensors = vars(call.tensors)
    flags = {
        "EVEN": plan.n * call.outputs[0].dtype.itemsize == t.slice_bytes,
        "CENTER": "layer_norm" in call.spec.name,
        "HAS_RESIDUAL": "grad_residual_out" in tensors,
        "HAS_WEIGHT": True,
        "HAS_BIAS": False,
        "STREAM": False,
        "GIVEN": "rstd" in tensors,
    }
    return {
        "TYPE": TYPES[call.outputs[0].dtype],
        "WEIGHT_TYPE": TYPES[tensors["weight"].dtype],
        "CLUSTER": 1,
        "THREADS": t.threads,
        "VECTORS": t.vectors,
        "RESIDENT": t.resident,
        "STAGES": t.stages,
        "WEIGHT_AT": t.weight_at,
        **{name: int(flag) for name, flag in flags.items()},
    }


def prepare(call: Any, plan: BackwardPlan) -> tuple[int, Run] | None:
    """Rows of sums that the launch writes, and the launch; None where the kernel does not serve."""
    tiling = rule(call, plan) if serves(call, plan) else None
    if tiling is None or cuda.why_not(call.device, EXTRA) is not None:
        return None
    kernel = cuda.load(source(), "row_backward", call.device, macros(call, plan, tiling))
    parts = min(tiling.resident * cuda.multiprocessors(call.device), plan.rows)
    residual = "grad_residual_out" in vars(call.tensors)
    values = VECTOR_BYTES // call.outputs[0].dtype.itemsize
    shared = tiling.shared_bytes(residual, values * call.tensors.weight.dtype.itemsize)
    send = kernel.configure((parts, 1, 1), (tiling.threads, 1, 1), shared, 1)
    strides = [(r.strides or (0,))[0] * plan.align if r else 0 for r in plan.tensors[:3]]
    scalars = (plan.rows, plan.n, *strides, float(getattr(call.params, "eps", 0.0)))

    def run(reads: list[Any], grad_input: torch.Tensor, sums: list[Any]) -> None:
        g, x, r, w, _, _, mean, rstd = (0 if t is None else t for t in reads)
        send(g, x, r, w, mean, rstd, grad_input, sums[0], 0 if sums[1] is None else sums[1],
             *scalars)  # fmt: skip

    return parts, run
