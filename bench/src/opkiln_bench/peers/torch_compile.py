"""torch-compile: torch's natural composition of an op, compiled by Inductor for one row.

A fresh function a row; the sweep resets dynamo's caches between rows. `dynamic=False`, and a
recompilation past the limit is an error rather than a silent fall back to eager. Outputs are cast
to the op's dtypes inside, as the backend `torch` casts them: some compositions end in float32.
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
    dtypes = [meta.dtype for meta in call.outputs]

    def natural(*tensors: torch.Tensor | None) -> Any:
        outs = compute(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        kept = [o for o, here in zip(outs, present, strict=False) if here]
        cast = tuple(o.to(dtype) for o, dtype in zip(kept, dtypes, strict=True))
        return cast[0] if len(cast) == 1 else cast

    return torch.compile(natural, dynamic=False)
