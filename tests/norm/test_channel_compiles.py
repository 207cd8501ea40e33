"""The channel norms' Triton kernels, compiled for sm_90 without a GPU: no spills, wide loads."""

import pathlib
from typing import Any

import pytest
from compiled import reports_of
from opkiln_norm import channel_plan

LARGE = [4, 128, 1024, 1024]
STREAM = {"block_m": 1, "block_n": 4096, "num_warps": 16, "chunks": 2, "slices": 1, "stream": 2}
CASES: dict[str, list[Any]] = {
    f"{op}-{dtype}-{'x'.join(map(str, shape))}{'-last' * last}": [op, dtype, shape, last, None]
    for op in ("batch_norm", "batch_norm_backward", "group_norm", "instance_norm")
    for dtype, shape, last in (
        ("float16", [4, 128, 32, 32], False),
        ("float32", [4, 128, 32, 32], False),
        ("bfloat16", [8, 64, 32, 32], True),
    )
}
CASES |= {f"{op}-stream": [op, "float16", LARGE, False, STREAM]
          for op in ("batch_norm", "batch_norm_backward")}  # fmt: skip
# Sets that do not fit registers and are not pooled: tiles that cover the columns exactly, and not.
CASES |= {f"{op}-sliced-{dtype}-{side}": [op, dtype, [2, 8, side, side], False, None]
          for op in ("instance_norm", "group_norm") for dtype in ("bfloat16", "float32")
          for side in (256, 300)}  # fmt: skip
CASES["batch_norm-large"] = ["batch_norm", "float16", LARGE, False, None]


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """All kernels in one process without TRITON_INTERPRET, which would make them Python."""
    found = reports_of(pathlib.Path(__file__).with_name("channel_offline.py"), list(CASES.values()))
    return dict(zip(CASES, found, strict=True))


def test_no_spills_and_16_byte_loads(reports):
    assert all(reports.values())
    assert [c for c, ks in reports.items() if any(k["spill_bytes"] for k in ks)] == []
    assert [c for c, ks in reports.items() if not any(k["wide_loads"] for k in ks)] == []


def test_sliced_cases_are_sliced(reports):
    sliced = [{k["name"] for k in ks} for case, ks in reports.items() if "-sliced-" in case]
    assert len(sliced) == 8 and all({"moments_kernel", "apply_kernel"} <= names for names in sliced)


def test_stream_is_one_kernel(reports):
    for case in ("batch_norm-stream", "batch_norm_backward-stream"):
        assert len(reports[case]) == 1 and "stream" in reports[case][0]["name"]


def test_table_has_provenance():
    table = channel_plan.tuning_table()
    for row in table["rows"] + table["cuda_rows"]:
        assert set(row["measured"]) == {"gpu", "date", "commit", "us"}
