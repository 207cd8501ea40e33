"""What serving a module is worth: measured times of the calls that it makes on example inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from opkiln import measured
from opkiln.api import captured
from opkiln.dispatch import ranked
from opkiln.errors import ArgumentError
from opkiln.replacing.served import Way, is_served
from opkiln.spec import Call

TORCH = "torch"


@dataclass(frozen=True)
class Gain:
    """Device time of a module's forward calls by torch and by the backend that is chosen, in us."""

    torch_us: float
    chosen_us: float
    source: str

    def __str__(self) -> str:
        return f"{self.torch_us:.4g} -> {self.chosen_us:.4g} us"


def gain_of(calls: Sequence[Call]) -> Gain | str:
    """Of all calls together; a word on why it is not known."""
    torch_us = chosen_us = 0.0
    sources: dict[str, None] = {}
    for call in calls:
        if measured.arch_of(call.device) is None:
            return f"unknown: no times were measured on {call.device.type}"
        entry = measured.entry_of(call)
        chosen = ranked(call)[0][0].backend
        if entry is None or not {TORCH, chosen} <= set(entry.us):
            return "unknown: no such call was measured"
        torch_us += entry.us[TORCH]
        chosen_us += entry.us[chosen]
        sources[entry.source] = None
    return Gain(torch_us, chosen_us, "; ".join(sources))


Calls = dict[torch.nn.Module, list[Call]]


def calls_of(model: torch.nn.Module, ways: Mapping[torch.nn.Module, Way], example: Any) -> Calls:
    """The calls that opkiln would serve as the model runs on `example`.

    The model runs once as it is, without gradients, on copies of its buffers and of the state of
    the random generators: its running statistics and your next random number stay as they were.
    """
    found: Calls = {module: [] for module in ways}
    args, kwargs = arguments(example)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    grad = torch.is_grad_enabled()
    with watching(ways, found, grad), torch.no_grad(), torch.random.fork_rng(gpus_of(model)):
        torch.func.functional_call(model, buffers, args, kwargs)
    return found


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tuple is positions, a mapping is keywords, anything else is the one argument."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def gpus_of(model: torch.nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


@contextmanager
def watching(ways: Mapping[torch.nn.Module, Way], found: Calls, grad: bool) -> Iterator[None]:
    """Note the call of each module inside the block. grad: as the caller has gradients on."""

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        way = ways[module]
        given = args or (kwargs.get(way.argument),)
        x = given[0]
        if len(args) + len(kwargs) == 1 and isinstance(x, torch.Tensor):
            with torch.set_grad_enabled(grad):
                call = call_of(way, module, x)
            found[module] += [] if call is None else [call]

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in ways]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def call_of(way: Way, module: torch.nn.Module, x: torch.Tensor) -> Call | None:
    if not is_served(way, module, x):
        return None
    try:
        return captured(partial(way.serve, module, x))
    except (ArgumentError, TypeError):  # stays with the module's own forward
        return None
