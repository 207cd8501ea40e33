"""The CUDA sources compile for sm_90a as they are launched on the pages' rows, without spills."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_misc import fft as fft_module
from opkiln_misc import mhc_pre
from opkiln_misc import topk as topk_module
from opkiln_misc.plugin import MODULES, planner
from opkiln_misc.sources import source

pytestmark = pytest.mark.skipif(not cuda.has_compiler(), reason="cuda-core is not installed")
MHC = dict(
    alpha_pre=1.0, alpha_post=1.0, alpha_res=1.0, sinkhorn_repeat=1, sinkhorn_eps=0.02,
    return_h_post=False,
)  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def topk(k: int) -> tuple[str, list[torch.Tensor], dict]:
    window = meta(1, 8, dtype=torch.int32)
    return "topk_selector", [meta(1, 8, 65536, 1), window, window], {"topk": k}


def fft(n: int, dtype: torch.dtype) -> tuple[str, list[torch.Tensor], dict]:
    return "fft", [meta(64, n, dtype=dtype)], dict(n=n, dim=1, norm="ortho")


def fft_backward(n: int, dtype: torch.dtype, width: int) -> tuple[str, list[torch.Tensor], dict]:
    params = dict(n=n, dim=1, norm="ortho", input_shape=(64, width), output_mask=[True])
    return "fft_backward", [meta(64, n, dtype=dtype)], params


ROWS = {
    "pre": ("mhc_pre", [meta(10240, 24), meta(4, 10240, dtype=torch.bfloat16), meta(24)], MHC),
    "pre-8-streams": ("mhc_pre", [meta(8192, 80), meta(1, 8192), meta(80)], MHC),
    "topk1024": topk(1024),
    "topk8192": topk(8192),
    "fft-c64": fft(4096, torch.complex64),
    "fft-c128": fft(4096, torch.complex128),
    "fft-two-steps": fft(65536, torch.complex64),
    "fft-backward-c64": fft_backward(4096, torch.complex64, 4096),
    "fft-backward-c128": fft_backward(4096, torch.complex128, 4096),
    "fft-backward-cropped": fft_backward(4096, torch.complex128, 4000),
    "fft-backward-two-steps": fft_backward(65536, torch.complex64, 70000),
}
# Of the selection, a few per cent of the time; the loop that streams has none.
MOST_LOCAL = {"topk1024": 64}


@pytest.mark.parametrize("row", ROWS)
def test_compiles_without_spills(row, tmp_path, monkeypatch):
    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path))
    op, tensors, params = ROWS[row]
    plan = planner(op).plan_for(Call.of(CATALOGUE[op], tensors, params, real=False))
    for step in plan if isinstance(plan, list) else [plan]:
        assert local_bytes(source(MODULES[op]), step.macros, tmp_path) <= MOST_LOCAL.get(row, 0)


@pytest.mark.parametrize(("points", "cluster"), [(16, 2), (16, 8), (8, 2), (8, 8)])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_fft_over_a_cluster_compiles_without_spills(
    points, cluster, dtype, asynchronous, tmp_path
):
    op, tensors, params = fft(4096, dtype)
    call = Call.of(CATALOGUE[op], tensors, params, real=False)
    tiling = fft_module.Tiling(points, cluster=cluster, asynchronous=asynchronous)
    (step,) = fft_module.plan_for(call, tiling)
    assert local_bytes(source("fft"), step.macros, tmp_path) == 0


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("streams", [4, 7, 8])
@pytest.mark.parametrize("width", [5120, 10240])
def test_mhc_pre_compiles_without_spills(batch, streams, width, tmp_path):
    m = streams * streams + 2 * streams
    width -= width % (2 * streams)
    tensors = [meta(width, m), meta(batch, width, dtype=torch.bfloat16), meta(m)]
    plan = mhc_pre.plan_for(Call.of(CATALOGUE["mhc_pre"], tensors, MHC, real=False))
    assert plan.macros["ROWS"] == (1 if batch == 1 else 4)
    assert local_bytes(source("mhc_pre"), plan.macros, tmp_path) == 0


@pytest.mark.parametrize("layout", ["odd", "even", "strided"])
@pytest.mark.parametrize("streams", range(2, 9))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_mhc_pre_compiles_for_every_layout(layout, streams, dtype, tmp_path):
    """Odd columns and strides leave x's elements alone: halves, narrower than a word."""
    m, step = streams * streams + 2 * streams, 2 if layout == "strided" else 1
    width = streams * (33 if layout == "odd" else 40)
    phi, x = meta(width, m * step)[:, ::step], meta(9, width * step, dtype=dtype)[:, ::step]
    call = Call.of(CATALOGUE["mhc_pre"], [phi, x, meta(m)], MHC, real=False)
    plan = mhc_pre.plan_for(call)
    assert (plan.macros["X_VECTOR"] == 1) == (layout != "even" or dtype == torch.float32)
    assert local_bytes(source("mhc_pre"), plan.macros, tmp_path) == 0


@pytest.mark.parametrize("vector", [1, 4])
@pytest.mark.parametrize("in_order", [0, 1])
@pytest.mark.parametrize("index", ["int", "long long"])
def test_topk_compiles_for_every_layout(vector, in_order, index, tmp_path):
    op, tensors, params = topk(1024)
    plan = topk_module.plan_for(Call.of(CATALOGUE[op], tensors, params, real=False))
    macros = {"VECTOR": vector, "SORTED": in_order, "START": index, "END": index}
    assert local_bytes(source("topk"), plan.macros | macros, tmp_path) <= MOST_LOCAL["topk1024"]


def local_bytes(text: str, macros: dict, folder: Path) -> int:
    """Stack and spills of a thread, the most of all kernels."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(cuda.compile_cubin(text, "sm_90a", macros))
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    return max(map(int, re.findall(r"STACK:(\d+)", done.stdout)))
