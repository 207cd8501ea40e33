"""torch-compile: torch's natural composition of an op, compiled by Inductor for one row.

A fresh function a row; the sweep resets dynamo's caches between rows. `dynamic=False`, and a
recompilation past the limit is an error rather than a silent fall back to eager. Outputs are cast
to the op's dtypes inside, as the backend `torch` casts them: some compositions end in float32.

torch-max-autotune: the same for convolutions, where Inductor has templates to choose from: it times
cuDNN's kernel and Triton's tilings. That takes seconds a row, so it has a sweep of its own
(`backend=autotune`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import Implementation, inference_only
from opkiln.spec import Call

from opkiln_bench.peers.compositions import composition

BACKEND = "torch-compile"
AUTOTUNE = "torch-max-autotune"
WITH_TEMPLATES = ("conv1d", "conv2d", "conv3d")
MODE = "max-autotune-no-cudagraphs"  # a graph's replay is another launch path, not another kernel


def implementations() -> list[Implementation]:
    plain = [(op, BACKEND, load) for op in CATALOGUE]
    tuned = [(op, AUTOTUNE, load_autotune) for op in WITH_TEMPLATES]
    return [
        Implementation(
            op=op,
            backend=backend,
            version=torch.__version__,
            spec_version=CATALOGUE[op].version,
            supports=inference_only,
            loader=loader,
            auto=False,
        )
        for op, backend, loader in (*plain, *tuned)
    ]


def load() -> Callable[[Call], Callable[..., Any]]:
    import torch._dynamo

    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return prepare


def load_autotune() -> Callable[[Call], Callable[..., Any]]:
    return partial(load(), mode=MODE)


def prepare(call: Call, mode: str | None = None) -> Callable[..., Any]:
    compute, present = composition(call), call.present
    dtypes = [meta.dtype for meta in call.outputs]

    def natural(*tensors: torch.Tensor | None) -> Any:
        outs = compute(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        kept = [o for o, here in zip(outs, present, strict=False) if here]
        cast = tuple(o.to(dtype) for o, dtype in zip(kept, dtypes, strict=True))
        return cast[0] if len(cast) == 1 else cast

    return torch.compile(natural, dynamic=False, mode=mode)
