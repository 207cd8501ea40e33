"""The rotation kernel, compiled for sm_90 without a GPU: no spills, all of x asked for first, in
16-byte accesses (8 where there is little to do), and the pairs never pass through shared memory.
"""

import pathlib
from typing import Any

import pytest
import torch
from compiled import POINTERS, reports_of
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_rope.rotation import rotation_kernel
from opkiln_rope.rotation_plan import plan_for

SCRIPT = pathlib.Path(__file__).parent / "rotation_offline.py"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ROWS = {
    "neox": ("rope_neox", (2, 2048, 32, 128), F16),
    "non-neox": ("rope_non_neox", (2, 2048, 32, 128), BF16),
    "neox-1d": ("rope_neox", (4096, 128), BF16),
    "non-neox-1d": ("rope_non_neox", (4096, 128), F16),
    "neox-f32": ("rope_neox", (2, 2048, 8, 64), F32),
    "position-ids": ("rope_neox_position_ids", (2048, 32, 128), F16),
}
STRIDED = {  # not in 16-byte accesses
    "step-2": ("rope_neox", (2, 2048, 32, 128), F16, 2),
    "masks": ("rope_non_neox", (2, 2048, 33, 96), BF16, 2),
}


def request(op: str, shape: tuple[int, ...], dtype: torch.dtype, step: int = 1) -> dict[str, Any]:
    """What offline.py compiles for this call; step: between the channels."""
    params: dict[str, Any] = dict(base=1e4, rotary_dim=shape[-1], offset=0)
    wide = (*shape[:-1], step * shape[-1])
    tensors = [torch.empty(wide, dtype=dtype, device="meta")[..., ::step]]
    if op == "rope_neox_position_ids":
        tensors.append(torch.empty(shape[0], dtype=torch.int32, device="meta"))
        params = dict(max_position=4096, base=1e4, rotary_dim=shape[-1])
    plan = plan_for(Call.of(CATALOGUE[op], tensors, params, real=False))
    constexprs = plan.constexprs()
    types: dict[str, Any] = dict(x_ptr=POINTERS[dtype], out_ptr=POINTERS[dtype])
    types["turns_ptr"] = "*i32"
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
        "options": plan.options(),
    }


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """The compiled kernels; in a process of its own, since the interpreter is on in this one."""
    rows = ROWS | STRIDED
    requests = [request(*row) for row in rows.values()]
    return dict(zip(rows, reports_of(SCRIPT, requests), strict=True))


WORDS = 2  # loads of frequencies that a thread has one or two of
ANGLES = 4 * 64  # bytes: cosines of a token go from those who computed them to all, then sines


def faults(report: dict[str, Any], ids: int = 0, bits: int = 128) -> list[str]:
    found = [f"{k} {report[k]}" for k in ("spill_bytes", "stack_bytes") if report[k]]
    if report["shared_bytes"] > ANGLES:
        found.append(f"shared_bytes {report['shared_bytes']}")
    narrow = {
        code: n
        for code, n in report["counts"].items()
        if code.startswith(("LDG", "STG")) and str(bits) not in code
    }
    loads = sum(n for code, n in narrow.items() if code.startswith("LDG"))
    if loads > WORDS + ids or loads < sum(narrow.values()):
        found.append(f"narrow {narrow}")
    opcodes = [code.split(".")[0] for code in report["opcodes"]]
    steps = report["counts"][f"STG.E.{bits}"]  # as many vectors are loaded
    before_barrier = opcodes[: opcodes.index("BAR")].count("LDG")
    if before_barrier != steps:
        found.append(f"{before_barrier} loads before the barrier, {steps} stores")
    return found


def test_no_spills_and_wide_accesses(reports):
    """One test for all kernels, so that one pytest-xdist worker compiles them, once."""
    found = {
        row: faults(reports[row], row == "position-ids", 64 if row == "neox-1d" else 128)
        for row in ROWS
    }
    assert found == {row: [] for row in ROWS}
    assert [reports[r]["spill_bytes"] for r in STRIDED] == [0, 0]


def test_faults_are_seen():
    report = {
        "spill_bytes": 8,
        "stack_bytes": 0,
        "shared_bytes": 1024,
        "counts": {"STG.E": 1, "LDG.E.128": 2, "STG.E.128": 2},
        "opcodes": ["LDG.E.128", "BAR.SYNC", "LDG.E.128", "STG.E", "STG.E.128", "STG.E.128"],
    }
    assert len(faults(report)) == 4
