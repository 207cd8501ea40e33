"""The convolution kernels, compiled for sm_90: no spills, matrix units, wide copies."""

import pathlib
from typing import Any

import pytest
from compiled import reports_of

WGMMA = ("packed", "pointwise", "gather-static")  # cases that start so, but for pack
MMA = ("gather-few", "gather-one")  # tiles of less than 64 channels
COPIES = ("packed", "pointwise")  # whose loads are asynchronous copies of 16 bytes


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return reports_of(pathlib.Path(__file__).with_name("compile_convs.py"))


def faults(case: str, report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    codes = list(report["counts"])
    found = [f"{key} {report[key]}" for key in ("spill_bytes", "stack_bytes") if report[key]]
    found += [code for code in codes if code.split(".")[0] in ("LDL", "STL")]
    if case.startswith(WGMMA) and not any(code.startswith("HGMMA") for code in codes):
        found.append("no HGMMA")
    if case.startswith(MMA) and not any(code.startswith("HMMA") for code in codes):
        found.append("no HMMA")
    found += [code for code in codes if "16x2" in code]  # see tilings.opaque
    if case.startswith(COPIES):
        copies = [code for code in codes if code.startswith("LDGSTS")]
        found += [f"narrow {code}" for code in copies if ".128" not in code]
        found += [] if copies else ["no LDGSTS"]
    return found


def test_no_spills_matrix_units_and_wide_copies(reports):
    """One test for all kernels, so that one pytest-xdist worker compiles them, once."""
    assert {case: found for case, r in reports.items() if (found := faults(case, r))} == {}


def test_stores_are_16_bytes_wide(reports):
    for case in ("packed-bf16-static", "pointwise-static", "gather-static", "pack"):
        stores = [code for code in reports[case]["counts"] if code.startswith("STG")]
        assert all(".128" in code or code in ("STG.E", "STG.E.STRONG.GPU") for code in stores), case


def test_faults_are_seen():
    report = {"spill_bytes": 8, "stack_bytes": 0, "counts": {"LDGSTS.E.64": 1, "LDL": 2}}
    assert [f.split()[0] for f in faults("packed", report)] == [
        "spill_bytes", "LDL", "no", "narrow",
    ]  # fmt: skip
