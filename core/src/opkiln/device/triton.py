"""Where the families' Triton kernels run, and how a planned launch is repeated:

    launch = launcher(kernel, (blocks, 1, 1), {"num_warps": 4}, (rows, columns, 1e-5, 1024))
    launch(x, y)

Triton's own launch costs 11.7 us on the host of an H200.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch

from opkiln.registry import Refusal

Dim3 = tuple[int, int, int]


@functools.cache
def triton_refusal(device: torch.device) -> Refusal | None:
    """Why Triton kernels do not run on `device`."""
    if importlib.util.find_spec("triton") is None:
        return Refusal("triton is not installed: pip install 'triton>=3.6'")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return Refusal(f"runs on CUDA devices, the tensors are on {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return Refusal(f"needs compute capability 8.0, {device} has {major}.{minor}")
    return None


def launcher(
    kernel: Any, grid: Dim3, options: dict[str, Any], fixed: tuple[Any, ...] = ()
) -> Callable[..., None]:
    """A function that launches `kernel` on its arguments, which the `fixed` ones follow.

    From call to call only the tensors may be others, of the same dtypes, alignment, device and
    absences: the first call goes through Triton's JIT, and later ones to the C function that it
    ended in, with new addresses. While a hook of Triton's waits for launches (a profiler), and in
    the interpreter, every call goes through Triton's Python.
    """
    ready: Recorded | None = None
    plain: Callable[..., Any] | None = None

    def through_triton(*args: Any) -> None:
        nonlocal ready, plain
        if plain is not None:
            plain(*args, *fixed)
            return
        found = kernel[grid](*args, *fixed, **options)
        if hasattr(found, "run"):  # the interpreter returns None
            ready = recorded(found, grid, args, fixed)
            plain = found[grid]

    def launch(*args: Any) -> None:
        if ready is None or is_hooked():
            through_triton(*args)
            return
        send, template, stream_at, pointers, device = ready
        values = template.copy()  # a list of this call's own: threads share the template
        values[stream_at] = torch._C._cuda_getCurrentRawStream(device)
        for place, i in pointers:
            values[place] = args[i].data_ptr()
        send(*values)

    return launch


class Recorded(NamedTuple):
    """What Triton's C launcher is called with. pointers: (place there, place in the arguments)."""

    send: Callable[..., None]
    values: list[Any]
    stream_at: int
    pointers: tuple[tuple[int, int], ...]
    device: int


def recorded(
    found: Any, grid: Dim3, args: tuple[Any, ...], fixed: tuple[Any, ...]
) -> Recorded | None:
    """Send stand-ins for stream and tensors through a copy of a kernel's Python launcher, and see
    where in the C function's arguments they come out. None: not as in triton 3.6.
    """
    run = found.run
    kinds = ("global_scratch_size", "profile_scratch_size")  # memory that each launch allocates
    if type(getattr(run, "launch", None)) is not BuiltinFunctionType:
        return None
    if any(getattr(run, kind, 0) for kind in kinds):
        return None
    taken: list[Any] = []
    stream = object()
    stand_ins = [object() if isinstance(a, torch.Tensor) else a for a in args]
    recorder = copy.copy(run)  # another thread may be launching through `run`
    recorder.launch = lambda *values: taken.extend(values)
    hooks = (None, None, None)  # launch metadata, enter, exit
    try:
        recorder(*grid, stream, found.function, found.packed_metadata, *hooks, *stand_ins, *fixed)
    except TypeError:
        return None
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    wanted = [stream, *[stand_ins[i] for i in tensors]]
    places = [[at for at, v in enumerate(taken) if v is w] for w in wanted]
    if any(len(at) != 1 for at in places):
        return None
    (stream_at,), *at_pointers = places
    pointers = tuple((at, i) for (at,), i in zip(at_pointers, tensors, strict=True))
    return Recorded(run.launch, taken, stream_at, pointers, torch.cuda.current_device())


def is_hooked() -> bool:
    """Whether something waits for Triton's launches."""
    runtime = runtime_knobs()
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # not a chain of hooks, but a hook
        return True


@functools.cache
def runtime_knobs() -> Any:
    return importlib.import_module("triton").knobs.runtime
