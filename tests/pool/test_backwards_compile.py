"""The pools' backwards, compiled for sm_90 without a GPU: no spills, wide accesses."""

import pathlib
from typing import Any

import pytest
from compiled import reports_of

# What a thread reads at once, where it is not single elements.
LOADS = {
    "stem-f16": "LDG.E.64", "stem-bf16-static": "LDG.E.64",
    "stem-f32": "LDG.E.64", "mean-f16": "LDG.E.64", "mean-5x5": "LDG.E.64",
    "volume-f16": "LDG.E.64", "volume-bf16-overlap": "LDG.E.64", "channels-last": "LDG.E.128",
    "channels-last-mean": "LDG.E.128", "tokens": "LDG.E.128", "tokens-sequences": "LDG.E.128",
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    return reports_of(pathlib.Path(__file__).with_name("compile_backwards.py"))


def faults(case: str, report: dict[str, Any]) -> list[str]:
    """What is wrong with one compiled kernel."""
    counts = report["counts"]
    found = [f"{key} {report[key]}" for key in ("spill_bytes", "stack_bytes") if report[key]]
    found += [code for code in counts if code.split(".")[0] in ("LDL", "STL")]
    found += [code for code in counts if code.startswith(("ATOM", "RED"))]
    wide = any(code.startswith("STG") and ".128" in code for code in counts)
    if not wide and not case.endswith("odd"):
        found.append(f"no 16-byte store: {[c for c in counts if c.startswith('STG')]}")
    if case in LOADS and LOADS[case] not in counts:
        found.append(f"no {LOADS[case]}: {[c for c in counts if c.startswith('LDG')]}")
    return found


def test_no_spills_no_atomics_and_wide_accesses(reports):
    """One test for all kernels, so that one pytest-xdist worker compiles them, once."""
    assert {case: found for case, r in reports.items() if (found := faults(case, r))} == {}


def test_a_window_is_loaded_once_for_the_cells_near_it(reports):
    """3x3, stride 2: of two rows a vector and a window beside it, gradients and offsets, for 16
    elements; of channels four windows for four elements.
    """
    for case, loads, stores in (("stem-f16", 8, 2), ("channels-last", 8, 4)):
        counts = reports[case]["counts"]
        assert sum(n for code, n in counts.items() if code.startswith("LDG")) == loads
        assert sum(n for code, n in counts.items() if code.startswith("STG")) == stores


def test_faults_are_seen():
    report = {"spill_bytes": 8, "stack_bytes": 0, "counts": {"STG.E.64": 1, "LDL": 2, "RED.E": 1}}
    found = [f.split()[0] for f in faults("stem-f16", report)]
    assert found == ["spill_bytes", "LDL", "RED.E", "no", "no"]
