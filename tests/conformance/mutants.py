"""Planted mistakes, each an in-process plugin for one op, that the conformance kit has to catch.

A mutant is the reference with one thing wrong: in its result (`corrupt`), its formula (`formula`)
or its manners (`prepare`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import opkiln
import torch
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY, Implementation, Launch, accepts_everything, inference_only
from opkiln.spec import Call
from opkiln.torch_backend import fit

Tensor = torch.Tensor
BACKEND = "mutant"
VALUE = "times the tolerance"
EXACT = "elements wrong"


@dataclass(frozen=True)
class Mutant:
    """says: what the kit's message has to contain."""

    name: str
    op: str
    prepare: Callable[[Call], Launch] = field(repr=False)
    says: str = VALUE
    supports: Callable[[Call], Any] = field(default=accepts_everything, repr=False)
    traits: frozenset[str] = frozenset()

    @opkiln.hookimpl
    def opkiln_implementations(self) -> list[Implementation]:
        version = CATALOGUE[self.op].version
        return [
            Implementation(
                self.op,
                BACKEND,
                "0",
                version,
                self.supports,
                lambda: self.prepare,
                auto=False,
                traits=self.traits,
            )
        ]

    @property
    def OPKILN_API(self) -> int:
        return 1


MUTANTS: list[Mutant] = []


def sound(call: Call) -> Launch:
    """The reference, right in everything."""
    return REGISTRY.of(call.spec.name)["torch-ref"].loader()(call)


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def wrong_call(name: str, op: str, says: str, traits: frozenset[str] = frozenset()) -> Any:
    """Register `prepare(call) -> launch`."""

    def add(prepare: Callable[[Call], Launch]) -> Callable[[Call], Launch]:
        MUTANTS.append(Mutant(name, op, prepare, says, traits=traits))
        return prepare

    return add


def wrong_result(name: str, op: str, says: str = VALUE) -> Any:
    """Register `corrupt(call, tensors, outs) -> outs`, applied to the reference's outputs."""

    def add(corrupt: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(call: Call) -> Launch:
            right = sound(call)
            return lambda *tensors: corrupt(call, tensors, as_tuple(right(*tensors)))

        MUTANTS.append(Mutant(name, op, prepare, says))
        return corrupt

    return add


def wrong_formula(name: str, op: str, says: str = VALUE) -> Any:
    """Register `formula(*tensors, **params)` for the caller's outputs, cast and laid out."""

    def add(formula: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(call: Call) -> Launch:
            def launch(*tensors: Any) -> Any:
                outs = as_tuple(formula(*tensors, **vars(call.params)))
                return tuple(fit(o, m, tensors) for o, m in zip(outs, call.outputs, strict=True))

            return launch

        MUTANTS.append(Mutant(name, op, prepare, says, inference_only))
        return formula

    return add


def as_if_contiguous(x: Tensor) -> Tensor:
    """What a kernel reads that ignores strides."""
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    flat = x.as_strided((min(room, x.numel()),), (1,), x.storage_offset())
    return torch.nn.functional.pad(flat, (0, x.numel() - flat.numel())).view(x.shape)
