"""The backends that come with core: `torch` (torch's own fast call) and `torch-ref` (the meaning).

Both take every call on every device. Torch's results are brought to the spec's dtype and strides,
and never alias an input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from opkiln.hookspecs import hookimpl
from opkiln.ops import CATALOGUE
from opkiln.registry import Implementation, Launch, Prepare, accepts_everything
from opkiln.spec import Call, OpSpec, TensorMeta

OPKILN_API = 1
TRAITS = frozenset({"deterministic"})


@hookimpl
def opkiln_implementations() -> list[Implementation]:
    rows = []
    for spec in CATALOGUE.values():
        for backend, choose, auto in (
            ("torch", native_of, True),
            ("torch-ref", reference_of, False),
        ):
            rows.append(
                Implementation(
                    op=spec.name,
                    backend=backend,
                    version=torch.__version__,
                    spec_version=spec.version,
                    supports=accepts_everything,
                    loader=partial(_loader, choose),
                    priority=0 if auto else -1,
                    auto=auto,
                    traits=TRAITS,
                )
            )
    return rows


def native_of(call: Call) -> Callable[..., Any]:
    """Torch's fastest function for the call; the reference where torch has none."""
    spec = call.spec
    saves = call.needs_grad and any(o.saved for o in spec.outputs)
    return (spec.native_train if saves else spec.native) or spec.reference


def reference_of(call: Call) -> Callable[..., Any]:
    return call.spec.reference


def _loader(choose: Callable[[Call], Callable[..., Any]]) -> Prepare:
    return lambda call: _launch(choose(call), call)


def _launch(fn: Callable[..., Any], call: Call) -> Launch:
    params, metas, present = vars(call.params), call.outputs, call.present

    def launch(*tensors: torch.Tensor | None) -> Any:
        outs = fn(*tensors, **params)
        outs = outs if isinstance(outs, tuple) else (outs,)
        kept = [o for o, here in zip(outs, present, strict=False) if here]
        fitted = tuple(fit(o, m, tensors) for o, m in zip(kept, metas, strict=True))
        return fitted[0] if len(fitted) == 1 else fitted

    return launch


def fit(out: torch.Tensor, meta: TensorMeta, inputs: tuple[Any, ...]) -> torch.Tensor:
    """`out` with exactly the dtype and strides of `meta`, in memory of its own."""
    if tuple(out.shape) != meta.shape:
        raise AssertionError(f"torch returned shape {list(out.shape)}, spec says {meta.shape}")
    aliased = out.numel() > 0 and any(
        i is not None and out.untyped_storage().data_ptr() == i.untyped_storage().data_ptr()
        for i in inputs
    )
    if out.dtype == meta.dtype and out.stride() == meta.stride and not aliased:
        return out.resolve_conj().resolve_neg()
    return meta.empty().copy_(out)


def torch_formula(spec: OpSpec, tensors: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """The differentiable torch formula of an op: under vmap, jvp and double backward.

    Returns the caller's outputs in the spec's dtypes; mutated inputs are written as by the op.
    """
    outs = spec.reference(*tensors, **params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    outs = tuple(o for o in outs[: len(spec.returns)] if o is not None)
    return outs[0] if len(outs) == 1 else outs
