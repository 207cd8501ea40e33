"""The Triton backwards, compiled for sm_90 without a GPU: no spills, 16-byte loads."""

import pathlib
from typing import Any

import pytest
from compiled import reports_of

# Rows of an odd number of floats; tiles of 16 columns, an element a thread.
SINGLE = ("mhc_pre_coefficients_kernel", "pre-8-streams-f32 mhc_pre_sums_kernel")
SINGLE += ("pre-8-streams-f32 mhc_pre_gradients_kernel",)


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return reports_of(pathlib.Path(__file__).with_name("compile_backwards.py"))


def faults(name: str, report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    counts = report["counts"]
    found = [f"{key} {report[key]}" for key in ("spill_bytes", "stack_bytes") if report[key]]
    found += [code for code in counts if code.split(".")[0] in ("LDL", "STL")]
    wide = any(code.startswith(("LDG", "LDGSTS")) and ".128" in code for code in counts)
    if not wide and not name.endswith(SINGLE):
        found.append(f"no 16-byte load: {[c for c in counts if c.startswith('LDG')]}")
    return found


def test_no_spills_and_16_byte_loads(reports):
    """One test for all kernels, so that one pytest-xdist worker compiles them, once."""
    assert {name: found for name, r in reports.items() if (found := faults(name, r))} == {}


def test_faults_are_seen():
    report = {"spill_bytes": 8, "stack_bytes": 0, "counts": {"LDG.E.64": 1, "LDL": 2}}
    assert [f.split()[0] for f in faults("post", report)] == ["spill_bytes", "LDL", "no"]
