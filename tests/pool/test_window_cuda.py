"""The CUDA kernels of maxima: plans, arguments, machine code; their results on a GPU."""

import dataclasses
import math
import pathlib
import re
import subprocess
from typing import Any

import pytest
import torch
from opkiln import tilings
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool import pool_plan, pool_search, variants, window_cuda
from opkiln_pool.geometry import geometry_of
from opkiln_pool.window_cuda import Flat, Pairs, Rows, Tiling

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or cuda.why_not(torch.device("cuda", 0), "") is not None,
    reason="needs a GPU of compute capability 9.0 and cuda-core",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def window(kernel: tuple[int, ...], stride: int = 0, padding: int = 0, **more: Any) -> dict:
    n = len(kernel)
    found = {"kernel_size": kernel, "stride": (stride,) * n if stride else kernel}
    found |= {"padding": (padding,) * n, "dilation": (1,) * n, "ceil_mode": False}
    return found | more


STEM, CUBE = window((3, 3), 2, 1), window((3, 3, 3), 2, 1)
CALLS: dict[str, tuple[str, tuple[int, ...], torch.dtype, dict[str, Any], Tiling, int]] = {
    # id: op, shape, dtype, window, tiling, CTAs
    "rows-cube": ("max_pool3d_indices", (2, 3, 5, 9, 112), BF16, CUBE | {"ceil_mode": True},
                  Rows(128, 8), 12),
    "rows-narrow": ("max_pool3d_indices", (2, 3, 4, 8, 16), F16, CUBE, Rows(64, 8), 12),
    "rows-stem": ("max_pool2d_indices", (2, 3, 12, 120), F16, STEM, Rows(128, 8, keep=True), 5),
    "rows-max": ("max_pool3d", (2, 3, 4, 9, 16), BF16, CUBE | {"ceil_mode": True}, Rows(128, 8),
                 12),
    "pairs": ("max_pool2d_indices", (2, 3, 8, 12), F32, window((2, 2)), Pairs(64, keep=True), 2),
    "pairs-cube": ("max_pool3d_indices", (2, 3, 4, 8, 24), F16, window((2, 2, 2)), Pairs(64), 5),
    "flat": ("max_pool1d_indices", (2, 3, 64), F16, window((3,)), Flat(32), 2),
    "flat-bf16": ("max_pool1d_indices", (2, 3, 40), BF16, window((3,)), Flat(32, keep=True), 2),
}  # fmt: skip
CASE = pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)


def call_of(case: Any, x: torch.Tensor | None = None, **how: Any) -> Call:
    op, shape, dtype, params = case[:4]
    x = torch.zeros(shape, dtype=dtype) if x is None else x
    return Call.of(CATALOGUE[op], [x], params, **how)


@pytest.fixture
def put(monkeypatch):
    """Make a case's tiling the only row of the table."""

    def put(case: Any) -> None:
        row = pool_plan.key_of(case[0], geometry_of(call_of(case))) | {"label": "test"}
        row["measured"] = {"us": {window_cuda.NAMES[case[2]]: 1.0}}
        row |= {"kind": window_cuda.kind_of(case[4]), "use": dataclasses.asdict(case[4])}
        monkeypatch.setattr(window_cuda, "cuda_rows", lambda: [row])

    return put


@pytest.fixture
def sent(monkeypatch):
    """What is launched where a GPU is only pretended."""
    found: list[Any] = []

    class Recorder:
        def __init__(self, parameters: int) -> None:
            self.parameters = parameters

        def configure(self, grid: Any, block: Any) -> Any:
            return lambda *arguments: found.append((grid, block, arguments, self.parameters))

    def load(source: str, name: str, device: Any, macros: dict[str, int]) -> Recorder:
        parameters = re.search(rf"\n{name}\((.*?)\) \{{", source, re.DOTALL)
        return Recorder(parameters[1].count(",") + 1)

    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    monkeypatch.setattr(cuda, "load", load)
    return found


