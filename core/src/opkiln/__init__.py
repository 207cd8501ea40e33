"""opkiln: 36 GPU ops for PyTorch in independently installable families.

`opkiln.functional` has the ops; `opkiln.use` and `backend=` choose who computes them;
`opkiln.explain` says who does and why.
"""

from opkiln import functional, torch_library
from opkiln.api import backends, explain, ops
from opkiln.errors import ArgumentError, BackendError, PluginError
from opkiln.hookspecs import hookimpl
from opkiln.policy import Policy, use
from opkiln.registry import Implementation, Refusal, inference_only, simple

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BackendError",
    "Implementation",
    "PluginError",
    "Policy",
    "Refusal",
    "backends",
    "explain",
    "functional",
    "hookimpl",
    "inference_only",
    "ops",
    "simple",
    "torch_library",
    "use",
]
