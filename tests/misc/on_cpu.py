"""Runs the family's CUDA sources on this machine's CPU, through cpu_device.h and g++."""

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from opkiln.conformance.cases import Case, cases_of
from opkiln.conformance.checks import Fault, compared, expected_of
from opkiln.spec import Call

COMPILER = shutil.which("g++")
HEADER = Path(__file__).with_name("cpu_device.h")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
# Every argument of every kernel has eight bytes.
RUN = """
template <typename... A, size_t... I>
void call(void (*kernel)(A...), const u64* raw, std::index_sequence<I...>) {
    kernel(cpu::value<A>(raw[I])...);
}
template <typename... A>
void unpack(void (*kernel)(A...), const u64* raw) {
    call(kernel, raw, std::index_sequence_for<A...>());
}
extern "C" void run(u32 x, u32 y, u32 z, u32 threads, u64 shared, u32 cluster, const u64* raw) {
    cpu::launch({x, y, z}, threads, shared, cluster, [=] { unpack(KERNEL, raw); });
}
"""


def build(source: str, name: str, macros: dict[str, Any]) -> Any:
    """The shared library, kept in the machine's temporary folder by what it was made from."""
    end_of_device = source.index("\n", source.index("DEVICE float reciprocal"))
    kernels = source[end_of_device:]
    text = f'#include "{HEADER}"\n{kernels}\n{RUN.replace("KERNEL", name)}'
    defines = [f"-D{k}={v}" for k, v in sorted(macros.items())]
    parts = [text, HEADER.read_text("utf-8"), *defines]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir(), f"opkiln-on-cpu-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest}.so"
    if not library.exists():
        path = folder / f"{digest}-{os.getpid()}.cpp"
        path.write_text(text, "utf-8")
        out = path.with_suffix(".so")
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=fast"]
        command = [COMPILER, *flags, *defines, str(path), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        os.replace(out, library)
        path.unlink()
    return ctypes.CDLL(str(library))


class Kernel:
    """Stands in for opkiln.device.cuda.Kernel."""

    def __init__(self, source: str, name: str, device: Any, macros: dict[str, Any] | None = None):
        self.library = build(source, name, macros or {})

    def configure(
        self, grid, block, shared_bytes: int = 0, cluster: int = 1, cooperative: bool = False
    ):
        def launch(*args: Any) -> None:
            raw = b"".join(map(as_bytes, args))
            self.library.run(
                *grid, block[0], ctypes.c_uint64(shared_bytes), cluster, ctypes.c_char_p(raw)
            )

        return launch


def as_bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    return struct.pack("<d" if isinstance(value, float) else "<q", value)


class Conformance:
    """A conformance case for the family's CUDA kernel."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def run(self) -> str:
        """What is wrong, "" if nothing is."""
        from opkiln_misc.plugin import planner

        bound = self.case.build(torch.device("cpu"))
        call = Call.of(bound.spec, bound.tensors, bound.params, self.case.policy)
        if not any(m.numel for m in call.outputs):
            return ""  # never launched
        try:
            launch = planner(self.case.op).prepare(call)
        except ValueError as refusal:
            return "" if str(refusal).startswith("serves") else str(refusal)
        out = launch(*bound.tensors)
        outs = list(out) if isinstance(out, tuple) else [out]
        try:
            list(compared(self.case, call, "opkiln", outs, expected_of(bound, call)))
        except Fault as fault:
            return str(fault)
        return ""


def conformance(op: str, *dtypes: torch.dtype) -> list[Any]:
    cases = [c for c in cases_of(op) if c.dtype in dtypes]
    return [pytest.param(Conformance(c), id=c.id) for c in cases]
