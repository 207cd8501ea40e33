"""How mhc_pre is launched as one kernel: csrc/mhc_pre_cluster.cu, a cluster for each few rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_misc.mhc_pre import common_macros
from opkiln_misc.sources import source


@dataclass(frozen=True, slots=True)
class Tiling:
    """See csrc/mhc_pre_cluster.cu. All but `rows` is the same for every batch: the same bits."""

    rows: int = 1
    cluster: int = 16
    threads: int = 512
    unroll: int = 5
    mix_bytes: int = 4  # of an access to x and the outputs


@dataclass(frozen=True, slots=True)
class Plan:
    """macros: what is compiled in. share: rows of phi a CTA; own_columns: of a stream, a CTA."""

    macros: dict[str, Any]
    batch: int
    columns: int
    share: int
    own_columns: int
    shared_bytes: int


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan:
    """ValueError says what the kernel cannot serve."""
    batch, width = call.tensors.x.shape
    t = tiling or Tiling()
    macros = common_macros(call, t.rows, t.threads, t.unroll, t.mix_bytes)
    macros["CLUSTER"] = t.cluster
    n, m = macros["N"], call.tensors.phi.shape[1]
    vector = macros["X_VECTOR"]
    own_columns = -(-(width // n) // (vector * t.cluster)) * vector
    floats = t.rows * ((t.threads // 32 + t.cluster + 1) * (m + 1) + n * n + n) + m
    return Plan(macros, batch, width // n, -(-width // t.cluster), own_columns, 16 + 4 * floats)


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Compile and plan once; the result allocates and launches."""
    plan = plan_for(call, tiling)
    m, p = plan.macros, call.params
    phi, x, b = call.tensors.phi, call.tensors.x, call.tensors.b
    kernel = cuda.load(source("mhc_pre_cluster"), "mhc_pre_cluster", call.device, m)
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