@CASE
def test_launch(case, put, sent):
    """Grid, block, and as many arguments as the kernel has parameters."""
    put(case)
    call = call_of(case)
    outs = variants.prepare(call)(torch.zeros(case[1], dtype=case[2]))
    ((grid, block, arguments, parameters),) = sent
    assert (grid, block) == ((case[5], 1, 1), (case[4].threads, 1, 1))
    assert len(arguments) == parameters
    outs = outs if isinstance(outs, tuple) else (outs,)
    assert [(o.shape, o.dtype) for o in outs] == [(m.shape, m.dtype) for m in call.outputs]


def apart(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape[:-1], shape[-1] * 2, dtype=dtype)[..., ::2]


LEFT = {  # id: the input of a call that the Triton kernels serve
    "columns-apart": apart,
    "channel-slice": lambda s, t: torch.zeros(s[0], 2 * s[1], *s[2:], dtype=t)[:, ::2],
    "unaligned": lambda s, t: torch.zeros(math.prod(s) + 1, dtype=t)[1:].view(s),
    "longer-rows": lambda s, t: torch.zeros(*s[:-1], s[-1] + 8, dtype=t),
}


@CASE
@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_left_to_triton(case, make, put):
    put(case)
    assert window_cuda.plan_for(call_of(case)).source == "test"
    assert window_cuda.plan_for(call_of(case, make(*case[1:3]))) is None


@CASE
def test_saved_offsets_are_left_to_triton(case, put):
    put(case)
    assert window_cuda.plan_for(call_of(case, needs_grad=True)) is None


def test_a_dtype_that_was_not_measured_is_left_to_triton(put):
    case = CALLS["rows-stem"]
    put(case)
    assert window_cuda.plan_for(call_of(case, torch.zeros(case[1], dtype=BF16))) is None


def test_channels_last_is_left_to_triton(put):
    case = CALLS["rows-stem"]
    put(case)
    x = torch.zeros(case[1], dtype=case[2]).contiguous(memory_format=torch.channels_last)
    assert window_cuda.plan_for(call_of(case, x)) is None


@CASE
def test_any_number_of_planes(case, put):
    """Unbatched too: only the number of CTAs depends on it."""
    put(case)
    plans = [
        window_cuda.plan_for(call_of(case, torch.zeros((*lead, *case[1][2:]), dtype=case[2])))
        for lead in ((4,), (2, 8), (1, 2))
    ]
    first = window_cuda.macros(plans[0].geometry, case[2], plans[0].tiling)
    for plan in plans:
        assert window_cuda.macros(plan.geometry, case[2], plan.tiling) == first


UNFIT = {  # id: a tiling that its kernel cannot serve the case with
    "rows-too-long": ("max_pool2d_indices", (1, 1, 8, 136), F16, STEM, Rows(128, 8)),
    "rows-f32": ("max_pool2d_indices", (1, 1, 8, 16), F32, STEM, Rows(128, 8)),
    "rows-volume": ("max_pool3d_indices", (1, 1, 3, 8, 16), F16,
                    window((1, 3, 3), padding=0) | {"stride": (1, 2, 2), "padding": (0, 1, 1)},
                    Rows(128, 8)),
    "rows-plane-too-large": ("max_pool3d_indices", (1, 1, 3, 300, 112), F16, CUBE,
                             Rows(128, 8)),
    "pairs-remainder": ("max_pool2d_indices", (1, 1, 9, 12), F32, window((2, 2)), Pairs(64)),
    "pairs-odd": ("max_pool2d_indices", (1, 1, 8, 14), F32, window((2, 2)), Pairs(64)),
    "flat-even": ("max_pool1d_indices", (2, 3, 48), F16, window((3,)), Flat(32)),
    "flat-odd": ("max_pool1d_indices", (1, 1, 64), F16, window((3,)), Flat(32)),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT.values(), ids=UNFIT)
def test_what_does_not_fit_is_left(case, put):
    put(case)
    assert window_cuda.plan_for(call_of(case)) is None


