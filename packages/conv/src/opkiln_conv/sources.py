"""The CUDA C++ sources of this family, as text for `opkiln.device.cuda.load`."""

import functools
from importlib import resources


@functools.cache
def read(file: str) -> str:
    """csrc/`file`."""
    return (resources.files("opkiln_conv") / "csrc" / file).read_text("utf-8")


def source(name: str) -> str:
    """csrc/`name`.cu, after what it builds on."""
    return read("device.cuh") + read(f"{name}.cu")
