"""Which modules opkiln can serve, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from opkiln import nn
from opkiln.nn.served import Served
from opkiln.replacing.rms import Probes
from opkiln.replacing.served import ServedModule, Way

NAMES = tuple(name for name in nn.__all__ if hasattr(torch.nn, name))
# What torch's forwards call on the module: a subclass with its own computes something else.
METHODS = ("forward", "_conv_forward", "_check_input_dim", "_get_no_batch_dim")


@dataclass(frozen=True)
class TorchWay:
    """A module of torch.nn, as the class of that name in opkiln.nn computes it."""

    name: str

    @property
    def ours(self) -> Any:
        return getattr(nn, self.name)

    @property
    def op(self) -> str:
        return str(self.ours.op)

    @property
    def argument(self) -> str:
        return "x" if self.name == "RMSNorm" else "input"

    def takes(self, module: Any, x: torch.Tensor) -> bool:
        return True

    def serve(self, module: Any, x: torch.Tensor) -> Any:
        return self.ours.serve(module, x)


def way_of(module: torch.nn.Module, probes: Probes) -> Way | str | None:
    """How opkiln serves a module; why it does not, in a line; None for what is no op of ours."""
    if isinstance(module, (Served, ServedModule)):
        return "is opkiln's already"
    name = next((n for n in NAMES if isinstance(module, getattr(torch.nn, n))), None)
    if name is None and not probes.is_candidate(module):
        return None
    reason = obstacle(module)
    if reason is not None:
        return reason
    if name is None:
        return probes.way_of(module)
    base, own = getattr(torch.nn, name), type(module)
    changed = [m for m in METHODS if getattr(own, m, None) is not getattr(base, m, None)]
    return f"{own.__name__} has its own {', '.join(changed)}" if changed else TorchWay(name)


def obstacle(module: torch.nn.Module) -> str | None:
    """What keeps any module from getting another class."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by TorchScript"
    if "forward" in vars(module):
        return "has a forward of its own, set on the module"
    if parametrize.is_parametrized(module):
        return "is parametrized"
    if any(is_lazy(p) for p in module.parameters(recurse=False)):
        return "has parameters without a shape yet"
    return None