def test_users_tiling_comes_first(put, sent):
    """Of either kind of kernel; `opkiln tune` starts from what is in use."""
    case = CALLS["rows-cube"]
    put(case)
    call = call_of(case)
    first, *others = pool_search.candidates(call)
    assert first == window_cuda.stated(case[4])
    assert {c["kernel"] for c in others} == {window_cuda.KERNEL, pool_plan.KERNEL}
    for candidate in (first, *others):
        with tilings.trial(candidate):
            found = window_cuda.plan_for(call)
        assert (found is not None) == (candidate["kernel"] == window_cuda.KERNEL)


def calls_of_table() -> list[tuple[dict[str, Any], Call]]:
    """A call of every row and dtype."""
    found = []
    names = {name: dtype for dtype, name in window_cuda.NAMES.items()}
    for row in window_cuda.cuda_rows():
        n = int(row["op"].split("pool")[1][0])
        keys = ("kernel", "stride", "padding", "dilation")
        kernel, *others = (tuple(row[k][-n:]) for k in keys)
        params = {"kernel_size": kernel, **dict(zip(keys[1:], others, strict=True))}
        for dtype in row["measured"]["us"]:
            x = torch.empty((1, 2, *row["sizes"][-n:]), dtype=names[dtype], device="meta")
            for ceil in (False, True):
                case = row["op"], x.shape, x.dtype, params | {"ceil_mode": ceil}
                call = call_of(case, x, real=False)
                if list(geometry_of(call).outs) == row["outs"]:
                    found.append((row, call))
                    break
    return found


def test_every_row_of_the_table_serves_its_calls():
    found = calls_of_table()
    assert len(found) == sum(len(row["measured"]["us"]) for row in window_cuda.cuda_rows()) > 0
    for row, call in found:
        plan = window_cuda.plan_for(call)
        assert plan.source == row["label"]
        assert plan.tiling == window_cuda.made(row["kind"], **row["use"])


def cuobjdump() -> pathlib.Path:
    import triton

    return pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


COMPILED = [(call_of(case), case[4]) for case in CALLS.values()]
COMPILED += [(call, window_cuda.made(row["kind"], **row["use"])) for row, call in calls_of_table()]


@pytest.mark.parametrize(("call", "tiling"), COMPILED)
@pytest.mark.skipif(not cuda.has_compiler(), reason="needs cuda-core and NVRTC")
def test_compiles_without_a_stack(call, tiling, monkeypatch, tmp_path):
    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path))
    macros = window_cuda.macros(geometry_of(call), call.tensors.input.dtype, tiling)
    path = tmp_path / "kernel.cubin"
    source = window_cuda.source(window_cuda.kind_of(tiling))
    path.write_bytes(cuda.compile_cubin(source, "sm_90a", macros))
    tool = [str(cuobjdump()), "--dump-resource-usage", str(path)]
    said = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"STACK:(\d+)", said)) == {"0"}


@ON_GPU
@CASE
@pytest.mark.parametrize("special", [False, True])
def test_results(case, special, put):
    """Exactly the reference's, of random values and of ties, NaN, -inf and both zeros."""
    put(case)
    torch.manual_seed(0)
    x = torch.randn(case[1], device=DEVICE).to(case[2])
    if special:
        x = x.clamp(-1, 1).round()
        x = torch.where(torch.rand(case[1], device=DEVICE) < 0.05, math.nan, x)
        x[0] = torch.where(torch.rand(case[1][1:], device=DEVICE) < 0.5, -math.inf, x[0])
        x[:, 0] = -math.inf
    call = call_of(case, x)
    launch = window_cuda.prepare(call)
    assert launch is not None
    found, want = launch(x), CATALOGUE[case[0]].reference(x.double(), **case[3])
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (found, want)), strict=False)
    for got, expected in pairs:
        assert torch.equal(got.double().nan_to_num(7e7), expected.double().nan_to_num(7e7))


def test_source_is_packaged():
    folder = pathlib.Path(window_cuda.__file__).parent / "csrc"
    for kind in window_cuda.KINDS:
        text = (folder / f"window_{kind}.cu").read_text("utf-8")
        assert window_cuda.source(kind).endswith(text)
