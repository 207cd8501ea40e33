"""The kernel in CUDA C++ of the row norms' backward: what it serves, its arguments, its results."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from norm.offline import tool
from norm.row_backward_cases import params_of, tensors_of
from norm.row_cases import BF16, F16, F32, RTOL, random
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.spec import Call
from opkiln_norm import row_backward_launch, row_backward_ring, row_plan
from opkiln_norm.row_backward_plan import plan_for
from opkiln_norm.row_backward_ring import OPS, RingTiling

NORMS = [op.removesuffix("_backward") for op in OPS]
SMALL = RingTiling(64, 1, 3)
SM_SHARED = 232448  # bytes that a CTA can have
KINDS = {
    "one-vector": SMALL,
    "two-vectors": RingTiling(64, 2, 2, resident=2),
    "one-stage": RingTiling(96, 1, 1, resident=4),
    "shared-weight": RingTiling(64, 2, 2, weight_at=2),
    "32-warps": RingTiling(1024, 2, 2),
}
ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or cuda.why_not(torch.device("cuda", 0), "") is not None,
    reason="needs a GPU of compute capability 9.0 and cuda-core",
)


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """Outputs start as NaN, so that an element left unwritten fails."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def use_tiling(monkeypatch):
    def put(tiling: RingTiling) -> None:
        monkeypatch.setattr(row_backward_ring, "rule", lambda call, plan: tiling)

    return put


def call_of(op: str, tensors: list[Any], mask: Any = (), **how: Any) -> Call:
    spec = CATALOGUE[f"{op}_backward"]
    return Call.of(spec, tensors, params_of(op, tensors[1].shape, mask), **how)


def strided(rows: int, n: int, *, dtype: torch.dtype) -> torch.Tensor:
    return random(rows, n + 8, dtype=dtype)[:, :n]


def odd_pitch(rows: int, n: int, *, dtype: torch.dtype) -> torch.Tensor:
    return random(rows, n + 4, dtype=dtype)[:, :n]


def replaced(tensors: list[Any], at: int, by: Any) -> list[Any]:
    return [by if i == at else t for i, t in enumerate(tensors)]


