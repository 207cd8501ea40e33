"""Compile the channel norms' Triton kernels for sm_90 without a GPU.

A script: reads a JSON list of [op, dtype, shape, channels_last, tiling or null], prints for each a
list with a report of every kernel that its launch would compile, as offline.py does.
"""

import json
import pathlib
import re
import sys
import tempfile
from typing import Any

import torch
import triton
from offline import CAPABILITY, tool
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import channel_norm, channel_plan, channel_planes_launch
from opkiln_norm.channel_plan import Tiling
from triton.backends.compiler import GPUTarget

PARAMS: dict[str, Any] = {
    "batch_norm": {"training": True, "momentum": 0.1, "eps": 1e-5},
    "instance_norm": {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5},
    "batch_norm_backward": {"training": True, "output_mask": (True, True, True)},
    "group_norm": {"num_groups": 8, "eps": 1e-5},
    "group_norm_backward": {"num_groups": 8, "output_mask": (True, True, True)},
    "instance_norm_backward": {"use_input_stats": True, "output_mask": (True, True, True)},
}
OPERANDS = {"batch_norm": 4, "instance_norm": 4, "group_norm": 2, "batch_norm_backward": 3}
PLANES = {"group_norm_backward": 8, "instance_norm_backward": None}  # groups; None: one a channel


class Driver:
    """What Triton asks of a GPU before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def kernels_of(case: list[Any]) -> list[Any]:
    op, dtype, shape, last, use = case
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta").to(memory_format=memory)
    first = [x, x] if "backward" in op else [x]
    channel = torch.empty(shape[1], device="meta")
    if op in PLANES:
        statistic = torch.empty(shape[0], PLANES[op] or shape[1], device="meta")
        tensors = [*first, channel, statistic, statistic]
    else:
        tensors = [*first, *[channel] * OPERANDS[op]]
    found = []

    def record(kernel: Any, grid: int, options: dict[str, Any]) -> Any:
        def launch(*args: Any) -> None:
            mocks = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            found.append(kernel.warmup(*mocks, grid=(1,), **options))

        return launch

    for module in (channel_norm, channel_planes_launch):
        module.launcher = record
    mocked: Any = channel_norm
    mocked.multiprocessors = lambda device: 132
    call = Call.of(CATALOGUE[op], tensors, PARAMS[op], real=False)
    if use is not None:
        plan = channel_plan.ChannelPlan
        mocked_plan: Any = channel_plan
        mocked_plan.plan_of = lambda op, view, *_: plan(view, Tiling(**use), "test")
    prepare = {
        "batch_norm_backward": channel_norm.prepare_backward,
        **dict.fromkeys(PLANES, channel_planes_launch.prepare),
    }.get(op, channel_norm.prepare_forward)
    prepare(call)(*tensors)
    return found


def report(kernel: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder, "kernel.ptx")
        ptx.write_text(kernel.asm["ptx"])
        log = tool("ptxas", "-v", "--gpu-name", "sm_90a", str(ptx), "-o", str(ptx) + ".cubin")
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    wide = len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", kernel.asm["ptx"]))
    return {
        "name": kernel.metadata.name,
        "spill_bytes": spilled,
        "wide_loads": wide,
        "fused_exchanges": fused_exchanges(kernel.asm["ptx"]),
    }


def fused_exchanges(ptx: str) -> int:
    """How many products are fused with what another lane sends: the lanes' sums then differ."""
    sent, found = set(), 0
    for line in ptx.splitlines():
        names = re.findall(r"%r\d+", line)
        if "shfl.sync" in line:
            sent.add(names[0])
        found += "fma.rn" in line and not sent.isdisjoint(names[1:])
    return found


if __name__ == "__main__":
    plan_of = channel_plan.plan_of
    triton.runtime.driver.set_active(Driver())
    reports = []
    for case in json.load(sys.stdin):
        channel_plan.plan_of = plan_of
        reports.append([report(k) for k in kernels_of(case)])
    json.dump(reports, sys.stdout)
