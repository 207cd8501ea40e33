"""The row norm kernel, compiled for sm_90 without a GPU: no spills, 16-byte accesses."""

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
from opkiln_norm import row_plan

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POINTERS = {F16: "*fp16", BF16: "*bf16", F32: "*fp32"}
OPTIONAL = ("w_ptr", "b_ptr", "mean_ptr", "rstd_ptr", "stride_xn", "stride_wn", "stride_bn")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def request(
    op: str, x: torch.Tensor, weight: torch.dtype | None = None, save: bool = False
) -> dict[str, Any]:
    """What offline.py compiles for this call over x's last dim; metadata is all it looks at."""
    spec = CATALOGUE[op]
    n = x.shape[-1]
    affine = [meta(n, dtype=weight or x.dtype) for _ in spec.tensors[1:]]
    call = Call.of(spec, [x, *affine], {"normalized_shape": (n,), "eps": 1e-6}, real=False)
    plan = row_plan.plan_for(call)
    center = op == "layer_norm"
    pointer = POINTERS[x.dtype]
    signature: dict[str, Any] = {
        "x_ptr": pointer,
        "y_ptr": pointer,
        "w_ptr": POINTERS[weight or x.dtype],
        "inner_sizes": ["i32"] * len(plan.inner_sizes),
        "x_strides": ["i32"] * len(plan.x_strides),
        "M": "i32",
        "n_units": "i32",
        "eps": "fp32",
    }
    signature |= {"b_ptr": signature["w_ptr"]} if center else {}
    signature |= {"rstd_ptr": "*fp32"} if save else {}
    signature |= {"mean_ptr": "*fp32"} if save and center else {}
    signature |= {"stride_xn": "i32"} if plan.stride_xn is not None else {}
    return {
        "kernel": "opkiln_norm.row_norm:row_norm_kernel",
        "signature": signature,
        "constexprs": plan.constexprs(center) | {k: None for k in OPTIONAL if k not in signature},
        "options": {"num_warps": plan.tiling.num_warps},
    }


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


RULE = {  # the regimes of row_plan.rule, for each element size
    f"{op}-{name(dtype)}-{rows}x{n}": request(op, meta(rows, n, dtype=dtype))
    for op, dtype, sizes in (
        ("rms_norm", BF16, (128, 1152, 4096, 16384)),
        ("rms_norm", F32, (128, 4096)),
        ("layer_norm", BF16, (128, 5120, 16384, 65536)),
        ("layer_norm", F32, (1152, 16384, 32768)),
    )
    for n in sizes
    for rows in ((1, 4096) if n * dtype.itemsize <= row_plan.RESIDENT_BYTES else (4096,))
}
MORE = {
    "f16": request("layer_norm", meta(4096, 8192, dtype=F16)),
    "saved-statistics": request("layer_norm", meta(4096, 8192), save=True),
    "f32-weight": request("rms_norm", meta(4096, 4096), F32),
    "bf16-weight": request("layer_norm", meta(4096, 8192, dtype=F32), BF16),
    "heads-before-tokens": request("rms_norm", meta(8, 32, 512, 128).transpose(1, 2)),
    "n-multiple-of-8-only": request("layer_norm", meta(4096, 1000)),
}
NARROW = {  # served without 16-byte loads
    "odd-n": request("layer_norm", meta(4096, 12289)),
    "column-stride": request("layer_norm", meta(4096, 512).T, save=True),
    "column-stride-head": request("rms_norm", meta(65536, 512).T),
}
TABLE = {
    f"{row['label']}-{row['op']}-{name(dtype)}": request(
        row["op"], meta(row["rows"][0], row["n"], dtype=dtype)
    )
    for row in row_plan.tuning_rows()
    for dtype in ((F16, BF16) if row["itemsize"] == 2 else (F32,))
}
WIDE = RULE | MORE | TABLE
REQUESTS = WIDE | NARROW


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """All kernels in one process without TRITON_INTERPRET, which would make them Python."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = pathlib.Path(__file__).with_name("offline.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(list(REQUESTS.values())),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(REQUESTS, json.loads(done.stdout), strict=True))


def widths(counts: dict[str, int], opcode: str) -> dict[str, int]:
    """How many accesses of each width: {"128": 4, "32": 1}."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        head, *modifiers = name.split(".")
        if head == opcode:
            width = next((m for m in modifiers if m in ("64", "128", "U16", "U8")), "32")
            found[width] = found.get(width, 0) + count
    return found


def faults(case: str, report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    counts = report["counts"]
    found = [f"{key} {report[key]}" for key in ("spill_bytes", "stack_bytes") if report[key]]
    found += [f"{code} {widths(counts, code)}" for code in ("LDL", "STL") if widths(counts, code)]
    if case in NARROW:
        return found
    loads = set(widths(counts, "LDG")) | set(widths(counts, "LDGSTS"))
    narrow_weight = {"64"} if case == "bf16-weight" else set()  # 4 of its elements a vector of x
    if not {"128"} <= loads <= {"128"} | narrow_weight:
        found.append(f"loads of {sorted(loads)} bits")
    stores = widths(counts, "STG")
    wide, narrow = stores.pop("128", 0), sum(stores.values())
    saved = {"rstd_ptr", "mean_ptr"} & REQUESTS[case]["signature"].keys()
    if not wide or narrow != len(saved):
        found.append(f"{wide} stores of 128 bits, {narrow} narrower")
    return found


def test_no_spills_and_16_byte_accesses(reports):
    """One test for all kernels, so that one pytest-xdist worker compiles them, once."""
    assert {case: f for case in REQUESTS if (f := faults(case, reports[case]))} == {}


def test_faults_are_seen():
    counts = {"LDG.E.64": 1, "LDL": 2, "STG.E.128": 1, "STG.E": 1}
    report = {"spill_bytes": 8, "stack_bytes": 0, "counts": counts}
    found = faults("f16", report)
    assert [f.split()[0] for f in found] == ["spill_bytes", "LDL", "loads", "1"]
