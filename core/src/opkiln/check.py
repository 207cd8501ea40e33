"""Is a call one that its spec allows? One line says what was passed and what is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from opkiln.errors import ArgumentError
from opkiln.meta import Shape, TensorMeta, dtype_name

if TYPE_CHECKING:
    from opkiln.spec import Call, TensorSpec


def check_call(call: Call) -> None:
    """Dtypes, devices and named dims of every tensor, then the op's own rules."""
    spec = call.spec
    env: dict[str, Any] = {}
    for p in spec.params:
        value = getattr(call.params, p.name)
        env[p.name] = tuple(value) if isinstance(value, list | tuple) else value
    lead: torch.dtype | None = None
    for t in spec.tensors:
        meta: TensorMeta | None = getattr(call.tensors, t.name)
        if meta is None:
            continue
        allowed = t.dtypes or (lead,)
        if meta.dtype not in allowed:
            names = ", ".join(dtype_name(d) for d in allowed if d is not None)
            raise ArgumentError(
                f"{spec.name}: {t.name} has dtype {dtype_name(meta.dtype)}, allowed: {names}"
            )
        lead = lead or meta.dtype
        if meta.device != call.device:
            raise ArgumentError(
                f"{spec.name}: {t.name} is on {meta.device}, the other tensors on {call.device}"
            )
        match_dims(spec.name, t, meta.shape, env)
    if spec.check is not None:
        spec.check(call)


def match_dims(op: str, t: TensorSpec, shape: Shape, env: dict[str, Any]) -> None:
    """Match a shape against its dims pattern; names already in `env` must agree, new ones bind."""
    tokens = t.dims.split()
    sizes = [len(env[k[1:]]) if k[0] == "*" and k[1:] in env else 1 for k in tokens]
    free = [i for i, k in enumerate(tokens) if k[0] == "*" and k[1:] not in env]
    for i in free:
        sizes[i] = max(len(shape) - sum(s for j, s in enumerate(sizes) if j != i), 0)
    expected: list[Any] = []
    start = 0
    for token, count in zip(tokens, sizes, strict=True):
        part = shape[start : start + count]
        start += count
        if token[0] == "*":
            expected.extend(env.setdefault(token[1:], part))
        elif part:
            expected.append(int(token) if token.isdigit() else env.setdefault(token, part[0]))
        else:
            expected.append(token)
    if len(shape) != len(expected) or any(a != b for a, b in zip(shape, expected, strict=True)):
        pattern = f"[{t.dims.replace(' ', ', ')}]"
        unknown = any(isinstance(size, str) for size in expected)
        values = "" if unknown else f" = {list(expected)}"
        raise ArgumentError(f"{op}: {t.name} has shape {list(shape)}, expected {pattern}{values}")