ROWS = tensors_of("rms_norm", random, (5, 512), F16)
SERVED = {  # id: (call of rms_norm over 512 columns, whether the kernel serves it)
    "plain": (lambda: call_of("rms_norm", ROWS), True),
    "weight-of-another-dtype": (lambda: call_of("rms_norm", replaced(ROWS, 2, random(512))), True),
    "row-slice": (
        lambda: call_of("rms_norm", replaced(ROWS, 0, strided(5, 512, dtype=F16))), True,
    ),
    "odd-pitch": (
        lambda: call_of("rms_norm", replaced(ROWS, 0, odd_pitch(5, 512, dtype=F16))), False,
    ),
    "column-stride": (
        lambda: call_of("rms_norm", replaced(ROWS, 0, random(512, 5, dtype=F16).t())), False,
    ),
    "unaligned": (
        lambda: call_of("rms_norm", replaced(ROWS, 2, random(513, dtype=F16)[1:])), False,
    ),
    "no-weight": (lambda: call_of("rms_norm", replaced(ROWS, 2, None), (True, False)), False),
    "one-gradient": (lambda: call_of("rms_norm", ROWS, (True, False)), False),
    "gradient-of-another-dtype": (
        lambda: call_of("rms_norm", replaced(ROWS, 0, random(5, 512, dtype=BF16))), False,
    ),
    "one-row": (
        lambda: call_of("rms_norm", tensors_of("rms_norm", random, (1, 512), F16)), False,
    ),
    "part-of-a-vector": (
        lambda: call_of("rms_norm", tensors_of("rms_norm", random, (5, 508), F16)), False,
    ),
    "batch-invariant": (
        lambda: call_of("rms_norm", ROWS, policy=Policy(batch_invariant=True)), False,
    ),
    "three-dims": (
        lambda: call_of("rms_norm", tensors_of("rms_norm", random, (2, 3, 512), F16)), True,
    ),
    "statistics-of-a-mean": (
        lambda: call_of(
            "fused_add_layer_norm", tensors_of("fused_add_layer_norm", random, (5, 512), F16)
        ),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_what_is_served(case):
    make, served = case
    call = make()
    assert row_backward_ring.serves(call, plan_for(call)) == served


RULED = {  # id: (op, rows, columns, dtype, weight's dtype, the tiling, or None for Triton's)
    "rms": ("rms_norm", 300, 16384, BF16, BF16, RingTiling(1024, 2, 3)),
    "layer": ("layer_norm", 300, 16384, F16, F16, RingTiling(512, 4, 3, weight_at=2)),
    "fused": ("fused_add_rms_norm", 300, 16384, BF16, BF16, RingTiling(512, 4, 2)),
    "between": ("rms_norm", 3, 9000, BF16, BF16, RingTiling(576, 2, 3)),
    "wide-weight": ("rms_norm", 300, 16384, BF16, F32, None),
    "f32": ("layer_norm", 3, 8192, F32, F32, None),
    "shorter": ("layer_norm", 300, 8192, BF16, BF16, None),
    "longer": ("layer_norm", 300, 16392, BF16, BF16, None),
}


@pytest.mark.parametrize("case", RULED.values(), ids=RULED)
def test_rule(case):
    op, rows, n, dtype, weight, tiling = case

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call = call_of(op, tensors_of(op, meta, (rows, n), dtype, weight), real=False)
    plan = plan_for(call)
    assert row_backward_ring.serves(call, plan) and row_backward_ring.rule(call, plan) == tiling
    if tiling:
        assert n * 2 <= tiling.slice_bytes and tiling.shared_bytes("fused" in op, 16) <= SM_SHARED


@pytest.mark.skipif(not cuda.has_compiler(), reason="cuda-core is not installed")
@pytest.mark.parametrize("name", [n for n in RULED if RULED[n][-1]])
def test_no_spills(name, tmp_path):
    op, _, n, dtype, weight, tiling = RULED[name]
    call = call_of(op, tensors_of(op, random, (2, n), dtype, weight))
    names = row_backward_ring.macros(call, plan_for(call), tiling)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(cuda.compile_cubin(row_backward_ring.source(), "sm_90a", names))
    found = tool("cuobjdump", "--dump-resource-usage", str(cubin))
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", found))
    assert int(numbers["STACK"]) == 0
    assert int(numbers["REG"]) <= 65536 // tiling.threads


@pytest.mark.parametrize("op", NORMS)
def test_launch_arguments(op, use_tiling, monkeypatch):
    """What reaches the kernel, in its order; absent tensors as null pointers."""
    sent: list[Any] = []

    class Recorder:
        def configure(self, grid: Any, block: Any, shared_bytes: int, cluster: int) -> Any:
            stored = (6 + 2 * ("fused" in op)) * SMALL.slice_bytes
            assert (grid, block, cluster) == ((3, 1, 1), (64, 1, 1), 1)
            assert stored <= shared_bytes <= stored + 1024
            return lambda *arguments: sent.extend(arguments)

    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    monkeypatch.setattr(cuda, "load", lambda *_: Recorder())
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(
        row_backward_launch.Sums, "add_up", lambda self, targets, grads: sent.append(targets)
    )
    use_tiling(SMALL)
    tensors = tensors_of(op, random, (3, 512), F16)
    grads = row_backward_launch.prepare(call_of(op, tensors))(*tensors)
    center, fused = "layer_norm" in op, "fused" in op
    g, x, w = tensors[0], tensors[1 + fused], tensors[2 + fused]
    assert sent[0] is g and sent[1] is x and sent[3] is w and sent[6] is grads[0]
    assert sent[2] is (tensors[1] if fused else 0)
    assert sent[4] is (tensors[3] if center else 0)
    assert sent[5] is (0 if fused else tensors[-1])
    *_, targets = sent
    assert sent[7] is targets[0] and targets[0].shape == (3, 512) and targets[0].dtype == F32
    assert sent[8] is (targets[1] if center else 0)
    assert sent[9:-1] == [3, 512, 512, 512, 512 * fused, 1e-5 * fused]


def test_every_macro_is_set():
    """The headers name every macro that the plan sets, and the source names no other."""
    call = call_of("layer_norm", tensors_of("layer_norm", random, (5, 512), F16))
    names = row_backward_ring.macros(call, plan_for(call), SMALL)
    text = row_backward_ring.source()
    headers = " ".join(line for line in text.splitlines() if line.startswith("//"))
    assert all(isinstance(value, int) for value in names.values())
    assert all(name in headers for name in names)
    used = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", re.sub(r"//.*", "", text)))
    made = set(re.findall(r"constexpr (?:int|u32) (\w+)", text)) | {"WORDS", "KIND"}
    assert used - made <= set(names)


def test_source_is_packaged():
    folder = Path(row_plan.__file__).parent / "csrc"
    parts = [(folder / name).read_text("utf-8") for name in ("row.cuh", "row_backward.cu")]
    assert "".join(parts) == row_backward_ring.source()


@ON_GPU
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spare", [0, 1])
def test_results(op, dtype, kind, spare, use_tiling):
    """Rows that fill the CTA or lack one vector; more rows than CTAs, and fewer than stages."""
    tiling = KINDS[kind]
    use_tiling(tiling)
    n = 16 // dtype.itemsize * (tiling.threads * tiling.vectors - spare)
    for rows, weight in ((1500, None), (2, F32)):
        tensors = tensors_of(op, random, (rows, n), dtype, weight)
        call = call_of(op, tensors)
        assert row_backward_ring.prepare(call, plan_for(call)) is not None
        check(call, tensors)


def check(call: Call, tensors: list[Any]) -> tuple[torch.Tensor, ...]:
    """Launch and compare with float64. A sum's error is that of its terms."""
    before = [t.clone() for t in tensors]
    grads = row_backward_launch.prepare(call)(*tensors)
    wide = [t.double() for t in tensors]
    expected = call.spec.reference(*wide, **vars(call.params))
    for got, want, meta in zip(grads, expected, call.outputs, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (meta.shape, meta.dtype, meta.stride)
        atol = 2**-15 if got.ndim > 1 else 2**-17 * len(tensors[0]) ** 0.5 + 2**-15
        torch.testing.assert_close(got.double(), want, rtol=RTOL[got.dtype], atol=atol)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    return grads


@ON_GPU
@pytest.mark.parametrize("op", NORMS)
def test_strides_and_repeats(op, use_tiling):
    """Rows with gaps between them; twice the same bits."""
    use_tiling(dataclasses.replace(SMALL, resident=4))
    tensors = tensors_of(op, random, (700, 512), BF16)
    for i in range(2 + ("fused" in op)):
        tensors[i] = strided(700, 512, dtype=BF16)
    first, second = (check(call_of(op, tensors), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@ON_GPU
@pytest.mark.parametrize("op", NORMS)
def test_nan_stays_in_its_row_and_its_columns_sums(op, use_tiling):
    use_tiling(SMALL)
    tensors = tensors_of(op, random, (400, 512), BF16)
    tensors[0][7, 3] = torch.nan
    grad, of_weight, *_ = row_backward_launch.prepare(call_of(op, tensors))(*tensors)
    assert grad[7].isnan().all() and grad[:7].isfinite().all() and grad[8:].isfinite().all()
    assert of_weight.isnan().nonzero().flatten().tolist() == [3]
