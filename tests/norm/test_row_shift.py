"""Row norms whose rows lie across vectors of 16 bytes (row_shift.cuh)."""

import dataclasses
import pathlib
import re
import subprocess
from typing import Any

import pytest
import torch
from norm.row_cases import BF16, DEVICE, F16, F32, random, run
from norm.test_row_cluster import ON_GPU, OPS, make_call, operands, params
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_norm import row_cluster, row_plan
from opkiln_norm.row_cluster import ClusterTiling, most_vectors

MANY = row_plan.FEW_ROWS + 1


@pytest.fixture(autouse=True)
def rule_alone(monkeypatch):
    monkeypatch.setattr(row_cluster, "cluster_rows", list)
    monkeypatch.setattr(row_plan, "tuning_rows", list)


def empty(rows: int, n: int, dtype: torch.dtype = F16) -> torch.Tensor:
    return torch.empty(rows, n, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("n", "values", "most"), [(16, 8, 2), (17, 8, 3), (23, 8, 4), (6, 4, 3)])
def test_most_vectors(n, values, most):
    """The most that a row of n elements touches, over all places where it may start."""
    starts = range(0, n * values, n)
    touched = [(s + n - 1) // values - s // values + 1 for s in starts]
    assert most_vectors(n, values) >= max(touched)
    assert most_vectors(n, values) == most


RULED = {  # id: (op, rows, columns of f16, threads, or None for Triton's)
    "12289": ("rms_norm", MANY, 12289, 416),
    "even": ("rms_norm", MANY, 12290, 416),
    "centred": ("layer_norm", MANY, 12289, 416),
    "added": ("fused_add_rms_norm", MANY, 12289, 416),
    "longest-ring": ("layer_norm", MANY, 13305, 416),
    "too-long-for-two-rings": ("layer_norm", MANY, 13313, 576),
    "shortest-ring": ("fused_add_rms_norm", MANY, 8193, 288),
    "too-short-for-two-rings": ("fused_add_rms_norm", MANY, 8185, 512),
    "added-and-centred": ("fused_add_layer_norm", MANY, 12289, 800),
    "few": ("rms_norm", MANY - 1, 12289, None),
    "short": ("rms_norm", MANY, 4095, None),
    "shortest": ("rms_norm", MANY, 4097, 192),
    "longest": ("rms_norm", MANY, 13817, 576),
    "longer": ("rms_norm", MANY, 13825, None),
}


@pytest.mark.parametrize("case", RULED.values(), ids=RULED)
def test_rule(case):
    op, rows, n, threads = case
    plan = row_cluster.plan_for(make_call(op, empty(rows, n), F16, F16))
    assert (plan and plan.tiling.threads) == threads
    if plan:
        assert (plan.shift, plan.even, plan.tiling.cluster) == (True, False, 1)
        lanes, most = plan.tiling.lanes, row_cluster.SHIFT_RULES[op]
        if plan.tiling.ring:
            most = row_cluster.SHIFT_RING
        room = most.threads * most.resident  # threads an SM has registers for
        assert room - threads < threads * plan.tiling.resident <= room
        assert lanes * (plan.tiling.vectors - 1) < -(-n // 8)  # all strips but the last are full
        assert lanes * plan.tiling.vectors >= most_vectors(n, 8)


LEFT = {  # id: call of rms_norm over 12289 columns that the Triton kernel serves
    "batch-invariant": lambda: make_call(
        "rms_norm", empty(MANY, 12289), F16, policy=Policy(batch_invariant=True)
    ),
    "gaps": lambda: make_call("rms_norm", empty(MANY, 12290)[:, :12289], F16),
    "every-second": lambda: make_call("rms_norm", empty(2 * MANY, 12289)[::2], F16),
    "wider-weight": lambda: make_call("rms_norm", empty(MANY, 12289), F32),
    "unaligned": lambda: make_call(
        "rms_norm", empty(MANY + 1, 12289).flatten()[1:][: MANY * 12289].view(MANY, 12289), F16
    ),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_left_to_triton(make):
    assert row_cluster.plan_for(make()) is None


def test_a_tiling_whose_last_strips_are_empty_is_refused(monkeypatch):
    row = {"op": "rms_norm", "itemsize": 2, "n": 12289, "rows": [1, None], "label": "test"}
    for vectors, served in ((4, True), (5, False)):
        use = dataclasses.asdict(ClusterTiling(1, 416, vectors, weight_at=1))
        monkeypatch.setattr(row_cluster, "cluster_rows", lambda use=use: [{**row, "use": use}])
        plan = row_cluster.plan_for(make_call("rms_norm", empty(MANY, 12289), F16))
        assert (plan is not None) == served


@pytest.mark.parametrize(("n", "clusters"), [(12289, 256), (12290, 260), (12292, 262)])
def test_all_rows_of_a_cta_start_alike(n, clusters, monkeypatch):
    """The persistent grid is a multiple of the rows after which one starts as the first does."""
    grids: list[int] = []

    class Recorder:
        def configure(self, grid: Any, *_: Any) -> Any:
            grids.append(grid[0])
            return print

    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    monkeypatch.setattr(cuda, "load", lambda *_: Recorder())
    monkeypatch.setattr(row_cluster, "max_clusters", lambda kernel, plan: 263)
    row_cluster.prepare(make_call("rms_norm", empty(700, n), F16))
    assert grids[-1] == clusters and clusters * n % 8 == 0


@OPS
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.skipif(not cuda.has_compiler(), reason="needs cuda-core and NVRTC")
def test_compiles_without_a_stack(op, dtype, monkeypatch, tmp_path):
    import triton

    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path))
    call = make_call(op, empty(MANY, 12289 * 2 // dtype.itemsize | 1, dtype), dtype, dtype)
    plan = row_cluster.plan_for(call)
    assert (plan.tiling.ring > 0) == (dtype != F32 and op != "fused_add_layer_norm")
    path = tmp_path / "kernel.cubin"
    source = row_cluster.source(plan.tiling.kernel)
    path.write_bytes(cuda.compile_cubin(source, "sm_90a", plan.macros(call)))
    folder = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = [str(folder / "cuobjdump"), "--dump-resource-usage", str(path)]
    said = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"STACK:(\d+)", said) == ["0"]


@ON_GPU
@OPS
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("extra", [1, 2, 7])
@pytest.mark.parametrize("size", [row_cluster.SHIFT_BYTES, 2 * 12288])
def test_results(op, dtype, extra, size):
    """More rows than run at once, of every shift."""
    n = size // dtype.itemsize + extra
    x = random(1100, n, dtype=dtype)
    tensors = operands(op, x, dtype, dtype)
    assert row_cluster.prepare(Call.of(CATALOGUE[op], tensors, params(n))) is not None
    run(op, tensors, params(n))
