"""The call of a backward op that a training step makes: upstream gradients, what the forward saved.

The forward's reference runs once, in the tensors' own dtypes (it sums in float32): its saved
tensors and outputs are what any forward would hand over. Checks compare with the backward's
reference on these same tensors, so how they were rounded cancels.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from opkiln.spec import Call, OpSpec

Tensors = list[torch.Tensor | None]


def gradient_call(
    spec: OpSpec, tensors: Sequence[torch.Tensor | None], params: dict[str, Any], seed: str
) -> tuple[OpSpec, Tensors, dict[str, Any]]:
    """Spec, tensors and parameters of the backward of this call of `spec`.

    Every tensor that has a gradient and is present wants it. seed: the same text gives the same
    upstream gradients.
    """
    back = spec.backward
    if back is None:
        raise ValueError(f"{spec.name} has no backward")
    call = Call.of(spec, tensors, params, needs_grad=True)
    generator = torch.Generator(call.device).manual_seed(zlib.crc32(seed.encode()))
    known = dict(zip(spec.tensor_names, tensors, strict=True))
    shapes = {f"{n}_shape": tuple(t.shape) for n, t in known.items() if t is not None}
    mask = [known[name] is not None for name in back.wrt]
    upstream: Tensors = []
    saved: Tensors = []
    for output, value in zip(spec.outputs, outputs_of(call, tensors, params), strict=True):
        if output.saved:
            saved.append(value)
        elif output.differentiable:
            upstream.append(random_like(value, generator))
        known[output.name] = value
    values = shapes | params | {"output_mask": mask}
    given = [*upstream, *(known[name] for name in back.needs), *saved]
    return back.spec, given, {name: values[name] for name in back.spec.param_names}


def outputs_of(
    call: Call, tensors: Sequence[torch.Tensor | None], params: dict[str, Any]
) -> list[torch.Tensor]:
    """Every output in the spec's order and dtypes; an empty tensor for one that is absent, as the
    operator hands it over.
    """
    written = call.spec.mutates(call)
    pairs = zip(call.spec.tensor_names, tensors, strict=True)
    own = [t.clone() if n in written and t is not None else t for n, t in pairs]
    with torch.no_grad():
        outs = call.spec.reference(*own, **params)
    outs = outs if isinstance(outs, tuple) else (outs,)
    metas = iter(call.outputs)
    found = []
    for i, here in enumerate(call.present):
        if here:
            found.append(outs[i].to(next(metas).dtype))
        else:
            found.append(torch.empty(0, device=call.device))
    return found


def random_like(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(t.shape, dtype=t.dtype, device=t.device, generator=generator)
