"""The channel norms' CUDA kernels: plans, arguments, machine code; their results on a GPU."""

import dataclasses
import functools
import pathlib
import re
import subprocess
from typing import Any

import pytest
import torch
from norm.channel_cases import (
    BF16,
    F16,
    F32,
    RTOL,
    affine,
    backward,
    batch_norm,
    group_norm,
    instance_norm,
    nan_filled_memory,
    random,
    running,
)
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import channel_cuda
from opkiln_norm.channel_cuda_tilings import Columns, Flat, Ring, Team, Tiling

TRAIN = {"training": True, "momentum": 0.1, "eps": 1e-5}
OWN = {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
GROUPS = {"num_groups": 3, "eps": 1e-5}
GRADIENTS = {"training": True, "output_mask": (True, True, True)}
RING = Ring(64, 2, 2, 2)  # 4 KiB a slice
RING_SHAPE = (4, 5, 8 * 4 * 64, 8)  # 16-bit: 32 slices a channel
ON_GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or cuda.why_not(torch.device("cuda", 0), "") is not None,
    reason="needs a GPU of compute capability 9.0 and cuda-core",
)


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    yield from nan_filled_memory()


def put(monkeypatch: Any, call: Call, tiling: Tiling) -> None:
    """Make `tiling` the only row of the table, for calls of these sizes."""
    s = channel_cuda.sizes_of(call)
    row = {"op": call.spec.name, "itemsize": s.itemsize, "mode": s.mode, "label": "test"}
    row |= {"channels": s.channels, "cols": s.cols, "kind": type(tiling).__name__.lower()}
    row["use"] = dataclasses.asdict(tiling)
    monkeypatch.setattr(channel_cuda, "cuda_rows", lambda: [row])


def call_of(op: str, x: torch.Tensor, *others: Any, **how: Any) -> Call:
    params = {"batch_norm": TRAIN, "instance_norm": OWN, "batch_norm_backward": GRADIENTS,
              "group_norm": GROUPS}[op]  # fmt: skip
    return Call.of(CATALOGUE[op], [x, *others], params, **how)


def train(x: torch.Tensor, **how: Any) -> Call:
    return call_of("batch_norm", x, *running(x.shape[1]), *affine(x.shape[1]), **how)


def given(x: torch.Tensor) -> Call:
    """instance_norm with given statistics."""
    channels = x.shape[1]
    tensors = [x, *running(channels), *affine(channels)]
    return Call.of(CATALOGUE["instance_norm"], tensors, OWN | {"use_input_stats": False})


def evaluate(x: torch.Tensor) -> Call:
    """batch_norm with given statistics."""
    channels = x.shape[1]
    tensors = [x, *running(channels), *affine(channels)]
    return Call.of(CATALOGUE["batch_norm"], tensors, TRAIN | {"training": False})


def gradients(x: torch.Tensor) -> Call:
    return call_of("batch_norm_backward", x, x, *(random(x.shape[1]) for _ in range(3)))


CALLS = {  # id: (call, tiling, grid, block)
    "team": (lambda: train(random(3, 5, 28, 28, dtype=F16)), Team(16, 2, 1, 5), 5, 64),
    "team-cluster": (
        lambda: train(random(3, 5, 28, 28, dtype=F16)),
        Team(16, 2, 1, 3, cluster=2),
        10,
        64,
    ),
    "team-planes": (
        lambda: call_of("instance_norm", random(2, 5, 30, 30, dtype=F16), *[None] * 4),
        Team(8, 1, 4, 8),
        3,
        128,
    ),
    "team-averaged": (
        lambda: call_of("instance_norm", random(3, 5, 256), *running(5), None, None),
        Team(16, 1, 4, 2),
        5,
        128,
    ),
    "team-grouped": (
        lambda: call_of("instance_norm", random(3, 5, 256), None, None, *affine(5)),
        Team(16, 1, 2, 2, grouped=True, through_l1=True),
        10,
        64,
    ),
    "team-given": (
        lambda: given(random(3, 5, 256)),
        Team(16, 2, 4, 1, grouped=True, through_l1=True),
        5,
        256,
    ),
    "team-one": (
        lambda: call_of("instance_norm", random(2, 5, 32, 32, dtype=F16), *[None] * 4),
        Team(16, 1, 1, 4, stream=True),
        10,
        32,
    ),
    "team-groups": (
        lambda: call_of("group_norm", random(2, 6, 28, 28, dtype=F16), None, None),
        Team(16, 2, 1, 5),
        6,
        64,
    ),
    "team-planes-at-once": (lambda: train(random(6, 5, 16, 16)), Team(16, 4, 1, 3), 5, 128),
    "team-backward": (lambda: gradients(random(3, 5, 28, 28)), Team(16, 4, 1, 5), 5, 128),
    "flat": (lambda: given(random(3, 5, 28, 28, dtype=F16)), Flat(128), 12, 128),
    "flat-batch-norm": (lambda: evaluate(random(2, 5, 256)), Flat(256, through_l1=False), 3, 256),
    "columns": (lambda: train(random(9, 70, dtype=BF16)), Columns(4, 3, 32), 2, 128),
    "columns-backward": (lambda: gradients(random(9, 70)), Columns(4, 3, 32), 3, 128),
    "columns-one-warp": (lambda: train(random(9, 70, dtype=BF16)), Columns(1, 3, 8), 5, 32),
    "columns-one-warp-backward": (lambda: gradients(random(9, 70)), Columns(1, 3, 8), 9, 32),
    "ring": (lambda: train(random(*RING_SHAPE, dtype=F16)), RING, 64, 64),
    "ring-backward": (lambda: gradients(random(*RING_SHAPE, dtype=F16)), RING, 64, 64),
}
CASE = pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)


