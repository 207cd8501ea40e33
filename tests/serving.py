"""What tests of models share: which ops opkiln computes inside a block, so that none passes on
another's results; a model of many kinds of modules; what a compiler gets of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from opkiln.watch import observed


class Calls(Counter):
    """Ops that opkiln computed inside the block."""

    def __enter__(self) -> Calls:
        self.watching = observed(lambda call, tensors: self.update([call.spec.name]))
        self.watching.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.watching.__exit__(*error)


def small_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(2),
        torch.nn.LayerNorm(36),
        torch.nn.RMSNorm(36),
    )


def compiled_by_a_spy(model: torch.nn.Module) -> tuple[Callable[..., Any], list[str]]:
    """The model in one graph for all sizes, and the code of each graph that was made."""
    graphs: list[str] = []

    def backend(graph, inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=True), graphs
