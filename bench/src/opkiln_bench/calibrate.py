"""`opkiln-bench calibrate`: what this GPU can do at best, measured as the rows are.

Copy bandwidth, matrix and vector rates, and the floor table: a streaming kernel that reads so many
bytes and writes so many, L2 cold. Writes a device profile to the user's configuration folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
import yaml

from opkiln_bench.limits import user_profiles
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.sweep import now
from opkiln_bench.timing import MeasureError
from opkiln_bench.timing.cupti import ATTEMPTS, MARKER, CuptiTimer, L2Flush, mark, recorded
from opkiln_bench.timing.intervals import Activity, attribute
from opkiln_bench.verdict import median_us

KIB = 1024
# Steps of sqrt(2) where rows are: between two points of 2x the plane lies up to 3 % off the table.
STEPS = [round(256 * KIB * 2 ** (i / 2) / KIB) * KIB for i in range(17)]
AXIS = [0, 32 * KIB, 64 * KIB, 128 * KIB, *STEPS]
AXIS += [n * KIB * KIB for n in (128, 512, 2048)]
WARMUP_CALLS = 1  # of a point, not counted: the last point's addresses are in the TLB
SCREEN_SAMPLES = 3  # of every stream; the fastest FINALISTS then get the samples asked for
FINALISTS = 2
LINE_WORDS = 32  # 128 bytes: no two programs share a line
MATRIX = 8192


class Shape(NamedTuple):
    """A program moves up to `block` words each way, 1 to 8 vectors of 16 bytes a thread.

    hints: loads are evicted first and stores stream, as in kernels that touch each byte once.
    """

    block: int
    warps: int
    hints: bool


SIZES = ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 16))
SHAPES = tuple(Shape(block, warps, hints) for block, warps in SIZES for hints in (False, True))


@triton.jit
def stream_kernel(
    x_ptr, y_ptr, read_words, write_words, read_chunk, write_chunk,
    BLOCK: tl.constexpr, HINTS: tl.constexpr,
):  # fmt: skip
    """Grid: (programs,). Program i reads and writes the i-th chunk of each, at most BLOCK words.

    All masks depend on arguments: no compiler can drop a load, though nothing may be stored of it.
    """
    EVICT: tl.constexpr = "evict_first" if HINTS else ""
    CACHE: tl.constexpr = ".cs" if HINTS else ""
    offs = tl.arange(0, BLOCK)
    read_from = tl.program_id(0) * read_chunk
    write_from = tl.program_id(0) * write_chunk
    read_mask = (offs < read_chunk) & (read_from + offs < read_words)
    write_mask = (offs < write_chunk) & (write_from + offs < write_words)
    x = tl.load(x_ptr + read_from + offs, mask=read_mask, other=0, eviction_policy=EVICT)
    tl.store(y_ptr + write_from + offs, x + 1, mask=write_mask, cache_modifier=CACHE)


def chunks(words: Sequence[int], block: int, sms: int) -> tuple[int, list[int]]:
    """Programs of a stream, full waves where there is one, and the words of each way's chunk."""
    programs = max(1, *(triton.cdiv(n, block) for n in words))
    if programs > sms:
        programs = triton.cdiv(programs, sms) * sms
    return programs, [triton.cdiv(triton.cdiv(n, programs), LINE_WORDS) * LINE_WORDS for n in words]


def stream(
    x: torch.Tensor, y: torch.Tensor, words: tuple[int, int], shape: Shape, sms: int
) -> Callable[[], Any]:
    """A call that reads the first words[0] of x and writes words[1] of y in one launch."""
    programs, chunk = chunks(words, shape.block, sms)
    return lambda: stream_kernel[(programs,)](
        x, y, *words, *chunk, BLOCK=shape.block, HINTS=shape.hints, num_warps=shape.warps
    )


def measure(timer: CuptiTimer, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median device time of each call, in us; one profiler session for all."""
    medians = {}
    for name, found in timer.measure(calls).items():
        if isinstance(found, MeasureError):
            raise found
        medians[name] = round(median_us(found.all_us), 3)
    return medians


def in_turn(flush: L2Flush, calls: Sequence[Callable[[], Any]], samples: int) -> list[float]:
    """Median device time of each call, in us: all samples of one, then all of the next.

    Not in rounds, as rows are timed: a stream of 2 GiB between two calls empties the TLB, and 4 MB
    then take 3.6 us where rows of that size take 2.1.
    """
    rounds = WARMUP_CALLS + samples
    for attempt in range(ATTEMPTS):
        activities: list[Activity] = []
        with recorded(activities):
            for call in calls:
                for _ in range(rounds):
                    flush()
                    mark()
                    call()
                    mark()
        try:
            spans = []
            for span in attribute(activities, MARKER, rounds * len(calls)):
                if isinstance(span, MeasureError):
                    raise span
                spans.append(span.busy_ns / 1e3)
            of_calls = [spans[i : i + rounds] for i in range(0, len(spans), rounds)]
            return [median(times[WARMUP_CALLS:]) for times in of_calls]
        except MeasureError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def floor_row(
    flush: L2Flush, x: torch.Tensor, y: torch.Tensor, read_bytes: int, samples: int
) -> list[float]:
    """The best stream's time for one read size and every write size."""
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    points = [(read_bytes // 4, write_bytes // 4) for write_bytes in AXIS]
    calls = [[stream(x, y, words, shape, sms) for shape in SHAPES] for words in points]
    screened = in_turn(flush, [c for of_point in calls for c in of_point], SCREEN_SAMPLES)
    finalists = []
    for i, of_point in enumerate(calls):
        times = screened[i * len(SHAPES) : (i + 1) * len(SHAPES)]
        ranked = sorted(range(len(SHAPES)), key=times.__getitem__)
        finalists += [of_point[k] for k in ranked[:FINALISTS]]
    final = in_turn(flush, finalists, samples)
    return [min(final[i : i + FINALISTS]) for i in range(0, len(final), FINALISTS)]


def never_falling(us: list[list[float]]) -> list[list[float]]:
    """A stream that moves more in less time is one that moves less in that time: a lower floor."""
    table = np.asarray(us)
    for axis in (0, 1):
        table = np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)
    return [[round(float(t), 3) for t in row] for row in table]


def floor_table(flush: L2Flush, device: torch.device, samples: int) -> dict[str, Any]:
    """Times in us, a list a read size, an entry a write size."""
    x, y = (torch.empty(AXIS[-1] // 4, dtype=torch.int32, device=device) for _ in range(2))
    x.random_()  # zeros may move faster than data
    for shape in SHAPES:  # compiled outside of what is timed
        stream(x, y, (LINE_WORDS, LINE_WORDS), shape, 1)()
    us = [floor_row(flush, x, y, read_bytes, samples) for read_bytes in AXIS]
    return {"read_bytes": list(AXIS), "write_bytes": list(AXIS), "us": never_falling(us)}


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
    floor = floor_table(timer.flush, device, samples)
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
            "method": "opkiln-bench calibrate: CUPTI, L2 flushed, medians, "
            f"best of {len(SHAPES)} streams",
        },
    }


def write_profile(profile: dict[str, Any], path: Path | None) -> Path:
    """To `path`, or to the user's folder under the GPU's name."""
    slug = profile["gpu"].lower().replace(" ", "-")
    path = path or user_profiles() / f"{slug}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(profile, sort_keys=False, default_flow_style=None, width=200))
    return path
