"""The row norm kernel, compiled for sm_90 without a GPU: no spills, 16-byte accesses."""

import pathlib
from typing import Any

import pytest
import torch
from compiled import reports_of
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_norm import row_plan
from opkiln_norm.row_norm import OPERANDS, RESULTS, row_norm_kernel

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POINTERS = {F16: "*fp16", BF16: "*bf16", F32: "*fp32"}
AFFINE = {"rms_norm": ("w",), "layer_norm": ("w", "b")}
MODULATION = {"ada_layer_norm": ("w", "b"), "ada_layer_norm_zero": ("w", "b", "g")}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row_call(
    op: str,
    x: torch.Tensor,
    weight: torch.dtype | None = None,
    save: bool = False,
    invariant: bool = False,
) -> Call:
    """A call of `op` over x's last dim; metadata is all that is looked at."""
    spec = CATALOGUE[op]
    if op in MODULATION:
        others = [meta(*x.shape, dtype=x.dtype)] * len(MODULATION[op])
        params: dict[str, Any] = {"eps": 1e-6, "scale_offset": 1.0}
    else:
        norm = op.removeprefix("fused_add_").removesuffix("_inplace")
        affine = [meta(x.shape[-1], dtype=weight or x.dtype)] * len(AFFINE[norm])
        others = affine if op == norm else [x, *affine]
        params = {"normalized_shape": (x.shape[-1],), "eps": 1e-6}
    policy = Policy(batch_invariant=invariant)
    return Call.of(spec, [x, *others], params, policy=policy, needs_grad=save, real=False)


