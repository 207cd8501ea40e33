"""The CUDA C++ sources of this family, as text for `opkiln.device.cuda.load`."""

import functools
from importlib import resources


@functools.cache
def source(name: str) -> str:
    """csrc/`name`.cu, after what it builds on."""
    folder = resources.files("opkiln_conv") / "csrc"
    return "".join((folder / file).read_text("utf-8") for file in ("device.cuh", f"{name}.cu"))