@CASE
def test_launch(case, monkeypatch):
    """Grid, block, and as many arguments as the kernel has parameters, None as 0."""
    make, tiling, ctas, threads = case
    call, sent = make(), []

    class Recorder:
        device = torch.device("cuda", 0)

        @staticmethod
        def max_active_blocks_per_multiprocessor(block: int, shared_bytes: int) -> int:
            return 1

        def __init__(self) -> None:
            self.handle, self.occupancy = self, self

        def configure(self, grid: Any, block: Any, *rest: Any, **options: Any) -> Any:
            assert (grid, block) == ((ctas, 1, 1), (threads, 1, 1))
            assert options.get("cooperative", False) == isinstance(tiling, Ring)
            return lambda *arguments: sent.extend(arguments)

    def load(source: str, name: str, device: Any, macros: dict[str, int]) -> Recorder:
        parameters = re.search(rf"\n{name}\((.*?)\) \{{", source, re.DOTALL)
        Recorder.parameters = parameters[1].count(",") + 1
        return Recorder()

    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    monkeypatch.setattr(cuda, "load", load)
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(channel_cuda.Headers, "get", lambda self: self.words)
    put(monkeypatch, call, tiling)
    tensors = [None if m is None else random(1) for m in vars(call.tensors).values()]
    channel_cuda.prepare(call)(*tensors)
    assert len(sent) == Recorder.parameters
    assert None not in sent


def test_a_ring_that_would_not_all_run_at_once_is_left(monkeypatch):
    class Kernel:
        device = torch.device("cuda", 0)

        def __init__(self) -> None:
            self.handle, self.occupancy = self, self
            self.max_active_blocks_per_multiprocessor = lambda *_: 1
            self.configure = lambda *_, **__: "send"

    monkeypatch.setattr(cuda, "why_not", lambda device, extra: None)
    monkeypatch.setattr(cuda, "load", lambda *_: Kernel())
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 63)
    call = train(random(*RING_SHAPE, dtype=F16))
    put(monkeypatch, call, RING)
    assert channel_cuda.prepare(call) is None
    monkeypatch.setattr(cuda, "multiprocessors", lambda device: 64)
    assert channel_cuda.prepare(call) is not None


X = (3, 6, 8, 8)
LEFT = {  # id: call of batch_norm over X that the Triton kernels serve
    "channels-last": lambda: train(random(*X).contiguous(memory_format=torch.channels_last)),
    "strided": lambda: train(random(3, 6, 16, 8)[:, :, ::2]),
    "unaligned": lambda: train(random(3 * 6 * 64 + 1)[1:].view(X)),
    "more-samples": lambda: train(random(9, *X[1:])),
    "weight-and-bias-differ": lambda: call_of(
        "batch_norm", random(*X), None, None, random(6, dtype=F16), random(6)
    ),
    "strided-weight": lambda: call_of(
        "batch_norm", random(*X), None, None, random(6, 2)[:, 0], None
    ),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT)
