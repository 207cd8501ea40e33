"""Stands in for opkiln.device.cuda: runs csrc/patch.cu and csrc/shift.cu on this machine's CPU,
compiled by g++.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from misc.on_cpu import COMPILER, HEADER, RUN, as_bytes

HERE = Path(__file__).parent
MARKS = {  # headers: how the source that they serve begins, after what they stand for
    ("cpu_mma.h",): "// Convolution of contiguous tensors",
    ("cpu_mma.h", "cpu_wgmma.h"): "// Convolution of stride 1",
}


def build(source: str, name: str, macros: dict[str, Any]) -> Any:
    """The shared library, kept in the machine's temporary folder by what it was made from."""
    files, mark = next((f, m) for f, m in MARKS.items() if m in source)
    headers = "".join(path.read_text("utf-8") for path in (HEADER, *(HERE / f for f in files)))
    text = headers + source[source.index(mark) :] + RUN.replace("KERNEL", name)
    defines = [f"-D{k}={v}" for k, v in sorted(macros.items())]
    digest = hashlib.sha256("\0".join([text, *defines]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir(), f"opkiln-on-cpu-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        path = folder / f"{digest}-{os.getpid()}.cpp"
        path.write_text(text, "utf-8")
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
        out = path.with_suffix(".so")
        command = [COMPILER, *flags, *defines, str(path), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        os.replace(out, library)
        path.unlink()
    return ctypes.CDLL(str(library))


class Kernel:
    """As opkiln.device.cuda.Kernel, made by `load`."""

    def __init__(self, source: str, name: str, device: Any, macros: dict[str, Any]) -> None:
        self.library = build(source, name, macros)

    def configure(self, grid: Any, block: Any, shared_bytes: int = 0, cluster: int = 1) -> Any:
        def launch(*args: Any) -> None:
            raw = ctypes.c_char_p(b"".join(map(as_bytes, args)))
            self.library.run(*grid, block[0], ctypes.c_uint64(shared_bytes), cluster, raw)

        return launch
