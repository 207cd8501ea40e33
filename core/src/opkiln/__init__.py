"""opkiln: 36 GPU ops for PyTorch in independently installable families.

`opkiln.functional` has the ops; `opkiln.use` and `backend=` choose who computes them;
`opkiln.explain` says who does and why, `opkiln.card` what a backend was shown to do. `opkiln.nn`
has them as modules; `opkiln.replace` serves a model's modules with them, `opkiln.override_torch`
torch's own calls. `opkiln.capture` records a step's calls for `opkiln tune`.
"""

import importlib
from typing import Any

from opkiln import functional, torch_library
from opkiln.api import backends, explain, ops
from opkiln.errors import ArgumentError, BackendError, PluginError
from opkiln.hookspecs import hookimpl
from opkiln.policy import Policy, use
from opkiln.registry import Implementation, Refusal, inference_only, simple

__version__ = "0.1.0"

LAZY = {
    "capture": ("opkiln.step", "capture"),
    "card": ("opkiln.cards", "card"),
    "nn": ("opkiln.nn", None),
    "override_torch": ("opkiln.override", "override_torch"),
    "replace": ("opkiln.replacing", "replace"),
}

__all__ = [
    "ArgumentError",
    "BackendError",
    "Implementation",
    "PluginError",
    "Policy",
    "Refusal",
    "backends",
    "capture",
    "card",
    "explain",
    "functional",
    "hookimpl",
    "inference_only",
    "nn",
    "ops",
    "override_torch",
    "replace",
    "simple",
    "torch_library",
    "use",
]


def __getattr__(name: str) -> Any:
    """What costs time to import comes when it is first asked for."""
    if name not in LAZY:
        raise AttributeError(f"module 'opkiln' has no attribute {name!r}")
    module, attribute = LAZY[name]
    found = importlib.import_module(module)
    return found if attribute is None else getattr(found, attribute)