def test_left_to_triton(make, monkeypatch):
    put(monkeypatch, train(random(*X)), Team(16, 1, 1, 3))
    assert channel_cuda.plan_for(train(random(*X))).source == "test"
    assert channel_cuda.plan_for(make()) is None


def test_groups_with_an_affine_are_left_to_triton(monkeypatch):
    plain, with_affine = (call_of("group_norm", random(*X), *p) for p in ([None] * 2, affine(6)))
    put(monkeypatch, plain, Team(16, 1, 1, 3))
    assert channel_cuda.plan_for(plain).source == "test"
    assert channel_cuda.plan_for(with_affine) is None


def test_table_is_valid():
    for row in channel_cuda.cuda_rows():
        tiling = channel_cuda.KINDS[row["kind"]](**row["use"])
        assert row["op"] in channel_cuda.OPS and row["mode"] in ("", "given", "averaged")
        assert tiling.macros


@functools.cache
def cuobjdump() -> pathlib.Path:
    import triton

    return pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@CASE
@pytest.mark.skipif(not cuda.has_compiler(), reason="needs cuda-core and NVRTC")
def test_compiles_without_a_stack(case, monkeypatch, tmp_path):
    make, tiling, _, _ = case
    call = make()
    put(monkeypatch, call, tiling)
    monkeypatch.setenv("OPKILN_CACHE", str(tmp_path))
    plan = channel_cuda.plan_for(call)
    macros = channel_cuda.macros(call, plan)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cuda.compile_cubin(channel_cuda.source(plan.kind), "sm_90a", macros))
    tool = [str(cuobjdump()), "--dump-resource-usage", str(path)]
    said = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"STACK:(\d+)", said) and set(re.findall(r"STACK:(\d+)", said)) == {"0"}


@ON_GPU
@CASE
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_results(case, dtype, monkeypatch):
    """Twice: the ring's header serves the next call."""
    make, tiling, _, _ = case
    op, t = make().spec.name, make().tensors
    n, c, *spatial = t.input.shape
    if dtype == F32 and isinstance(tiling, Ring):
        spatial[-1] //= 2
    if dtype == F32 and isinstance(tiling, Team):
        tiling = dataclasses.replace(tiling, vector_bytes=16, vectors=2 * tiling.vectors)
    x = random(n, c, *spatial, dtype=dtype)
    statistics = running(c) if getattr(t, "running_mean", None) else [None, None]
    weights = affine(c) if getattr(t, "weight", None) else [None, None]
    own = make().params if op == "instance_norm" else None
    training = getattr(make().params, "training", True)
    call = {
        "batch_norm": lambda: train(x) if training else evaluate(x),
        "instance_norm": lambda: Call.of(
            CATALOGUE[op],
            [x, *statistics, *weights],
            OWN | {"use_input_stats": own.use_input_stats},
        ),
        "batch_norm_backward": lambda: gradients(x),
        "group_norm": lambda: call_of(op, x, None, None),
    }[op]()
    put(monkeypatch, call, tiling)
    assert channel_cuda.prepare(call) is not None
    for _ in range(2):
        if op == "batch_norm":
            batch_norm(x, training=training)
        elif op == "instance_norm":
            instance_norm(x, *statistics, *weights, use_input_stats=own.use_input_stats)
        elif op == "group_norm":
            group_norm(x, 3, None, None)
        else:  # the rounding of a sum's terms is not small beside a sum near 0
            backward(x, rtol=max(RTOL[dtype], 1e-4), atol=2e-3)


@ON_GPU
@CASE
def test_the_same_bits_every_time(case, monkeypatch):
    make, tiling, _, _ = case
    call = make()
    put(monkeypatch, call, tiling)
    tensors = [None if m is None else random(*m.shape, dtype=m.dtype).abs()
               for m in vars(call.tensors).values()]  # fmt: skip
    launch = channel_cuda.prepare(call)
    results = [launch(*[None if t is None else t.clone() for t in tensors]) for _ in range(2)]
    first, second = (r if isinstance(r, tuple) else (r,) for r in results)
    assert all(map(torch.equal, first, second))


def test_source_is_packaged():
    folder = pathlib.Path(channel_cuda.__file__).parent / "csrc"
    for kind in channel_cuda.KINDS:
        text = (folder / f"channel_{kind}.cu").read_text("utf-8")
        assert channel_cuda.source(kind).endswith(text)
