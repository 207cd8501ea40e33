"""Compiling CUDA C++ at run time: the cache of cubins, and on a GPU a launch."""

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
import torch
from opkiln.device import cuda

needs_nvrtc = pytest.mark.skipif(not cuda.has_compiler(), reason="cuda-core is not installed")
needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and cuda.has_compiler()), reason="needs a GPU and cuda-core"
)

ADD = """
extern "C" __global__ void add(const float* x, float* y, long long n, double c) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * SCALE + (float)c;
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cubins"


@pytest.fixture
def compilations(monkeypatch):
    """How often NVRTC ran."""
    runs = []
    compiler = cuda.run_nvrtc

    def counted(source, arch, macros):
        runs.append((arch, dict(macros)))
        return compiler(source, arch, macros)

    monkeypatch.setattr(cuda, "run_nvrtc", counted)
    return runs


def compile_add(scale: int = 2, arch: str = "sm_90a") -> bytes:
    return cuda.compile_cubin(ADD, arch, {"SCALE": scale})


@needs_nvrtc
def test_compiles_once_and_keeps_the_cubin(cache, compilations):
    first = compile_add()
    assert first[:4] == b"\x7fELF" and b"add" in first
    assert compile_add() == first
    assert len(compilations) == 1
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@needs_nvrtc
def test_key_depends_on_source_macros_and_architecture(cache, compilations):
    compile_add()
    compile_add(scale=3)
    compile_add(arch="sm_90")
    cuda.compile_cubin(ADD + "\n", "sm_90a", {"SCALE": 2})
    assert len(compilations) == 4
    assert len(list(cache.glob("*.cubin"))) == 4


@needs_nvrtc
def test_key_depends_on_nvrtc_and_headers(monkeypatch):
    keys = {cuda.cache_key(ADD, "sm_90a", {})}
    for what in ("nvrtc_version", "headers_digest"):
        with monkeypatch.context() as patch:
            patch.setattr(cuda, what, lambda: "another")
            keys.add(cuda.cache_key(ADD, "sm_90a", {}))
    assert len(keys) == 3


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:99] + b"!" * 9])
def test_damaged_entry_is_compiled_again(cache, compilations, damage):
    first = compile_add()
    (entry,) = cache.glob("*.cubin")
    entry.write_bytes(damage(entry.read_bytes()))
    assert compile_add() == first
    assert len(compilations) == 2
    assert cuda.read_entry(entry) == first


@needs_nvrtc
def test_compiler_errors_name_the_line():
    with pytest.raises(Exception, match="SCALE"):
        cuda.run_nvrtc(ADD, "sm_90a", {})


def put(folder: str, queue) -> None:
    os.environ["OPKILN_CACHE"] = folder
    cuda.nvrtc_version = cuda.headers_digest = lambda: ""
    cuda.run_nvrtc = lambda *args: queue.put(os.getpid()) or b"cubin"
    assert cuda.compile_cubin(ADD, "sm_90a") == b"cubin"


def test_one_process_compiles_for_all(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=put, args=(str(tmp_path), queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [w.exitcode for w in workers] == [0] * 4
    queue.get(timeout=5)
    assert queue.empty()


def test_folder_that_others_could_read_is_closed(cache):
    cache.mkdir(parents=True, mode=0o755)
    cache.chmod(0o755)
    assert stat.S_IMODE(cuda.cache_folder().stat().st_mode) == 0o700


def test_without_a_writable_folder_nothing_is_kept(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("OPKILN_CACHE", str(blocked / "cache"))
    monkeypatch.setattr(cuda, "nvrtc_version", lambda: "")
    monkeypatch.setattr(cuda, "headers_digest", lambda: "")
    monkeypatch.setattr(cuda, "run_nvrtc", lambda *args: b"cubin")
    assert cuda.compile_cubin(ADD, "sm_90a") == b"cubin"


@pytest.mark.parametrize(
    ("opkiln_cache", "xdg", "expected"),
    [("a", "b", "a/cubins"), (None, "b", "b/opkiln/cubins"), (None, None, ".cache/opkiln/cubins")],
)
def test_where_the_cache_is(tmp_path, monkeypatch, opkiln_cache, xdg, expected):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("OPKILN_CACHE", opkiln_cache), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, str(tmp_path / value))
    assert cuda.cache_folder() == Path(tmp_path, expected)


def test_why_not_names_what_is_missing(monkeypatch):
    assert "cpu" in cuda.why_not(torch.device("cpu"), "opkiln-misc[cu13]")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.0" in cuda.why_not(torch.device("cuda", 0), "opkiln-misc[cu13]")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "has_compiler", lambda: False)
    reason = cuda.why_not(torch.device("cuda", 0), "opkiln-misc[cu13]")
    assert "pip install 'opkiln-misc[cu13]'" in reason


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"cluster": 2}, {"shared_bytes": 100_000}], ids=str)
def test_launch(cache, options):
    device = torch.device("cuda", 0)
    x = torch.randn(1000, device=device)
    y = torch.full_like(x, torch.nan)
    launch = cuda.load(ADD, "add", device, {"SCALE": 2}).configure(
        (8, 1, 1), (128, 1, 1), **options
    )
    launch(x, y, 1000, 0.5)
    torch.testing.assert_close(y, 2 * x + 0.5)


@needs_gpu
def test_launch_on_another_stream_and_in_a_graph(cache):
    device = torch.device("cuda", 0)
    x = torch.randn(1000, device=device)
    y = torch.zeros_like(x)
    launch = cuda.load(ADD, "add", device, {"SCALE": 3}).configure((8, 1, 1), (128, 1, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, y, 1000, 0.0)
        with pytest.raises(RuntimeError, match="captured"):
            cuda.load(ADD, "add", device, {"SCALE": 4})
    assert not y.any()
    graph.replay()
    torch.testing.assert_close(y, 3 * x)
