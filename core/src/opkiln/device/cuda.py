"""CUDA C++ kernels compiled at run time: by NVRTC through cuda-core, cubins kept on disk.

    kernel = load(source, "scale_rows", device, {"COLUMNS": 4096})
    launch = kernel.configure(grid=(rows, 1, 1), block=(256, 1, 1))
    launch(x, y, rows, 0.5)

`source` is a whole translation unit whose kernels are `extern "C"`; constants arrive as macros. The
kernel goes to torch's current stream of the current device. Tensors arrive as pointers, ints as
`long long`, floats as `double`; numpy and ctypes scalars as what they are.

The cache is $OPKILN_CACHE or $XDG_CACHE_HOME/opkiln or ~/.cache/opkiln, mode 0700. An entry is
named by the SHA-256 of source, headers, macros, architecture and NVRTC version, and begins with the
SHA-256 of its cubin, so that a damaged one is compiled again. One process compiles an entry, the
others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from opkiln.device import cuda_launch
from opkiln.errors import BackendError

TESTED = ((9, 0),)  # compute capabilities that our CUDA kernels were compiled and tested for
STATIC_SHARED_BYTES = 48 << 10  # more has to be asked for
PORTABLE_CLUSTER = 8  # CTAs; a larger cluster has to be asked for
DIGEST_BYTES = 32

Macros = Mapping[str, int | str]
Dim3 = cuda_launch.Dim3


def why_not(device: torch.device, extra: str) -> str | None:
    """Why CUDA kernels cannot run on `device`, in one line, or None. extra: what to pip install."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"runs on NVIDIA GPUs, the tensors are on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability not in TESTED:
        known = ", ".join("{}.{}".format(*c) for c in TESTED)
        have = "{}.{}".format(*capability)
        return f"compiled and tested for compute capability {known}, {device} has {have}"
    if not has_compiler():
        return f"cuda-core is not installed: pip install '{extra}'"
    return None


@functools.cache
def has_compiler() -> bool:
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:  # no package `cuda` at all
        return False


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def compile_cubin(source: str, arch: str, macros: Macros | None = None) -> bytes:
    """The cubin, from the cache where it has been compiled before. Needs no GPU."""
    key = cache_key(source, arch, macros or {})
    try:
        folder = cache_folder()
    except OSError:  # a read-only home: compile, keep nothing
        return run_nvrtc(source, arch, macros or {})
    path = folder / f"{key}.cubin"
    found = read_entry(path)
    if found is not None:
        return found
    with locked(folder / f"{key}.lock"):
        found = read_entry(path)  # another process may have compiled it while this one waited
        if found is None:
            found = run_nvrtc(source, arch, macros or {})
            write_entry(path, found)
    return found


def cache_folder() -> Path:
    """The cache's folder, made if missing, readable by its owner alone."""
    given = os.environ.get("OPKILN_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = (Path(given) if given else Path(home, "opkiln")) / "cubins"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def cache_key(source: str, arch: str, macros: Macros) -> str:
    parts = [source, sorted(macros.items()), arch, nvrtc_version(), headers_digest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def nvrtc_version() -> str:
    nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


@functools.cache
def header_folders() -> list[str]:
    """Where cuda_fp16.h and its like are; empty where no toolkit is installed."""
    pathfinder: Any = importlib.import_module("cuda.pathfinder")
    return [f for f in map(pathfinder.find_nvidia_header_directory, ("cudart", "cccl")) if f]


@functools.cache
def headers_digest() -> str:
    """Stands for the toolkit's headers: the one that holds their version."""
    digest = hashlib.sha256()
    for folder in header_folders():
        path = Path(folder, "cuda_runtime_api.h")
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


def run_nvrtc(source: str, arch: str, macros: Macros) -> bytes:
    core: Any = importlib.import_module("cuda.core")
    options = core.ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in sorted(macros.items())] or None,
        include_path=header_folders() or None,
    )
    compiled = core.Program(source, "c++", options).compile("cubin")
    return bytes(compiled.code)


def read_entry(path: Path) -> bytes | None:
    """An entry's cubin; None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, cubin = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def write_entry(path: Path, cubin: bytes) -> None:
    """Whole or not at all, whoever reads meanwhile."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(hashlib.sha256(cubin).digest() + cubin)
    os.replace(temporary, path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """The lock goes with the process that holds it, so none is left behind by a crash."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Kernel:
    """A loaded kernel. Make one by `load`."""

    def __init__(self, handle: Any, device: torch.device) -> None:
        self.handle = handle
        self.device = device

    def configure(
        self,
        grid: Dim3,
        block: Dim3,
        shared_bytes: int = 0,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> Callable[..., None]:
        """A function that launches on its arguments. grid: in CTAs; cluster: CTAs along x.

        shared_bytes: dynamic shared memory of a CTA. cooperative: all CTAs run at once, or the
        launch fails.
        """
        if shared_bytes > STATIC_SHARED_BYTES:
            self._allow("MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)
        if cluster > PORTABLE_CLUSTER:
            self._allow("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        config = cuda_launch.Config(grid, block, shared_bytes, cluster, cooperative)
        return cuda_launch.launcher(int(self.handle.handle), self.device.index, config)

    def _allow(self, attribute: str, value: int) -> None:
        driver: Any = importlib.import_module("cuda.bindings.driver")
        name = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        (status,) = driver.cuKernelSetAttribute(
            name, value, self.handle.handle, driver.CUdevice(self.device.index)
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{self.device} does not allow {attribute} = {value}: {status}")


_loaded: dict[Any, Kernel] = {}
_lock = threading.Lock()


def load(source: str, name: str, device: torch.device, macros: Macros | None = None) -> Kernel:
    """Kernel `name` of `source`, compiled for `device`; at most once a process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    device = torch.device("cuda", index)
    key = (source, name, index, tuple(sorted((macros or {}).items())))
    with _lock:
        found = _loaded.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"{name} is not compiled yet and a CUDA graph is being captured: call the "
                    "function once before the capture"
                )
            core: Any = importlib.import_module("cuda.core")
            core.Device(index).set_current()
            cubin = compile_cubin(source, architecture(device), macros)
            code = core.ObjectCode.from_cubin(cubin)
            found = _loaded[key] = Kernel(code.get_kernel(name), device)
    return found
