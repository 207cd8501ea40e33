"""The class of a module that opkiln serves, made from the module's own class.

Only `__class__` of the module changes: the object, its parameters, buffers, hooks and flags stay.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch

from opkiln.api import representable
from opkiln.errors import ArgumentError
from opkiln.override import is_ours


class Way(Protocol):
    """How a module is computed by opkiln: hashable, and can be pickled.

    op: python name of the op. argument: name of the forward's input.
    takes(module, x): whether the call's result would be that of the module's own forward.
    """

    @property
    def op(self) -> str: ...
    @property
    def argument(self) -> str: ...
    def __hash__(self) -> int: ...
    def takes(self, module: torch.nn.Module, x: torch.Tensor) -> bool: ...
    def serve(self, module: torch.nn.Module, x: torch.Tensor) -> Any: ...


class ServedModule:
    """First base of the class of a replaced module, whose second base is the module's own class.

    What opkiln does not have (another device, a tensor subclass, more arguments) goes to the
    module's own forward, as under opkiln.override_torch.
    """

    way: ClassVar[Way]
    own: ClassVar[type]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        x = self.input_of(args, kwargs)
        if x is not None and is_served(self.way, module, x):
            try:
                return self.way.serve(module, x)
            except (ArgumentError, TypeError):
                if representable(partial(self.way.serve, module, x)):  # no matter of the arguments
                    raise
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def input_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The input where it is the only argument."""
        x = None
        if len(args) == 1 and not kwargs:
            x = args[0]
        elif not args and len(kwargs) == 1:
            x = kwargs.get(self.way.argument)
        return x if isinstance(x, torch.Tensor) else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is served too. The class has no name to be found by: it is made again."""
        reduced = super().__reduce_ex__(protocol)
        if isinstance(reduced, str) or reduced[1][:1] != (type(self),):
            return reduced  # the module has a reduction of its own
        return (revive, (self.own, self.way), *reduced[2:])


def is_served(way: Way, module: Any, x: torch.Tensor) -> bool:
    """Whether opkiln has the call: every tensor of a kind and on a device that it computes with."""
    return is_ours(x) and all(is_ours(t) for t in tensors_of(module)) and way.takes(module, x)


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor | None]:
    yield from module._parameters.values()
    yield from module._buffers.values()


@cache
def served_class(own: type, way: Way) -> type:
    """The class, under the name of the module's own: reprs and rules by name stay as they are."""
    namespace = {"way": way, "own": own, "__module__": own.__module__, "__doc__": own.__doc__}
    made = types.new_class(
        own.__name__, (ServedModule, own), exec_body=lambda ns: ns.update(namespace)
    )
    made.__qualname__ = own.__qualname__
    return made


def revive(own: type, way: Way) -> Any:
    """A module without its state, for copy and pickle."""
    cls: Any = served_class(own, way)
    return cls.__new__(cls)
