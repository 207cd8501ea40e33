"""What opkiln raises. Every message is one line: what was passed, what is allowed."""

import difflib
from collections.abc import Iterable


class ArgumentError(ValueError, RuntimeError):
    """A bad argument.

    Both bases on purpose: torch raises RuntimeError for shapes and dtypes (ATen) and ValueError
    for options (torch.nn.functional), so code written against either keeps working.
    """


class DimError(ArgumentError, IndexError):
    """A dim that the tensor does not have; torch raises IndexError for it."""


class BackendError(ValueError, RuntimeError):
    """A backend was named strictly and cannot serve the call; the message says why."""


class PluginError(RuntimeError):
    """A plugin is broken, outdated, or claims what another one already provides."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; the nearest are a, b`, or all that is known."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"; the nearest are {', '.join(near)}" if near[1:] else f"; the nearest is {near[0]}"
    return f"; known are {', '.join(known)}"