def request(
    op: str,
    x: torch.Tensor,
    weight: torch.dtype | None = None,
    save: bool = False,
    invariant: bool = False,
) -> dict[str, Any]:
    """What offline.py compiles for this call."""
    call = row_call(op, x, weight, save, invariant)
    plan = row_plan.plan_for(call)
    present = [getattr(call.tensors, n, None) for group in OPERANDS for n in group]
    names = [letter for letter, group in zip("xrwbg", OPERANDS, strict=True) for _ in group]
    types = {
        f"{letter}_ptr": POINTERS[m.dtype] for letter, m in zip(names, present, strict=True) if m
    }
    outputs = [o.name for o, here in zip(call.spec.outputs, call.present, strict=True) if here]
    for argument, output in zip(("y_ptr", "s_ptr"), RESULTS, strict=False):
        types |= {argument: POINTERS[x.dtype]} if output in outputs else {}
    types |= {f"{n}_ptr": "*fp32" for n in ("mean", "rstd") if n in outputs}
    constexprs = plan.constexprs(call)
    scalars = [n for n in row_norm_kernel.arg_names[9:] if n not in constexprs]
    for argument, value in zip(scalars, plan.arguments(call.params), strict=True):
        if isinstance(value, tuple):
            types[argument] = ["i32"] * len(value)
        elif value is not None:
            types[argument] = "fp32" if isinstance(value, float) else "i32"
    absent = [n for n in row_norm_kernel.arg_names if n not in types and n not in constexprs]
    return {
        "kernel": "opkiln_norm.row_norm:row_norm_kernel",
        "signature": types,
        "constexprs": constexprs | dict.fromkeys(absent),
        "options": plan.options,
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
FUSED = {
    f"{op}-{name(dtype)}-{rows}x{n}": request(op, meta(rows, n, dtype=dtype))
    for op, sizes in (
        ("fused_add_rms_norm", (4096, 16384)),
        ("fused_add_layer_norm", (8192, 65536)),
        ("fused_add_layer_norm_inplace", (4096,)),
        ("ada_layer_norm", (1152, 4096)),
        ("ada_layer_norm_zero", (1152, 4096, 16384)),
    )
    for n in sizes
    for rows, dtype in ((1, BF16), (4096, BF16), (4096, F32))
    if rows > 1 or n <= 16384
}
MORE = {
    "f16": request("layer_norm", meta(4096, 8192, dtype=F16)),
    "saved-statistics": request("layer_norm", meta(4096, 8192), save=True),
    "f32-weight": request("rms_norm", meta(4096, 4096), F32),
    "bf16-weight": request("layer_norm", meta(4096, 8192, dtype=F32), BF16),
    "ada-saved-statistics": request("ada_layer_norm", meta(4096, 4096), save=True),
    "heads-before-tokens": request("rms_norm", meta(8, 32, 512, 128).transpose(1, 2)),
    "n-multiple-of-8-only": request("layer_norm", meta(4096, 1000)),
}
NARROW = {  # served without 16-byte loads
    "odd-n-invariant": request("layer_norm", meta(4096, 12289), invariant=True),
    "odd-n-few": request("layer_norm", meta(1, 12289)),
    "column-stride": request("layer_norm", meta(4096, 512).T, save=True),
    "column-stride-head": request("rms_norm", meta(65536, 512).T),
}
SHIFTED = {  # by vectors, but for the two edges of a row and a weight that lies elsewhere
    f"shifted-{op}-{name(dtype)}-{n}": request(op, meta(4096, n, dtype=dtype))
    for op, dtype, n in (
        ("rms_norm", BF16, 12289),
        ("layer_norm", F16, 3001),
        ("layer_norm", F32, 1001),
        ("layer_norm", BF16, 32761),
        ("fused_add_layer_norm", BF16, 5121),
        ("fused_add_rms_norm", BF16, 16377),
        ("ada_layer_norm_zero", BF16, 5121),
    )
}
TABLE = {
    f"{row['label']}-{row['op']}-{name(dtype)}": request(
        row["op"], meta(row["rows"][0], row["n"], dtype=dtype)
    )
    for row in row_plan.tuning_rows()
    for dtype in ((F16, BF16) if row["itemsize"] == 2 else (F32,))
}
WIDE = RULE | FUSED | MORE | TABLE
REQUESTS = WIDE | NARROW | SHIFTED


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """All kernels in one process without TRITON_INTERPRET, which would make them Python."""
    found = reports_of(pathlib.Path(__file__).with_name("offline.py"), list(REQUESTS.values()))
    return dict(zip(REQUESTS, found, strict=True))


def widths(counts: dict[str, int], opcode: str) -> dict[str, int]:
    """How many accesses of each width: {"128": 4, "32": 1}."""
    found: dict[str, int] = {}
    for name, count in counts.items():
        head, *modifiers = name.split(".")
        if head == opcode:
            width = next((m for m in modifiers if m in ("64", "128", "U16", "U8")), "32")
            found[width] = found.get(width, 0) + count
    return found


def vector_bits(case: str) -> str:
    """What a thread has of a tile to load at once: less than 128 bits where a tiling says so."""
    asked, itemsize = REQUESTS[case], 4 if REQUESTS[case]["signature"]["x_ptr"] == "*fp32" else 2
    tile = asked["constexprs"]["BLOCK_M"] * asked["constexprs"]["BLOCK_N"] * itemsize * 8
    return str(min(tile // (32 * asked["options"]["num_warps"]), 128))


def faults(case: str, report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    counts = report["counts"]
    found = [f"{key} {report[key]}" for key in ("spill_bytes", "stack_bytes") if report[key]]
    found += [f"{code} {widths(counts, code)}" for code in ("LDL", "STL") if widths(counts, code)]
    if case in NARROW:
        return found
    if case in SHIFTED:
        vectors = REQUESTS[case]["constexprs"]["CHUNKS"]
        wide = [widths(counts, code).get("128", 0) for code in ("LDG", "STG")]
        return [*found, *([f"{wide} accesses of 128 bits"] if min(wide) < vectors else [])]
    loads = set(widths(counts, "LDG")) | set(widths(counts, "LDGSTS"))
    bits = vector_bits(case) if case in TABLE else "128"
    narrow_weight = {"64"} if case == "bf16-weight" else set()  # 4 of its elements a vector of x
    if not {bits} <= loads <= {bits} | narrow_weight:
        found.append(f"loads of {sorted(loads)} bits")
    stores = widths(counts, "STG")
    wide, narrow = stores.pop(bits, 0), sum(stores.values())
    saved = {"rstd_ptr", "mean_ptr"} & REQUESTS[case]["signature"].keys()
    if not wide or narrow != len(saved):
        found.append(f"{wide} stores of {bits} bits, {narrow} narrower")
    return found


def test_no_spills_and_16_byte_accesses(reports):
    """One test for all kernels, so that one pytest-xdist worker compiles them, once."""
    assert {case: f for case in REQUESTS if (f := faults(case, reports[case]))} == {}


def test_faults_are_seen():
    counts = {"LDG.E.64": 1, "LDL": 2, "STG.E.128": 1, "STG.E": 1}
    report = {"spill_bytes": 8, "stack_bytes": 0, "counts": counts}
    found = faults("f16", report)
    assert [f.split()[0] for f in found] == ["spill_bytes", "LDL", "loads", "1"]
