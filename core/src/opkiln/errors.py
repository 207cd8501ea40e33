"""What opkiln raises. Every message is one line: what was passed, what is allowed."""


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
