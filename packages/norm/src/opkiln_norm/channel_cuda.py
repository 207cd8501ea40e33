"""Channel norms in CUDA C++: batch_norm, its backward, instance_norm, and group_norm without an
affine, whose groups are instances; x contiguous.

team      small sets, each in the registers of one or several warps      csrc/channel_team.cu
flat      given statistics: an elementwise kernel                        csrc/channel_flat.cu
columns   batch norm of few rows [N, C]                                  csrc/channel_columns.cu
ring      batch norm of channels of megabytes, read once                 csrc/channel_ring.cu

They serve what `cuda_rows` of tuning/channel_sm90.json names by op, element size, mode, channels
and columns, for any number of samples that fits; the Triton kernels of channel_norm serve the rest,
and all of it without cuda-core.
"""

import ctypes
import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from opkiln.device import cuda
from opkiln.spec import Call, TensorMeta

from opkiln_norm.channel_cuda_tilings import KINDS, Flat, Launch, Ring, Sizes, Team, Tiling
from opkiln_norm.channel_plan import tuning_table
from opkiln_norm.row_cluster import EXTRA, TYPES

OPS = ("batch_norm", "instance_norm", "batch_norm_backward", "group_norm")


@dataclass(frozen=True, slots=True)
class Plan:
    """A tiling, the sizes it is for, and the label of the table's row."""

    tiling: Tiling
    sizes: Sizes
    source: str

    @property
    def kind(self) -> str:
        return type(self.tiling).__name__.lower()


@functools.cache
def source(kind: str) -> str:
    folder = resources.files("opkiln_norm") / "csrc"
    parts = ("channel.cuh", f"channel_{kind}.cu")
    return "".join((folder / part).read_text("utf-8") for part in parts)


def cuda_rows() -> list[dict[str, Any]]:
    """The table's tilings of these kernels."""
    return tuning_table()["cuda_rows"]


def contiguous(meta: TensorMeta) -> bool:
    expected = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def sizes_of(call: Call) -> Sizes:
    x, params, op = call.tensors.input, call.params, call.spec.name
    n, c = x.shape[:2]
    mode = ""
    if op == "group_norm":
        c = params.num_groups
    elif op != "batch_norm_backward":
        own = params.training if op == "batch_norm" else params.use_input_stats
        running = call.tensors.running_mean is not None
        mode = "" if own else "given"
        if own and running and op == "instance_norm":
            mode = "averaged"
    return Sizes(
        samples=n,
        channels=c,
        cols=x.numel // (n * c),
        itemsize=x.dtype.itemsize,
        mode=mode,
        pooled=op in ("batch_norm", "batch_norm_backward") and mode != "given",
        tensors=2 if op == "batch_norm_backward" else 1,
    )


def readable(call: Call) -> bool:
    """Whether the tensors lie as the kernels read them."""
    given = {k: m for k, m in vars(call.tensors).items() if m is not None}
    if not all(contiguous(m) and m.aligned for m in given.values()):
        return False
    if not all(contiguous(m) for m in call.outputs):
        return False
    w, b = given.get("weight"), given.get("bias")
    if call.spec.name == "group_norm" and (w is not None or b is not None):
        return False
    if w is not None and b is not None and w.dtype != b.dtype:
        return False
    if call.spec.name != "batch_norm_backward":
        return True
    same = given["grad_out"].dtype == given["input"].dtype
    f32 = given["mean"].dtype == given["rstd"].dtype == torch.float32
    return bool(call.params.training and call.params.output_mask[0] and same and f32)


def plan_for(call: Call) -> Plan | None:
    """The plan of a call that the table covers and whose tensors these kernels can read."""
    if call.spec.name not in OPS or 0 in call.tensors.input.shape:
        return None
    s = sizes_of(call)
    key = (call.spec.name, s.itemsize, s.mode, s.channels, s.cols)
    for row in cuda_rows():
        if key == (row["op"], row["itemsize"], row["mode"], row["channels"], row["cols"]):
            tiling = KINDS[row["kind"]](**row["use"])
            return Plan(tiling, s, row["label"]) if tiling.fits(s) and readable(call) else None
    return None


