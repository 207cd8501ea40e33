"""Compile the kernels of the row norms' backward for sm_90 without a GPU.

A script: reads a JSON list of [op, dtype, shape, weight dtype or null, shape of the modulations or
null], prints for each a list with a report of every kernel that its launch would compile.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from channel_offline import Driver
from offline import tool
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import row_backward_launch
from row_backward_cases import params_of, tensors_of


def reports_of(case: list[Any]) -> list[dict[str, Any]]:
    op, dtype, shape, weight, modulation = case
    shape, shapes = tuple(shape), [tuple(modulation)] * 3 if modulation else []

    def make(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    kinds = [getattr(torch, name) if name else None for name in (dtype, weight)]
    tensors = tensors_of(op, make, shape, *kinds, shapes)
    found = []

    def record(kernel: Any, grid: Any, options: dict[str, Any], fixed: Any) -> Any:
        def launch(*args: Any) -> None:
            mocks = [a.dtype if isinstance(a, torch.Tensor) else a for a in args]
            found.append(kernel.warmup(*mocks, *fixed, grid=(1,), **options))

        return launch

    mocked: Any = row_backward_launch
    mocked.launcher = record
    mocked.multiprocessors = lambda device: 132
    call = Call.of(CATALOGUE[f"{op}_backward"], tensors, params_of(op, shape, (), shapes))
    mocked.prepare(call)(*tensors)
    tiling = mocked.plan_for(call).tiling
    told = {"again": tiling.again, "programs_per_sm": tiling.programs_per_sm}
    return [report(kernel) | told for kernel in found]


def report(kernel: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(kernel.asm["ptx"])
        log = tool("ptxas", "-v", "--gpu-name", "sm_90a", str(ptx), "-o", str(ptx) + ".cubin")
    return {
        "name": kernel.metadata.name,
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "shared": kernel.metadata.shared,
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", kernel.asm["ptx"])),
        "copies": len(re.findall(r"cp\.async\.cg", kernel.asm["ptx"])),
        "wide_stores": len(re.findall(r"st\.global[.\w:]*\.v4\.b32", kernel.asm["ptx"])),
    }


if __name__ == "__main__":
    triton.runtime.driver.set_active(Driver())
    json.dump([reports_of(case) for case in json.load(sys.stdin)], sys.stdout)
