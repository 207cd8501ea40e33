"""Conditions around a call under which other libraries went wrong, as their users reported it.

Streams, graphs, a second GPU, grid limits and 64-bit offsets are checks of the conformance kit
(opkiln.conformance.cuda_checks), and so is that a second run gives the same bits.
"""

import os
import subprocess
import sys

import opkiln.functional as F
import pytest
import torch
from opkiln.schema import operator
from reports import DEVICE
from samples import SAMPLES, rand

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "channels_last": channels_last,
    "transposed": lambda x: x.mT.contiguous().mT,
    "empty": lambda x: x[:0],
}
CHANNELS = ("conv2d", "max_pool2d-indices", "avg_pool2d", "group_norm", "instance_norm")
TRACED = [
    *[(name, layout) for name in CHANNELS for layout in LAYOUTS],
    *[(name, layout) for name in ("rms_norm", "rope_neox") for layout in ("transposed", "empty")],
]


# pytorch/pytorch#186850, NVIDIA/cuEquivariance#223, pytorch/pytorch#177115
@pytest.mark.parametrize(("name", "layout"), TRACED)
def test_traced_and_real_results_have_the_same_strides(name, layout):
    spec, (x, *rest), params = SAMPLES[name].bound(F32)
    arguments = (LAYOUTS[layout](x), *rest, *params.values())
    torch.library.opcheck(operator(spec), arguments, test_utils="test_faketensor")


def near_the_limit(*shape):
    """Up to 60,000, in float32; float16's largest number is 65,504."""
    return (rand(F32, *shape) * 5000 + 45_000).clamp(max=6e4).to(DEVICE)


# torch's lists for CUDA: norms of rows and groups run in float32, convolutions in the lower dtype.
LOWER = F16 if DEVICE.type == "cuda" else BF16
AUTOCAST = {
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), F32),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), F32),
    "group_norm": (lambda x: F.group_norm(x, 2), F32),
    "instance_norm": (F.instance_norm, None),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), None),
    "conv2d": (lambda x: F.conv2d(x, torch.full((2, 4, 1, 1), 0.25, device=x.device)), LOWER),
}


# pytorch/pytorch#115500, NVIDIA/apex#1379
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_gives_the_listed_dtype_and_no_nan(name, dtype):
    """The input's own dtype where there is none."""
    call, listed = AUTOCAST[name]
    with torch.autocast(DEVICE.type, dtype=LOWER):
        out = call(near_the_limit(3, 4, 6, 5).to(dtype))
    assert out.dtype == (listed or dtype) and out.isfinite().all()


PROGRAM = """
import torch, opkiln
out = opkiln.functional.rms_norm(torch.ones(2, 8), (8,))
assert out.shape == (2, 8) and len(opkiln.ops()) > 30
"""


# tile-ai/tilelang#1107, tile-ai/TileOPs#128, tile-ai/tilelang#91
def test_import_needs_no_gpu_and_runs_no_compiler(tmp_path):
    """An old nvcc may come first on PATH. Broken plugins: tests/packaging."""
    called = tmp_path / "called"
    for tool in ("nvcc", "ptxas", "gcc"):
        script = tmp_path / tool
        script.write_text(f"#!/bin/sh\necho {tool} >> '{called}'\nexit 1\n")
        script.chmod(0o755)
    env = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not called.exists(), called.read_text()
