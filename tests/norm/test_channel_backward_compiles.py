"""The kernels of group_norm_backward and instance_norm_backward, compiled for sm_90 without a GPU;
and that no lane's sum of products is rounded differently from its neighbour's.
"""

import pathlib
from typing import Any

import pytest
from compiled import reports_of

KERNELS = {  # of groups in registers, and of larger ones
    False: {"planes_backward_kernel", "finish_kernel"},
    True: {"sums_kernel", "finish_kernel", "planes_gradient_kernel"},
}
CASES: dict[str, tuple[bool, list[Any]]] = {
    f"{op}-{dtype}-{'x'.join(map(str, shape))}{'-last' * last}": (
        sliced,
        [f"{op}_backward", dtype, shape, last, None],
    )
    for op in ("group_norm", "instance_norm")
    for dtype, shape, last, sliced in (
        ("float16", [4, 128, 16, 16], False, False),
        ("bfloat16", [4, 64, 16, 16], True, False),
        ("float32", [4, 64, 16, 16], False, False),
        ("float16", [2, 64, 256, 256], False, True),
        ("bfloat16", [2, 64, 256, 256], True, True),
        ("float32", [2, 64, 251, 251], False, True),
    )
}
# Integer arguments of 1, which Triton compiles in: planes of one slice each; and all counts 1.
ONES = {
    f"{op}-{'x'.join(map(str, shape))}": [op, "float16", shape, False, None]
    for op in ("instance_norm", "group_norm", "batch_norm_backward", "instance_norm_backward",
               "group_norm_backward")
    for shape in ([16, 1024, 160, 128], [1, 8, 256, 256], [1, 1, 256, 256])
    if "group" not in op or shape[1] > 1
}  # fmt: skip
# One value a lane in a sum over a warp: here a plain product would be fused with the exchange.
NARROW = {
    f"{op}-{dtype}": [op, dtype, [64, 8, 7], False, None]
    for op in ("instance_norm", "group_norm", "batch_norm", "batch_norm_backward",
               "instance_norm_backward", "group_norm_backward")
    for dtype in ("bfloat16", "float32")
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
    """All kernels in one process without TRITON_INTERPRET, which would make them Python."""
    cases = {name: case for name, (_, case) in CASES.items()} | NARROW | ONES
    found = reports_of(pathlib.Path(__file__).with_name("channel_offline.py"), list(cases.values()))
    return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_kernels_spills_and_loads(reports, name):
    found = {k["name"]: k for k in reports[name]}
    assert set(found) == KERNELS[CASES[name][0]]
    assert not any(k["spill_bytes"] for k in found.values())
    if "251" not in name:  # 63001 columns: no row starts at a multiple of 16 bytes
        reads = [k for n, k in found.items() if n != "finish_kernel"]
        assert all(k["wide_loads"] for k in reads)


@pytest.mark.parametrize("name", [*CASES, *NARROW, *ONES])
def test_lanes_sums_are_equal(reports, name):
    assert [k["name"] for k in reports[name] if k["fused_exchanges"]] == []
