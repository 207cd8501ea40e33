"""`with opkiln.override_torch(): model(x)`: torch's own functional calls, served by ours.

A TorchFunctionMode: it holds for this thread, nests, and ends with the block, also by an exception.
Torch switches it off while it serves a call, so ours never meet it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from opkiln import functional
from opkiln.api import representable
from opkiln.errors import ArgumentError
from opkiln.road import PLAIN

SAME_NAME = (
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"),
    *("conv1d", "conv2d", "conv3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool2d", "adaptive_max_pool2d"),
)
WITH_INDICES = ("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d")
DEVICES = ("cpu", "cuda")
KINDS = (*PLAIN, FakeTensor)  # fake ones: torch.export

# torch's function: ours, and the arguments that torch's name stands for
SERVED: dict[Any, tuple[Callable[..., Any], dict[str, Any]]] = {
    torch.fft.fft: (functional.fft, {}),
    **{getattr(torch.nn.functional, n): (getattr(functional, n), {}) for n in SAME_NAME},
    **{
        getattr(torch.nn.functional, f"{n}_with_indices"): (
            getattr(functional, n),
            {"return_indices": True},
        )
        for n in WITH_INDICES
    },
}


class Override(TorchFunctionMode):
    """The mode. served, left: how many calls of each op ours computed, and how many torch did
    because opkiln does not have them: another dtype or device, a tensor subclass, an argument.
    """

    def __init__(self, backend: str | None = None) -> None:
        super().__init__()
        self.backend = backend
        self.served: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in SERVED:
            return func(*args, **kwargs)
        ours, implied = SERVED[func]
        name = ours.__name__
        if all(is_ours(value) for value in (*args, *kwargs.values())):
            given = {**kwargs, **implied}
            try:
                out = ours(*args, **given, backend=self.backend)
            except (ArgumentError, TypeError):
                if representable(
                    partial(ours, *args, **given)
                ):  # then it is no matter of the arguments
                    raise
            else:
                self.served[name] += 1
                return out
        self.left[name] += 1
        return func(*args, **kwargs)


def override_torch(backend: str | None = None) -> Override:
    """A context in which torch's functional calls of this thread go to opkiln.functional.

    backend: as there: strict. What opkiln does not take (another device, a subclass, an argument)
    stays torch's. The value of `with` counts both: `served` and `left`, by op.
    """
    return Override(backend)


def is_ours(value: Any) -> bool:
    """No tensor, or one of a kind that opkiln computes with."""
    return not isinstance(value, torch.Tensor) or (
        type(value) in KINDS and value.device.type in DEVICES
    )
