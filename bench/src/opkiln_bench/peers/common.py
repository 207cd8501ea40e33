"""What the peers share: registration of an installed library, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import Implementation, Launch, Prepare, Refusal, inference_only
from opkiln.spec import Call

HALF = (torch.float16, torch.bfloat16)
Supports = Callable[[Call], Refusal | None]


def peer(
    backend: str, distribution: str, table: Mapping[str, tuple[Supports, Callable[[], Prepare]]]
) -> list[Implementation]:
    """The implementations of a library: op -> (supports, loader). None if it is not installed."""
    try:
        installed = version(distribution)
    except PackageNotFoundError:
        return []
    return [
        Implementation(
            op=op,
            backend=backend,
            version=installed,
            spec_version=CATALOGUE[op].version,
            supports=supports,
            loader=loader,
            auto=False,
        )
        for op, (supports, loader) in table.items()
        if op in CATALOGUE
    ]


def on_gpu(call: Call) -> Refusal | None:
    """Contiguous CUDA tensors, forward only."""
    if call.device.type != "cuda":
        return Refusal("needs a CUDA GPU")
    if not all(t is None or t.is_contiguous for t in vars(call.tensors).values()):
        return Refusal("takes contiguous tensors")
    return inference_only(call)


def even_padding(call: Call) -> Refusal | None:
    """For convolutions: batched, padded alike on both sides of each dim, on a GPU."""
    padding, ndim = call.params.padding, len(call.params.stride)
    if list(padding[::2]) != list(padding[1::2]):
        return Refusal("takes padding that is equal before and after")
    if len(call.tensors.input.shape) != ndim + 2:
        return Refusal("takes batched input")
    return on_gpu(call)


def rows_only(*needed: str, dtypes: tuple[torch.dtype, ...] = ()) -> Supports:
    """For row norms: contiguous CUDA tensors, one normalized dim, these tensors present."""

    def supports(call: Call) -> Refusal | None:
        tensors = vars(call.tensors)
        if call.device.type != "cuda":
            return on_gpu(call)
        if len(call.params.normalized_shape) != 1:
            return Refusal("takes one normalized dim")
        for name in needed:
            if tensors[name] is None:
                return Refusal(f"needs {name}")
        if dtypes and next(iter(tensors.values())).dtype not in dtypes:
            return Refusal("takes " + " and ".join(str(d).removeprefix("torch.") for d in dtypes))
        return on_gpu(call)

    return supports


def all_gradients(call: Call) -> Refusal | None:
    """For the backward of row norms: the same, with a weight and every gradient wanted."""
    if not all(call.params.output_mask):
        return Refusal("takes calls that want all gradients")
    return rows_only("weight", dtypes=HALF)(call)


def rms_of_rows(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) of each row, in float32: what a forward keeps for its backward."""
    return torch.rsqrt(x.float().square().mean(-1) + eps)


def over_gradient(inplace: Callable[..., Any]) -> Launch:
    """A backward that writes over its first tensor, on a copy made once; see `on_copies`."""
    copies: list[torch.Tensor] = []

    def launch(grad: torch.Tensor, *others: torch.Tensor | None) -> Any:
        if not copies:
            copies.append(grad.clone())
        return inplace(copies[0], *others)

    return launch


def as_rows(call: Call) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The input's shape, and its shape as [rows, normalized]."""
    x = next(iter(vars(call.tensors).values()))
    n = call.params.normalized_shape[-1]
    return x.shape, (x.numel // n, n)


class Once:
    """Converts a tensor once: a weight that a peer wants in float32 is kept so by its users."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.seen: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None or t.dtype == self.dtype:
            return t
        if self.seen is None or self.seen[0] is not t:
            self.seen = t, t.to(self.dtype)
        return self.seen[1]


def on_copies(inplace: Callable[..., Any]) -> Launch:
    """An in-place fused add, on copies made once: the spec's inputs must not be written.

    The first call, whose result is checked, sees fresh copies; later ones go on from its results,
    which cost the same.
    """
    copies: list[torch.Tensor] = []

    def launch(x: torch.Tensor, residual: torch.Tensor, *others: torch.Tensor | None) -> Any:
        if not copies:
            copies.extend((x.clone(), residual.clone()))
        inplace(*copies, *others)
        return copies[0], copies[1]

    return launch
