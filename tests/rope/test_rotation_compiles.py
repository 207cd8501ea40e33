"""The rotation kernel, compiled for sm_90 without a GPU: no spills, 16-byte accesses, and the pairs
never pass through shared memory.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_rope.rotation import rotation_kernel
from opkiln_rope.rotation_plan import plan_for

SCRIPT = pathlib.Path(__file__).parents[1] / "norm" / "offline.py"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POINTERS = {F16: "*fp16", BF16: "*bf16", F32: "*fp32"}
ROWS = {
    "neox": ("rope_neox", (2, 2048, 32, 128), F16),
    "non-neox": ("rope_non_neox", (2, 2048, 32, 128), BF16),
    "neox-1d": ("rope_neox", (2048, 64), F16),
    "non-neox-1d": ("rope_non_neox", (2048, 64), F16),
    "neox-f32": ("rope_neox", (2, 64, 8, 64), F32),
    "position-ids": ("rope_neox_position_ids", (2048, 32, 128), F16),
}


def request(op: str, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """What offline.py compiles for this call."""
    params: dict[str, Any] = dict(base=1e4, rotary_dim=shape[-1], offset=0)
    tensors = [torch.empty(shape, dtype=dtype, device="meta")]
    if op == "rope_neox_position_ids":
        tensors.append(torch.empty(shape[0], dtype=torch.int32, device="meta"))
        params = dict(max_position=4096, base=1e4, rotary_dim=shape[-1])
    plan = plan_for(Call.of(CATALOGUE[op], tensors, params, real=False))
    constexprs = plan.constexprs()
    types: dict[str, Any] = dict(x_ptr=POINTERS[dtype], out_ptr=POINTERS[dtype])
    types |= dict(cos_ptr="*fp32", sin_ptr="*fp32")
    if len(tensors) > 1:
        types["ids_ptr"] = "*i32"
    scalars = [n for n in rotation_kernel.arg_names[5:] if n not in constexprs]
    for name, value in zip(scalars, plan.sizes, strict=True):
        if value is not None:
            types[name] = ["i32"] * 3 if isinstance(value, tuple) else "i32"
    absent = [n for n in rotation_kernel.arg_names if n not in types and n not in constexprs]
    return {
        "kernel": "opkiln_rope.rotation:rotation_kernel",
        "signature": types,
        "constexprs": constexprs | dict.fromkeys(absent),
        "options": {"num_warps": plan.tiling.num_warps},
    }


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """The compiled kernels; in a process of its own, since the interpreter is on in this one."""
    requests = [request(*row) for row in ROWS.values()]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(requests), capture_output=True, text=True,
        env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(ROWS, json.loads(done.stdout), strict=True))


def faults(report: dict[str, Any]) -> list[str]:
    found = [
        f"{k} {report[k]}" for k in ("spill_bytes", "stack_bytes", "shared_bytes") if report[k]
    ]
    for code in report["counts"]:
        one_id = code == "LDG.E" and report["counts"][code] == 1
        if code.startswith(("LDG", "STG")) and "128" not in code and not one_id:
            found.append(code)
    return found


def test_no_spills_and_16_byte_accesses(reports):
    """One test for all kernels, so that one pytest-xdist worker compiles them, once."""
    assert {row: f for row in ROWS if (f := faults(reports[row]))} == {}


def test_faults_are_seen():
    report = {"spill_bytes": 8, "stack_bytes": 0, "shared_bytes": 64, "counts": {"STG.E": 1}}
    assert len(faults(report)) == 3
