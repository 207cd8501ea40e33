"""The CUDA C++ sources of this family, as text for `opkiln.device.cuda.load`."""

import functools
from importlib import resources

SHARED = {
    "mhc_pre": ["mhc_gates.cuh"],
    "topk": ["topk_ring.cuh", "topk_select.cuh"],
}


@functools.cache
def source(name: str) -> str:
    """csrc/`name`.cu with what it builds on before it."""
    folder = resources.files("opkiln_misc") / "csrc"
    files = ("device.cuh", *SHARED.get(name, []), f"{name}.cu")
    return "".join((folder / file).read_text("utf-8") for file in files)
