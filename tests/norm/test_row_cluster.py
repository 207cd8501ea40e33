"""The cluster kernel of the row norms: its plans and launch arguments; its results on a GPU."""

import dataclasses
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from norm.row_cases import BF16, DEVICE, F16, F32, random, run
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_norm import row_cluster, row_plan
from opkiln_norm.row_cluster import ClusterTiling

DECODE = ClusterTiling(2, 64, 1, weight_at=1)
LONG = ClusterTiling(2, 64, 2, persistent=True, weight_at=2, prefetch=True)
RING = ClusterTiling(2, 64, 2, persistent=True, weight_at=1, ring=3)
RING_ALONE = dataclasses.replace(RING, cluster=1, ring=2, stream=True)
COPIES = ClusterTiling(1, 128, 4, weight_at=1, copies=2)
OPS = pytest.mark.parametrize("op", row_cluster.OPS)
PLAIN = pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or cuda.why_not(torch.device("cuda", 0), "") is not None,
    reason="needs a GPU of compute capability 9.0 and cuda-core",
)


@pytest.fixture
def use_tiling(monkeypatch):
    """Put one row into the cluster table, for any number of rows."""

    def put(op: str, itemsize: int, n: int, tiling: ClusterTiling) -> None:
        use = dataclasses.asdict(tiling)
        row = {"op": op, "itemsize": itemsize, "n": n, "rows": [1, None], "label": "test"}
        monkeypatch.setattr(row_cluster, "cluster_rows", lambda: [{**row, "use": use}])

    return put


def make_call(op: str, x: torch.Tensor, weight: Any = F32, bias: Any = F32, **how: Any) -> Call:
    return Call.of(CATALOGUE[op], operands(op, x, weight, bias), params(x.shape[-1]), **how)


def operands(op: str, x: torch.Tensor, weight: Any = F32, bias: Any = F32) -> list[Any]:
    names = CATALOGUE[op].tensor_names
    kinds = {"weight": weight, "bias": bias}
    affine = [
        None if kinds[n] is None else random(x.shape[-1], dtype=kinds[n])
        for n in names
        if n in kinds
    ]
    return [x, *[torch.randn_like(x)] * ("residual" in names), *affine]


def params(n: int) -> dict[str, Any]:
    return {"normalized_shape": (n,), "eps": 1e-5}


TAKEN = {  # id: (input, tiling, rows, x_stride, even, dynamic shared memory)
    "decode": (lambda: random(1, 1024, dtype=F16), DECODE, 1, 0, True, 0),
    "shared-weight": (lambda: random(3, 1024, dtype=BF16), LONG, 3, 1024, False, 32 * 128),
    "row-slice": (lambda: random(6, 1024, dtype=F16)[::2], DECODE, 3, 2048, True, 0),
    "two-leading-dims": (lambda: random(2, 3, 512), DECODE, 6, 512, True, 0),
    "no-leading-dim": (lambda: random(512), DECODE, 1, 0, True, 0),
    "copies": (lambda: random(6, 4096, dtype=F16)[::2], COPIES, 3, 8192, True, 0),
}


@OPS
@pytest.mark.parametrize("case", TAKEN.values(), ids=TAKEN)
def test_plan(op, case, use_tiling):
    make, tiling, rows, x_stride, even, shared = case
    x = make()
    use_tiling(op, x.dtype.itemsize, x.shape[-1], tiling)
    plan = row_cluster.plan_for(make_call(op, x))
    assert (plan.tiling, plan.source) == (tiling, "test")
    found = (plan.rows, plan.x_stride, plan.even, plan.shared_bytes)
    affines = 1 + ("layer_norm" in op)  # that lie in shared memory
    assert found == (rows, x_stride, even, shared * affines)