def macros(call: Call, plan: Plan) -> dict[str, int]:
    t = call.tensors
    backward = call.spec.name == "batch_norm_backward"
    w, b, rm = t.weight, getattr(t, "bias", None), getattr(t, "running_mean", None)
    parameter = w or b or (call.outputs[-1] if backward else t.input)
    return {
        "TYPE": TYPES[t.input.dtype],
        "WEIGHT_TYPE": TYPES[parameter.dtype],
        "RUNNING_TYPE": TYPES[(rm or t.input).dtype],
        "HAS_WEIGHT": int(w is not None),
        "HAS_BIAS": int(b is not None),
        "HAS_RUNNING": int(rm is not None),
        "CHANNELS": plan.sizes.channels,
        **plan.tiling.macros(plan.sizes),
    }


class Headers:
    """The ring's workspace: kept for each stream, so that two launches at once share none. A
    captured launch, which may run on any stream, has its own.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self.words, self.device = words, device
        self.kept: dict[int, torch.Tensor] = {}

    def get(self) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(self.words, dtype=torch.int64, device=self.device)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if stream not in self.kept:
            self.kept[stream] = torch.zeros(self.words, dtype=torch.int64, device=self.device)
        return self.kept[stream]


def prepare(call: Call) -> Launch | None:
    """The launch of a call that one of these kernels serves here, else None."""
    plan = plan_for(call)
    if plan is None or cuda.why_not(call.device, EXTRA) is not None:
        return None
    s, backward = plan.sizes, call.spec.name == "batch_norm_backward"
    name = f"channel_{plan.kind}_{'backward' if backward else 'forward'}"
    kernel = cuda.load(source(plan.kind), name, call.device, macros(call, plan))
    send = plan.tiling.launch(kernel, s)
    if send is None:
        return None
    headers = None
    if isinstance(plan.tiling, Ring):
        words = 1 + 4 * plan.tiling.groups * plan.tiling.slices(s)
        headers = Headers(words, call.device)
    make = backward_launch if backward else forward_launch
    return make(call, plan, send, headers)


def forward_launch(call: Call, plan: Plan, send: Launch, headers: Headers | None) -> Launch:
    s, device, params = plan.sizes, call.device, call.params
    metas = [(m.shape, m.stride, m.dtype) for m in call.outputs]
    count = s.cols * (s.samples if s.pooled else 1)
    floats = tuple(map(ctypes.c_float, (
        1 / count, 1 / max(count - 1, 1), params.eps, getattr(params, "momentum", 0.0),
    )))  # fmt: skip
    saved = call.outputs[1].numel if len(call.outputs) > 1 else 0
    told = [saved] if isinstance(plan.tiling, (Team, Flat)) else []
    counts = (*plan.tiling.counts(s), *told)

    def launch(x: torch.Tensor, *channel: torch.Tensor | None) -> Any:
        outputs = [torch.empty_strided(*m[:2], dtype=m[2], device=device) for m in metas]
        mean, rstd = outputs[1:] or (0, 0)
        rm, rv, w, b = (0 if t is None else t for t in (*channel, None, None)[:4])
        header = [] if headers is None else [headers.get()]
        send(x, rm, rv, w, b, outputs[0], mean, rstd, *header, *counts, *floats)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch


def backward_launch(call: Call, plan: Plan, send: Launch, headers: Headers | None) -> Launch:
    s, device, mask = plan.sizes, call.device, call.params.output_mask
    metas = [(m.shape, m.stride, m.dtype) for m in call.outputs]
    inverse = ctypes.c_float(1 / (s.cols * s.samples))
    counts = plan.tiling.counts(s)

    def launch(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, *stats: Any) -> Any:
        outputs = [torch.empty_strided(*m[:2], dtype=m[2], device=device) for m in metas]
        given = iter(outputs)
        grads = [next(given) if wanted else 0 for wanted in mask]
        header = [] if headers is None else [headers.get()]
        send(g, x, 0 if w is None else w, *stats, *grads, *header, *counts, inverse)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return launch
