"""Pool backwards run against the spec's reference in float64: what their tests share."""

from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool.backward_plan import BackwardPlan, BackwardTiling, plan_for
from opkiln_pool.plugin import supports_backward
from opkiln_pool.pool_backward import prepare
from pool.test_pool_interpreter import RTOL


def forward(op: str, x: torch.Tensor, params: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The pool's output, and for maxima the saved offset."""
    found = CATALOGUE[op].reference(x.double().cpu(), **params)
    found = found if isinstance(found, tuple) else (found,)
    kept = (found[0], found[-1]) if "max" in op else found[:1]
    return tuple(t.to(x.device) for t in kept)


def call_of(op: str, tensors: list[torch.Tensor], shape: Any, params: dict, mask=True) -> Call:
    rest = {"input_shape": tuple(shape), "output_mask": [mask]}
    return Call.of(CATALOGUE[f"{op}_backward"], tensors, params | rest)


def run(op: str, x: torch.Tensor, params: dict[str, Any], tiling: BackwardTiling | None = None,
        grad: Any = None) -> BackwardPlan:  # fmt: skip
    """Launch on the pool of x, compare with float64, return the plan that ran.

    grad: makes the gradient from the output; None: random, laid out as the output is.
    """
    out, *saved = forward(op, x, params)
    g = grad(out) if grad else torch.randn_like(out).to(x.dtype)
    tensors = [g, *saved]
    call = call_of(op, tensors, x.shape, params)
    assert supports_backward(call) is None
    got = prepare(call, tiling)(*tensors)
    wide = [g.double().cpu(), *[t.cpu() for t in saved]]
    (want,) = call.spec.reference(*wide, **vars(call.params))
    (meta,) = call.outputs
    assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
    torch.testing.assert_close(
        got.double().cpu(), want, rtol=RTOL[got.dtype], atol=2**-20, equal_nan=True
    )
    return plan_for(call, tiling)
