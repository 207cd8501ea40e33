"""The pooling kernels, compiled for sm_90 without a GPU: no spills, wide loads where rows allow."""

import pathlib
from typing import Any

import pytest
from compiled import reports_of


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return reports_of(pathlib.Path(__file__).with_name("compile_pools.py"))


def faults(case: str, report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    counts = report["counts"]
    found = [f"{key} {report[key]}" for key in ("spill_bytes", "stack_bytes") if report[key]]
    found += [code for code in counts if code.split(".")[0] in ("LDL", "STL")]
    wide = any(code.startswith("LDG") and ".128" in code for code in counts)
    # A warp that takes one row of 64 columns at a time loads 4 bytes a thread.
    if not wide and not case.endswith(("odd", "odd-rows", "by-row")):
        found.append(f"no 16-byte load: {[c for c in counts if c.startswith('LDG')]}")
    return found


def test_no_spills_and_16_byte_loads(reports):
    """One test for all kernels, so that one pytest-xdist worker compiles them, once."""
    assert {case: found for case, r in reports.items() if (found := faults(case, r))} == {}


def test_maxima_of_16_bits_stay_packed(reports):
    """Two maxima an instruction, and no conversion to f32: a third of the instructions."""
    counts = reports["patch-f16"]["counts"]
    assert counts.get("HMNMX2.NAN", 0) >= 8
    assert not [code for code in counts if code.startswith(("F2F", "HADD2"))]


def test_argmax_of_16_bits_is_packed(reports):
    """Two values an instruction in every kernel: what costs least is what was written."""
    cases = [case for case in reports if case.startswith("table-")]
    for case in ("patch-f16-indices", "patch-volume", "plane-odd", "strip-steps", *cases):
        counts = reports[case]["counts"]
        packed = sum(n for code, n in counts.items() if code.startswith("HSET2"))
        assert (case, packed) > (case, 0)
        assert (case, [code for code in counts if code.startswith("FSETP")]) == (case, [])


def test_faults_are_seen():
    report = {"spill_bytes": 8, "stack_bytes": 0, "counts": {"LDG.E.64": 1, "LDL": 2}}
    assert [f.split()[0] for f in faults("patch", report)] == ["spill_bytes", "LDL", "no"]
