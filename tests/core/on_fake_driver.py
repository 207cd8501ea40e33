"""Launches that end in fake_driver.c: `python on_fake_driver.py CHECK`, with its libcuda.so.1 found
first and without Triton's interpreter. The tensors are on the CPU; no kernel runs.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch

FIELDS = ("launches", "function", "stream", "x", "y", "z", "threads", "shared", "attributes")
ATTRIBUTES = len(FIELDS)
FIRST = ATTRIBUTES + 8
STREAM = [0x77]


def seen(arguments: int) -> dict[str, Any]:
    """The last launch; further ones show their first `arguments` arguments."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.fake_seen.restype = ctypes.POINTER(ctypes.c_uint64)
    words = driver.fake_seen(arguments)[: FIRST + 8]
    found: dict[str, Any] = dict(zip(FIELDS, words, strict=False))
    ids, values = words[ATTRIBUTES : ATTRIBUTES + 4], words[ATTRIBUTES + 4 : FIRST]
    found["attributes"] = dict(zip(ids, values, strict=True)) if found["attributes"] else {}
    return {**found, "arguments": words[FIRST : FIRST + arguments]}


def fake_gpu() -> Any:
    """Triton believes in one Hopper GPU, torch in its streams. Returns Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher

    properties = {"max_shared_mem": 232448}
    triton.runtime.driver.set_active(
        SimpleNamespace(
            launcher_cls=CudaLauncher,
            utils=SimpleNamespace(
                load_binary=lambda *args: (1, 0xF00, 32, 0, 1024),
                get_device_properties=lambda device: properties,
            ),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: STREAM[0],
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
        )
    )
    torch.cuda.current_device = lambda: 0
    fake_stream()
    return triton


def fake_stream() -> None:
    torch._C._cuda_getCurrentRawStream = lambda device: STREAM[0]  # type: ignore[attr-defined]


def rms_norm_launch() -> tuple[Any, list[torch.Tensor]]:
    import opkiln.functional as F
    from opkiln.api import capture
    from opkiln_norm import row_norm

    x, w = torch.randn(1, 4096).half(), torch.randn(4096).half()
    return row_norm.prepare(capture(F.rms_norm, x, (4096,), w)), [x, w]


def same_arguments() -> None:
    """The second launch, which skips Triton's Python, is the first with other addresses."""
    fake_gpu()
    seen(6)
    launch, (x, w) = rms_norm_launch()
    out = launch(x, w)
    first = seen(6)
    STREAM[0] = 0x99
    other_x, other_w = torch.randn_like(x), torch.randn_like(w)
    other_out = launch(other_x, other_w)
    second = seen(6)
    assert first["arguments"][:3] == [t.data_ptr() for t in (x, w, out)]
    assert second["arguments"][:3] == [t.data_ptr() for t in (other_x, other_w, other_out)]
    assert first["arguments"][3:] == second["arguments"][3:]
    assert (first["launches"], second["launches"]) == (1, 2)
    assert (first["stream"], second["stream"]) == (0x77, 0x99)
    for key in ("function", "x", "y", "z", "threads", "shared", "attributes"):
        assert first[key] == second[key], key


def hooks() -> None:
    """A profiler's hook sees every launch, set before or after the first."""
    triton = fake_gpu()
    launch, tensors = rms_norm_launch()
    launch(*tensors)
    names: list[str] = []
    hook = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    launch(*tensors)
    launch(*tensors)
    triton.knobs.runtime.launch_enter_hook.remove(hook)
    launch(*tensors)
    assert names == ["row_norm_kernel"] * 2
    assert seen(0)["launches"] == 4


def an_older_triton() -> None:
    """A launcher that does not end in a C function: every call goes through Triton's Python."""
    from opkiln.device import triton

    calls = []

    class Found:
        function, packed_metadata = 0, ()

        def run(self, *args: Any) -> None:
            raise AssertionError("not called")

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args: calls.append(args)

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: calls.append(args) or Found()

    launch = triton.launcher(Kernel(), (1, 1, 1), {}, (2,))
    launch(1)
    launch(1)
    assert calls == [(1, 2), (1, 2)]


def packed() -> None:
    """CUDA C++: arguments of every kind, changed ones, and the attributes of a launch."""
    from opkiln.device.cuda_launch import Config, launcher
    from opkiln.errors import BackendError

    fake_stream()
    x, y = torch.randn(4), torch.randn(4)
    launch = launcher(0xBEEF, 0, Config((32, 2, 1), (256, 1, 1), 1000, 4, True))
    half = ctypes.c_float(2.5)
    seen(6)
    launch(x, y, 0, 7, 0.5, half)
    got = seen(6)
    numbers = [struct.unpack("Q", struct.pack("d", 0.5))[0]]
    assert got["arguments"][:5] == [x.data_ptr(), y.data_ptr(), 0, 7, *numbers]
    assert struct.unpack("f", struct.pack("Q", got["arguments"][5])[:4]) == (2.5,)
    assert (got["function"], got["stream"], got["shared"]) == (0xBEEF, 0x77, 1000)
    assert (got["x"], got["y"], got["z"], got["threads"]) == (32, 2, 1, 256)
    assert got["attributes"].keys() == {4, 2, 0}  # cluster, cooperative
    assert got["attributes"][4] == 4 + (1 << 32)
    STREAM[0] = 0x99
    launch(y, x, 0, 8, 0.5, half)
    got = seen(6)
    assert got["arguments"][:4] == [y.data_ptr(), x.data_ptr(), 0, 8] and got["stream"] == 0x99
    driver = ctypes.CDLL("libcuda.so.1")
    driver.fake_failure(201)  # no context: made current, launched again
    launch(x, y, 0, 8, 0.5, half)
    assert seen(6)["arguments"][:2] == [x.data_ptr(), y.data_ptr()]
    driver.fake_failure(1)
    try:
        launch(x, y, 0, 8, 0.5, half)
    except BackendError as error:
        assert "CUDA_ERROR_INVALID_VALUE" in str(error)
    else:
        raise AssertionError("the driver's refusal was lost")
    launch(y, 0, x, 8, 0.5, half)
    assert seen(6)["arguments"][:3] == [y.data_ptr(), 0, x.data_ptr()]


def threads() -> None:
    """Launches at the same time, on tensors of their own, do not mix."""
    from opkiln.device.cuda_launch import Config, Packed

    x = [torch.randn(4) for _ in range(4)]
    one, other = (Packed(Config((1, 1, 1), (1, 1, 1)).of_driver(), (t, 1)) for t in x[:2])
    assert one.load((x[2], 1)) and other.load((x[3], 1))
    assert (one.cells[0].value, other.cells[0].value) == (x[2].data_ptr(), x[3].data_ptr())

    fake_gpu()
    launch, (first, w) = rms_norm_launch()
    launch(first, w)
    wrong: list[int] = []
    sent = threading.local()
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    run = cells["run"].cell_contents
    ready = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))["ready"]
    recorded = ready.cell_contents
    (place, _), *_ = recorded.pointers

    def send(*values: Any) -> None:
        if values[place] != sent.expected:
            wrong.append(values[place])

    ready.cell_contents = recorded._replace(send=send)

    def work() -> None:
        own = torch.randn_like(first)
        sent.expected = own.data_ptr()
        for _ in range(3000):
            launch(own, w)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done")
