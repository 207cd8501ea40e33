"""The torch operator of a spec: its schema, its handle, its arguments and its returns.

`torch.ops.opkiln.<name>(tensors..., params..., *, save, policy)` returns every output of the spec,
saved ones last; an output that a call does not have is an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from opkiln.spec import Call, OpSpec

NAMESPACE = "opkiln"
SCHEMA_KINDS = {"int": "SymInt", "int?": "SymInt?", "int[]": "SymInt[]"}


def schema(spec: OpSpec) -> str:
    """The operator's schema; a tensor that some call writes is marked so."""
    args = []
    for i, t in enumerate(spec.tensors):
        alias = f"({chr(ord('a') + i)}!)" if t.name in spec.may_mutate else ""
        args.append(f"Tensor{alias}{'?' if t.optional else ''} {t.name}")
    args += [f"{SCHEMA_KINDS.get(p.kind, p.kind)} {p.name}" for p in spec.params]
    out = ", ".join(["Tensor"] * len(spec.outputs))
    returns = out if len(spec.outputs) == 1 else f"({out})"
    return f"{spec.name}({', '.join(args)}, *, bool save=False, str policy='') -> {returns}"


def operator(spec: OpSpec) -> Any:
    """The torch operator of a spec."""
    return getattr(getattr(torch.ops, NAMESPACE), spec.name).default


def split(spec: OpSpec, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operator arguments -> tensors, canonical parameters."""
    n = len(spec.tensors)
    params = {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in zip(spec.param_names, args[n:], strict=True)
    }
    return args[:n], params


def pack(call: Call, outs: Any) -> Any:
    """A launch's outputs -> the operator's returns, with empty tensors where the call has none."""
    if not call.present:
        return None
    given = iter(outs if isinstance(outs, tuple) else (outs,))
    full = tuple(
        next(given) if here else torch.empty(0, device=call.device) for here in call.present
    )
    return full[0] if len(full) == 1 else full