LEFT = {  # id: (call of rms_norm or layer_norm over 1024 columns that the Triton kernel serves)
    "column-stride": lambda: make_call("rms_norm", random(2, 2048, dtype=F16)[:, ::2]),
    "odd-pitch": lambda: make_call("rms_norm", random(2, 1028, dtype=F16)[:, :1024]),
    "unaligned": lambda: make_call("rms_norm", random(2056, dtype=F16)[1:2049].view(2, 1024)),
    "two-row-strides": lambda: make_call("rms_norm", random(3, 4, 1024, dtype=F16)[:, :2]),
    "weight-and-bias-differ": lambda: make_call("layer_norm", random(2, 1024, dtype=F16), F16, F32),
    "not-in-the-table": lambda: make_call("rms_norm", random(2, 512, dtype=F16)),
    "other-element-size": lambda: make_call("rms_norm", random(2, 1024)),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_left_to_triton(make, use_tiling):
    call = make()
    use_tiling(call.spec.name, 2, 1024, DECODE)
    assert row_cluster.plan_for(call) is None
    assert row_cluster.prepare(call) is None


def test_too_long_for_the_cluster_and_other_ops(use_tiling):
    use_tiling("rms_norm", 2, 1032, DECODE)
    assert row_cluster.plan_for(make_call("rms_norm", random(2, 1032, dtype=F16))) is None
    use_tiling("rms_norm", 2, 4088, COPIES)  # row_decode.cu takes rows that fill it
    assert row_cluster.plan_for(make_call("rms_norm", random(2, 4088, dtype=F16))) is None
    for wrong in ({"copies": 3}, {"vectors": 2, "cluster": 2}, {"threads": 96, "copies": 4}):
        tiling = dataclasses.replace(COPIES, **wrong)
        n = 8 * tiling.lanes * tiling.vectors
        use_tiling("rms_norm", 2, n, tiling)
        assert row_cluster.plan_for(make_call("rms_norm", random(2, n, dtype=F16))) is None
    use_tiling("fused_add_rms_norm_inplace", 2, 1024, DECODE)
    call = make_call("fused_add_rms_norm_inplace", random(2, 1024, dtype=F16))
    assert row_cluster.plan_for(call) is None


@OPS
def test_ring_plan(op, use_tiling):
    """Its stages are dynamic shared memory, of x and the residual, 16 bytes more so that 48 KB of
    it pass the limit.
    """
    use_tiling(op, 2, 1024, RING)
    plan = row_cluster.plan_for(make_call(op, random(5, 1024, dtype=F16)))
    assert (plan.tiling.kernel, plan.even) == ("row_ring", False)
    assert plan.shared_bytes == (1 + ("fused_add" in op)) * 3 * 64 * 2 * 16 + 16


RULED = {  # id: (rows, columns, weight's dtype, cluster, or None for Triton's)
    "128-KB": (200, 65536, F16, 2),
    "between": (200, 65544, F16, 4),
    "1-MB": (129, 524288, F16, 16),
    "longer": (129, 524296, F16, None),
    "resident": (200, 32768, F16, None),
    "wider-weight": (200, 65536, F32, None),
    "no-weight": (200, 65536, None, 2),
}


@pytest.mark.parametrize("case", RULED.values(), ids=RULED)
def test_rule(case, monkeypatch):
    """Many long rows that neither table names go to the ring."""
    rows, n, weight, cluster = case
    monkeypatch.setattr(row_cluster, "cluster_rows", list)
    monkeypatch.setattr(row_plan, "tuning_rows", list)

    def meta(*shape: int, dtype: torch.dtype = F16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    w = None if weight is None else meta(n, dtype=weight)
    call = Call.of(CATALOGUE["rms_norm"], [meta(rows, n), w], params(n), real=False)
    plan = row_cluster.plan_for(call)
    assert (plan and plan.tiling.cluster) == cluster
    if plan:
        assert (plan.source, plan.tiling.kernel) == ("rule", "row_ring")
        table = {"op": "rms_norm", "itemsize": 2, "n": n, "rows": [1, None], "label": "triton"}
        use = {"block_n": n, "num_warps": 32}
        monkeypatch.setattr(row_plan, "tuning_rows", lambda: [{**table, "use": use}])
        assert row_cluster.plan_for(call) is None


FEW = {  # id: (op, rows, columns of f16, weight's dtype, threads of each of 8 CTAs, or None)
    "32-KB": ("rms_norm", 1, 16384, F16, 128),
    "less": ("layer_norm", 1, 16376, F16, None),
    "16-KB-and-a-residual": ("fused_add_layer_norm", 128, 8192, F16, 64),
    "32-KB-and-a-residual": ("fused_add_rms_norm", 1, 16384, F16, 128),
    "less-and-a-residual": ("fused_add_rms_norm", 1, 8184, F16, None),
    "between": ("fused_add_rms_norm", 3, 20480, F16, 256),
    "128-KB": ("layer_norm", 128, 65536, F16, 512),
    "longer": ("layer_norm", 128, 65544, F16, None),
    "wider-weight": ("rms_norm", 1, 16384, F32, None),
    "many": ("rms_norm", 129, 16384, F16, None),
}


@pytest.mark.parametrize("case", FEW.values(), ids=FEW)
def test_rule_for_few_rows(case, monkeypatch):
    """Eight CTAs a row where neither table names it; under batch invariance what many rows get."""
    op, rows, n, weight, threads = case
    monkeypatch.setattr(row_cluster, "cluster_rows", list)
    monkeypatch.setattr(row_plan, "tuning_rows", list)
    x = torch.empty(rows, n, dtype=F16, device=DEVICE)
    plan = row_cluster.plan_for(make_call(op, x, weight, weight))
    assert (plan and plan.tiling) == (threads and ClusterTiling(8, threads, 2, weight_at=1))
    policy = Policy(batch_invariant=True)
    invariant = row_cluster.plan_for(make_call(op, x, weight, weight, policy=policy))
    assert invariant is None or invariant.tiling.ring


def test_regimes(monkeypatch):
    """The number of rows chooses; under batch invariance that of many does."""
    rows = [
        {"op": "rms_norm", "itemsize": 2, "n": 1024, "rows": [1, 8], "label": "few"},
        {"op": "rms_norm", "itemsize": 2, "n": 1024, "rows": [9, None], "label": "many"},
    ]
    use = dataclasses.asdict(DECODE)
    monkeypatch.setattr(row_cluster, "cluster_rows", lambda: [{**r, "use": use} for r in rows])
    few, many = random(8, 1024, dtype=F16), random(9, 1024, dtype=F16)
    policy = Policy(batch_invariant=True)
    assert row_cluster.plan_for(make_call("rms_norm", few)).source == "few"
    assert row_cluster.plan_for(make_call("rms_norm", many)).source == "many"
    assert row_cluster.plan_for(make_call("rms_norm", few, policy=policy)).source == "many"


@OPS
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("tiling", [DECODE, dataclasses.replace(COPIES, threads=32)])
def test_launch_arguments(op, needs_grad, tiling, use_tiling, monkeypatch):
    """What reaches the kernel, in its order; absent tensors as null pointers."""
    sent: list[Any] = []

    class Recorder:
        def configure(self, grid: Any, block: Any, shared_bytes: int, cluster: int) -> Any:
            given = (tiling.threads, 1, 1), 0, tiling.cluster
            assert (block, shared_bytes, cluster) == given
            assert grid == (6, 1, 1)  # three rows, two CTAs each
            return lambda *arguments: sent.extend(arguments)

    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    monkeypatch.setattr(cuda, "load", lambda *_: Recorder())
    use_tiling(op, 2, 1024, tiling)
    x = random(3, 1024, dtype=F16)
    tensors = operands(op, x, bias=None)
    results = row_cluster.prepare(make_call(op, x, bias=None, needs_grad=needs_grad))(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    added, center = "fused_add" in op, "layer_norm" in op
    pointers, scalars = sent[:8], sent[8:]
    assert pointers[0] is x and pointers[1] is (tensors[1] if added else 0)
    assert pointers[2] is tensors[1 + added] and pointers[3] == 0
    assert pointers[4] is results[0] and pointers[5] is (results[1] if added else 0)
    saved = results[1 + added :]
    assert len(saved) == (1 + center if needs_grad and not added else 0)
    assert pointers[6] is (saved[0] if saved and center else 0)
    assert pointers[7] is (saved[-1] if saved else 0)
    assert scalars == [3, 1024, 1024, 1024, 1e-5]


def test_table_is_valid():
    """Every row covers what it says, within the limits of a CTA and of a cluster."""
    for row in row_cluster.cluster_rows():
        tiling = ClusterTiling(**row["use"])
        values = 16 // row["itemsize"]
        assert row["n"] <= tiling.lanes * tiling.vectors * values
        assert row["n"] % values == 0 and row["op"] in row_cluster.OPS
        assert tiling.threads * tiling.resident <= 2048 and tiling.cluster <= 16
        if tiling.copies:
            assert row["n"] == tiling.lanes * tiling.vectors * values
            assert tiling.vectors % tiling.copies == 0 and tiling.cluster == 1
            assert tiling.threads in (128, 256, 512, 1024)


FEW_ROWS = {
    f"{row['op']}-{row['n']}": row for row in row_cluster.cluster_rows() if "copies" in row["use"]
}


@pytest.mark.parametrize("row", FEW_ROWS.values(), ids=FEW_ROWS)
@pytest.mark.skipif(not cuda.has_compiler(), reason="needs cuda-core and NVRTC")
def test_few_rows_compile_without_a_stack(row, monkeypatch, tmp_path):
    """And wait for the other warps once."""
    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path))
    x = torch.empty(1, row["n"], dtype=BF16, device=DEVICE)
    plan = row_cluster.plan_for(make_call(row["op"], x, BF16, BF16))
    assert plan.tiling.kernel == "row_decode"
    path = tmp_path / "kernel.cubin"
    source = row_cluster.source("row_decode")
    path.write_bytes(cuda.compile_cubin(source, "sm_90a", plan.macros(make_call(row["op"], x))))
    assert re.findall(r"STACK:(\d+)", cuobjdump("--dump-resource-usage", path)) == ["0"]
    assert cuobjdump("--dump-sass", path).count("BAR.SYNC") == 1


def cuobjdump(flag: str, path: Path) -> str:
    """Of Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("tiling", [DECODE, RING, COPIES])
def test_every_macro_is_set(tiling):
    """The headers name every macro that the plan sets, and the source names no other."""
    call = make_call("layer_norm", random(1, 1024, dtype=F16))
    plan = row_cluster.ClusterPlan(tiling, "test", 1, 1024, 1024, 1024, True, 0)
    names = plan.macros(call)
    text = row_cluster.source(tiling.kernel)
    headers = " ".join(line for line in text.splitlines() if line.startswith("//"))
    assert all(isinstance(value, int) for value in names.values())
    assert all(name in headers for name in names)
    used = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", re.sub(r"//.*", "", text)))
    made = set(re.findall(r"constexpr (?:int|u32) (\w+)", text)) | {"WORDS", "KIND", "MOST"}
    made |= {"COUNT", "FIRST"}  # of templates
    assert used - made <= set(names)


KINDS = {
    "decode": DECODE,
    "long": LONG,
    "weight-last": dataclasses.replace(LONG, weight_at=0),
    "ring": RING,
    "ring-of-one": dataclasses.replace(RING, ring=1),
    "ring-alone": RING_ALONE,
    "16-ctas": dataclasses.replace(RING, cluster=16),
    "copies": COPIES,
    "copies-of-short-ctas": ClusterTiling(1, 32, 4, weight_at=1, copies=4),
}


@ON_GPU
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@OPS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spare", [0, 1])
def test_results(op, dtype, kind, spare, use_tiling):
    """Rows that fill the cluster or lack one vector, more rows than clusters fit at once."""
    tiling = KINDS[kind]
    if tiling.copies and spare:
        pytest.skip("row_decode.cu takes rows that fill it")
    values = 16 // dtype.itemsize
    n = values * (tiling.lanes * tiling.vectors - spare)
    use_tiling(op, dtype.itemsize, n, tiling)
    x = random(9000 if tiling.persistent else 3, n, dtype=dtype)
    tensors = operands(op, x, F32, F32)
    assert row_cluster.prepare(Call.of(CATALOGUE[op], tensors, params(n))) is not None
    run(op, tensors, params(n))


@ON_GPU
@PLAIN
@pytest.mark.parametrize("tiling", [LONG, RING, dataclasses.replace(COPIES, threads=64)])
def test_one_row_has_the_bits_that_it_has_among_many(op, tiling, use_tiling):
    use_tiling(op, 2, 2048, tiling)
    x = random(700, 2048, dtype=BF16)
    tensors = operands(op, x, BF16, BF16)
    one = [t[600:601] if t is not None and t.ndim == 2 else t for t in tensors]

    def launch(given: list[Any]) -> torch.Tensor:
        out = row_cluster.prepare(Call.of(CATALOGUE[op], given, params(2048)))(*given)
        return out[0] if isinstance(out, tuple) else out

    assert torch.equal(launch(tensors)[600:601], launch(one))


@ON_GPU
def test_nan_and_inf_stay_in_their_row(use_tiling):
    use_tiling("layer_norm", 2, 1024, DECODE)
    x = random(4, 1024, dtype=F16)
    x[1, 3], x[2, 5] = math.nan, math.inf
    tensors = operands("layer_norm", x, None, None)
    y = row_cluster.prepare(Call.of(CATALOGUE["layer_norm"], tensors, params(1024)))(*tensors)
    assert y[1].isnan().all() and y[[0, 3]].isfinite().all()


@ON_GPU
@pytest.mark.parametrize("at", [0, 5, 4095])
def test_a_far_element_among_few_rows(at, use_tiling):
    """Wherever it is, also where distances are measured from it; and a mean that is large."""
    use_tiling("layer_norm", 4, 4096, dataclasses.replace(COPIES, threads=256))
    x = random(3, 4096) + torch.tensor([[0.0], [1000.0], [0.0]], device=DEVICE)
    x[0, at], x[2] = 1e4, 3.0
    tensors = operands("layer_norm", x, None, None)
    run("layer_norm", tensors, params(4096), atol=2**-12)


@pytest.mark.parametrize("kernel", ["row_cluster", "row_ring", "row_decode"])
def test_source_is_packaged(kernel):
    folder = Path(row_plan.__file__).parent / "csrc"
    names = ("row.cuh", "row_shift.cuh", f"{kernel}.cu")
    parts = [(folder / name).read_text("utf-8") for name in names]
    assert "".join(parts) == row_cluster.source(kernel)
