"""What the row norm tests share: random operands, and a launch held against float64."""

import dataclasses
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import row_plan
from opkiln_norm.plugin import supports_row_norm
from opkiln_norm.row_norm import prepare
from opkiln_norm.row_plan import RowPlan, Tiling, plan_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# The interpreter truncates f32 to bf16 (one ulp) where the GPU rounds (half an ulp).
RTOL = {F16: 2**-11, BF16: 2**-7 if DEVICE == "cpu" else 2**-8, F32: 2**-21}


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def only_tiling(monkeypatch: Any, op: str, itemsize: int, n: int, tiling: Tiling) -> None:
    """Make `tiling` the only row of the tuning table, for any number of rows."""
    use = dataclasses.asdict(tiling)
    row = {"op": op, "itemsize": itemsize, "n": n, "rows": [1, None], "label": "test"}
    monkeypatch.setattr(row_plan, "tuning_rows", lambda: ({**row, "use": use},))


def run(
    op: str,
    tensors: list[torch.Tensor | None],
    params: dict[str, Any],
    *,
    needs_grad: bool = True,
    atol: float = 2**-20,
    rstd_rtol: float = 2**-20,
) -> RowPlan:
    """Launch, compare outputs and saved statistics with float64, return the plan that ran.

    In place the outputs are the input and the residual; other tensors stay as they were.
    """
    spec = CATALOGUE[op]
    forward = CATALOGUE[spec.forward_op or op]
    call = Call.of(spec, tensors, params, needs_grad=needs_grad and spec is forward)
    assert supports_row_norm(call) is None
    before = [None if t is None else t.clone() for t in tensors]
    expected = forward.reference(*(None if t is None else t.double() for t in tensors), **params)
    results = prepare(call)(*tensors)
    if spec is forward:
        results = results if isinstance(results, tuple) else (results,)
        layouts = [(m.shape, m.dtype, m.stride) for m in call.outputs]
        assert [(r.shape, r.dtype, r.stride()) for r in results] == layouts
        count = len(expected) if needs_grad else len(spec.returns)
    else:
        assert results == ()
        results = tuple(tensors[:2])
        count = 2
    assert len(results) == count
    for i, (got, want) in enumerate(zip(results, expected, strict=False)):
        rtol = RTOL[got.dtype] if i < len(forward.returns) else rstd_rtol
        torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)
    for t, copy, name in zip(tensors, before, spec.tensor_names, strict=True):
        assert t is None or name in spec.mutates(call) or torch.equal(t, copy)
    return plan_for(call)
