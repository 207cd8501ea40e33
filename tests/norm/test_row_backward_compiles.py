"""The kernels of the row norms' backward, compiled for sm_90 without a GPU: no spills, 16-byte
accesses, and shared memory that an SM has for as many programs as the rule counts on.
"""

import pathlib
from typing import Any

import pytest
from compiled import reports_of

BF16, F16, F32 = "bfloat16", "float16", "float32"
SM_SHARED = 232448  # bytes
ADDRESSES = 32  # bytes: a layer norm of 16384 columns has so much more than its 128 registers
ROW = [
    ["rms_norm", BF16, [4096, 512], None, None],
    ["layer_norm", BF16, [4096, 1024], None, None],
    ["layer_norm", F16, [4096, 4096], None, None],
    ["layer_norm", F16, [4096, 4096], F32, None],
    ["rms_norm", BF16, [4096, 5120], None, None],
    ["layer_norm", BF16, [4096, 8192], None, None],
    ["rms_norm", BF16, [4096, 16384], None, None],
    ["layer_norm", BF16, [4096, 16384], None, None],
    ["layer_norm", F32, [4096, 256], None, None],
    ["layer_norm", F32, [4096, 4096], None, None],
    ["layer_norm", F32, [4096, 8192], None, None],
    ["fused_add_layer_norm", BF16, [8192, 4096], None, None],
    ["fused_add_rms_norm", BF16, [8192, 8192], None, None],
    ["fused_add_layer_norm", BF16, [8192, 16384], None, None],
    ["fused_add_layer_norm", F32, [8192, 8192], None, None],
    ["ada_layer_norm", BF16, [8192, 4096], None, None],
    ["ada_layer_norm_zero", BF16, [8192, 8192], None, None],
    ["ada_layer_norm_zero", BF16, [8192, 16384], None, None],
    ["ada_layer_norm_zero", BF16, [8, 1024, 1152], None, [8, 1, 1152]],
    ["ada_layer_norm_zero", BF16, [8, 1024, 4096], None, [8, 1, 4096]],
    ["ada_layer_norm_zero", BF16, [8, 1024, 8192], None, [8, 1, 8192]],
    ["ada_layer_norm_zero", F32, [8, 1024, 4096], None, [8, 1, 4096]],
]
WIDE = [
    ["layer_norm", BF16, [4096, 32768], None, None],
    ["fused_add_rms_norm", BF16, [4096, 65536], None, None],
    ["ada_layer_norm_zero", BF16, [8, 1024, 16384], None, [8, 1, 16384]],
]
CASES = {f"{op}-{d}-{n[-1]}{f'-{w}' * bool(w)}{'-groups' * bool(m)}": [op, d, n, w, m]
         for op, d, n, w, m in (*ROW, *WIDE)}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """All kernels in one process without TRITON_INTERPRET, which would make them Python."""
    found = reports_of(
        pathlib.Path(__file__).with_name("row_backward_offline.py"), list(CASES.values())
    )
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_kernels(reports, name):
    op, _, shape, _, modulation = CASES[name]
    found = {k["name"]: k for k in reports[name]}
    kernels = {"row_backward_kernel"}
    if modulation or "ada" not in op:
        kernels.add("column_sums_kernel")
    if CASES[name] in WIDE:
        kernels.add("row_sums_kernel")
    assert found.keys() == kernels
    main = found["row_backward_kernel"]
    allowed = ADDRESSES if shape[-1] == 16384 and CASES[name] in ROW else 0
    assert max(k["spill_bytes"] for k in found.values()) <= allowed
    assert main["wide_loads"] + main["copies"] >= 2 and main["wide_stores"]
    assert main["shared"] * main["programs_per_sm"] <= SM_SHARED


@pytest.mark.parametrize("name", [n for n in CASES if "groups" not in n and "ada" not in n])
def test_loads_run_ahead_where_rows_are_not_read_again(reports, name):
    main = next(k for k in reports[name] if k["name"] == "row_backward_kernel")
    assert bool(main["copies"]) != main["again"]
