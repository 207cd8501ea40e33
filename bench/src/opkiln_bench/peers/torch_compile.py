"""torch-compile: torch's natural composition of an op, compiled by Inductor for one row.

A fresh function a row; the sweep resets dynamo's caches between rows. `dynamic=False`, and a
recompilation past the limit is an error rather than a silent fall back to eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import Implementation, inference_only
from opkiln.spec import Call

from opkiln_bench.peers.compositions import composition

BACKEND = "torch-compile"


def implementations() -> list[Implementation]:
    return [
        Implementation(
            op=spec.name,
            backend=BACKEND,
            version=torch.__version__,
            spec_version=spec.version,
            supports=inference_only,
            loader=load,
            auto=False,
        )
        for spec in CATALOGUE.values()
    ]


def load() -> Callable[[Call], Callable[..., Any]]:
    import torch._dynamo

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return prepare


def prepare(call: Call) -> Callable[..., Any]:
    compute, present = composition(call), call.present

    def natural(*tensors: torch.Tensor | None) -> Any:
        outs = compute(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        kept = tuple(o for o, here in zip(outs, present, strict=False) if here)
        return kept[0] if len(kept) == 1 else kept

    return torch.compile(natural, dynamic=False)
