"""Repeated launches: without Triton's Python, and with arguments in the driver's form.

On a CPU they end in a driver of our own (on_fake_driver.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import opkiln.functional as F
import pytest
import torch
from opkiln import road

HERE = Path(__file__).parent
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def served(monkeypatch):
    """How many calls were not recognised."""
    calls = []
    real = road.serve
    monkeypatch.setattr(road, "SITES", {})
    monkeypatch.setattr(road, "serve", lambda *args: calls.append(args) or real(*args))
    return calls


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    """The environment of a process whose CUDA driver is fake_driver.c."""
    folder = tmp_path_factory.mktemp("driver")
    headers = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/include"
    command = ["gcc", "-shared", "-fPIC", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
    library = folder / "libcuda.so.1"
    subprocess.run([*command, str(HERE / "fake_driver.c"), "-o", str(library)], check=True)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {
        **env,
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }


TRITON_CHECKS = ["same_arguments", "hooks", "an_older_triton"]
CUDA_CHECKS = ["packed", "threads"]


def has_bindings():
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def on_fake_driver(check, env):
    command = [sys.executable, str(HERE / "on_fake_driver.py"), check]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["done"], done.stderr


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, as Triton does")
@pytest.mark.parametrize("check", TRITON_CHECKS)
def test_triton_launches(check, fake_driver):
    on_fake_driver(check, fake_driver)


@pytest.mark.skipif(shutil.which("gcc") is None or not has_bindings(), reason="needs cuda-core")
@pytest.mark.parametrize("check", CUDA_CHECKS)
def test_cuda_launches(check, fake_driver):
    on_fake_driver(check, fake_driver)


def gpu_calls(device):
    """(function, arguments, what it should give) for a kernel of Triton's and one of CUDA C++."""
    x = torch.randn(4, 4096, device=device, dtype=torch.float16)
    long = torch.randn(2, 16384, device=device, dtype=torch.float16)
    image = torch.randn(1, 64, 8, 8, device=device, dtype=torch.float16)
    torch_norm = torch.nn.functional.rms_norm
    return [
        (F.rms_norm, (x, (4096,)), torch_norm(x, (4096,))),
        (F.rms_norm, (long, (16384,)), torch_norm(long, (16384,))),
        (F.max_pool2d, (image, 2), torch.nn.functional.max_pool2d(image, 2)),
    ]


@needs_gpu
def test_gpu_other_stream(served):
    for fn, args, want in gpu_calls("cuda"):
        for _ in range(3):
            fn(*args)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # what the default stream launches comes long before
            source = args[0].clone()
            out = fn(source, *args[1:])
            event = stream.record_event()
            assert not event.query()
        stream.synchronize()
        torch.testing.assert_close(out, want, atol=4e-3, rtol=4e-3)
    assert len(served) <= 6  # two a function, one where its plan is already there


@needs_gpu
def test_gpu_graph(served):
    for fn, args, want in gpu_calls("cuda"):
        for _ in range(3):
            fn(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fn(*args)
        out.zero_()
        graph.replay()
        torch.testing.assert_close(out, want, atol=4e-3, rtol=4e-3)
    assert len(served) <= 6  # two a function, one where its plan is already there


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpu_other_device(served):
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        for fn, args, want in gpu_calls(device):
            for _ in range(3):
                out = fn(*args)
                assert out.device == want.device
                torch.testing.assert_close(out, want, atol=4e-3, rtol=4e-3)


@needs_gpu
def test_gpu_hooks(served):
    import triton

    names = []
    hook = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
    fn, args, _ = gpu_calls("cuda")[0]
    for _ in range(3):
        fn(*args)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        fn(*args)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert names == ["row_norm_kernel"]
