"""`opkiln-bench calibrate`: what this GPU can do at best, measured as the rows are.

Copy bandwidth, matrix and vector rates, and the floor table: a streaming kernel that reads so many
bytes and writes so many, L2 cold. Writes a device profile to the user's configuration folder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
import yaml

from opkiln_bench.limits import user_profiles
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.sweep import now
from opkiln_bench.timing import MeasureError
from opkiln_bench.timing.cupti import CuptiTimer
from opkiln_bench.verdict import median_us

KIB = 1024
AXIS = [0, *(n * KIB for n in (32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072))]
AXIS += [512 * KIB * KIB, 2048 * KIB * KIB]
# (words a program moves each way, warps), 1 to 4 vectors of 16 bytes a thread: the best counts
SHAPES = ((1024, 8), (2048, 8), (4096, 8), (1024, 4))
MATRIX = 8192


@triton.jit
def stream_kernel(x_ptr, y_ptr, read_words, write_words, BLOCK: tl.constexpr):
    """Grid: (cdiv(max(read_words, write_words), BLOCK),). Program i reads and writes block i."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < read_words, other=0)
    tl.store(y_ptr + offs, x + 1, mask=offs < write_words)
    # a word that no input holds: the load is needed, this store never happens
    tl.store(y_ptr + offs, x, mask=(offs >= write_words) & (x == -2147483648))


def stream(
    x: torch.Tensor, y: torch.Tensor, read_words: int, write_words: int, shape: tuple[int, int]
) -> None:
    """Read and write as much, in one launch."""
    block, warps = shape
    grid = (triton.cdiv(max(read_words, write_words, 1), block),)
    stream_kernel[grid](x, y, read_words, write_words, BLOCK=block, num_warps=warps)


def measure(timer: CuptiTimer, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median device time of each call, in us; one profiler session for all."""
    medians = {}
    for name, found in timer.measure(calls).items():
        if isinstance(found, MeasureError):
            raise found
        medians[name] = round(median_us(found.all_us), 3)
    return medians


def floor_us(timer: CuptiTimer, device: torch.device, read_bytes: int, write_bytes: int) -> float:
    """The best streaming kernel's time, on tensors of just these sizes, as a row has them.

    One pair of tensors for all sizes would not do: a stream of 2 GiB between two calls empties the
    TLB, and 4 MB then take 3.6 us where rows of that size take 2.1.
    """
    words = read_bytes // 4, write_bytes // 4
    # a masked access needs an address all the same
    x, y = (torch.zeros(max(n, 4), dtype=torch.int32, device=device) for n in words)
    calls = {str(shape): partial(stream, x, y, *words, shape) for shape in SHAPES}
    return min(measure(timer, calls).values())


def floor_table(timer: CuptiTimer, device: torch.device) -> dict[str, Any]:
    """Times in us, a list a read size, an entry a write size."""
    us = [[floor_us(timer, device, read, write) for write in AXIS] for read in AXIS]
    return {"read_bytes": list(AXIS), "write_bytes": list(AXIS), "us": us}


def bandwidth_gbps(floor: dict[str, Any]) -> float:
    """The best rate in the table."""
    return max(
        (read + write) / (floor["us"][i][j] * 1e3)
        for i, read in enumerate(floor["read_bytes"])
        for j, write in enumerate(floor["write_bytes"])
    )


def rates_tflops(timer: CuptiTimer, device: torch.device) -> dict[str, float]:
    """Dense matrix product on random bf16 data; the same product in f32 (no TF32) and f64."""
    found = {}
    for name, dtype, size in (
        ("tensor_f16", torch.bfloat16, MATRIX),
        ("vector_f32", torch.float32, MATRIX // 2),
    ):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        us = measure(timer, {name: partial(torch.matmul, a, b)})[name]
        found[name] = round(2 * size**3 / (us * 1e6), 1)
    # cuBLAS runs f64 products on tensor cores; the vector units do half of the f32 rate
    found["vector_f64"] = round(found["vector_f32"] / 2, 1)
    return found


def calibrate(device: torch.device, samples: int) -> dict[str, Any]:
    """The device profile, as conf/device/*.yaml holds it."""
    timer = CuptiTimer(device, TimerSettings(max_samples=samples, min_samples=min(20, samples)))
    floor = floor_table(timer, device)
    name = torch.cuda.get_device_name(device)
    return {
        "kind": "cuda",
        "gpu": name,
        "bandwidth_gbps": round(bandwidth_gbps(floor), 1),
        "peaks_tflops": rates_tflops(timer, device),
        "floor": floor,
        "provenance": {
            "gpu": name,
            "date": now(),
            "software": f"torch {torch.__version__}, triton {triton.__version__}",
            "method": "opkiln-bench calibrate: CUPTI, L2 flushed, medians, best of 4 streams",
        },
    }


def write_profile(profile: dict[str, Any], path: Path | None) -> Path:
    """To `path`, or to the user's folder under the GPU's name."""
    slug = profile["gpu"].lower().replace(" ", "-")
    path = path or user_profiles() / f"{slug}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(profile, sort_keys=False, default_flow_style=None, width=200))
    return path
