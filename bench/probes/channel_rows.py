"""The rows of the channel norms: shapes, tensors, what a right result is."""

import dataclasses
import math
from typing import Any

import common  # noqa: F401  # puts bench/src on the path
import torch
from common import DTYPES
from opkiln.ops import CATALOGUE
from opkiln.spec import Call

TOLERANCE = {"bf16": 2**-7, "f16": 2**-10, "f32": 2**-18}
LARGE = 2**24  # elements, above which a row is bound by bandwidth


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the pages. flags: affine, running, eval, cl (channels_last), gN (N groups)."""

    op: str
    label: str
    dtype: str
    shape: tuple[int, ...]
    flags: tuple[str, ...]
    bar: float
    page: float

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def backward(self) -> bool:
        return self.op == "batch_norm_backward"

    @property
    def large(self) -> bool:
        return math.prod(self.shape) >= LARGE

    @property
    def groups(self) -> int:
        return next((int(f[1:]) for f in self.flags if f[0] == "g"), 0)

    @property
    def params(self) -> dict[str, Any]:
        if self.backward:
            return {"training": True, "output_mask": (True, True, True)}
        if self.op == "group_norm":
            return {"num_groups": self.groups, "eps": 1e-5}
        statistics = "training" if self.op == "batch_norm" else "use_input_stats"
        return {statistics: "eval" not in self.flags, "momentum": 0.1, "eps": 1e-5}

    def tensors(self, device: str) -> list[Any]:
        def data() -> torch.Tensor:
            t = torch.randn(self.shape, dtype=DTYPES[self.dtype], device=device)
            return t.to(memory_format=torch.channels_last) if "cl" in self.flags else t

        def channel(dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.rand(self.shape[1], dtype=dtype, device=device) + 0.5

        if self.backward:
            return [data(), data(), channel(), channel() - 1, channel()]
        own = torch.float32 if self.op == "batch_norm" else DTYPES[self.dtype]
        affine = [channel(own) if "affine" in self.flags else None for _ in range(2)]
        running = [channel() if "running" in self.flags else None for _ in range(2)]
        return [data(), *affine] if self.op == "group_norm" else [data(), *running, *affine]

    def call(self, tensors: list[Any], real: bool = True) -> Call:
        return Call.of(CATALOGUE[self.op], tensors, self.params, real=real)


# op, label, dtype, shape, flags, fastest alternative here, best of the pages (us; 0: not known).
# Those behind come first; those whose kernels wait for each other, and might hang, last.
ROWS = """
instance_norm image-affine          bf16 8x128x32x32     affine         2.736 2.94
instance_norm image-affine          f16  8x128x32x32     affine         2.736 2.91
instance_norm image                 bf16 8x128x32x32     -              2.689 2.88
instance_norm image                 f16  8x128x32x32     -              2.751 2.85
instance_norm image-channels-last   f16  8x128x32x32     affine,cl      0 0
instance_norm tail-spatial-affine   f16  4x64x30x30      affine         2.177 2.37
instance_norm tail-spatial          f16  4x64x30x30      -              2.112 2.24
instance_norm wider-channel-affine  f16  4x256x28x28     affine         2.592 2.72
instance_norm wider-channel         f16  4x256x28x28     -              2.528 2.66
instance_norm wider-channel-affine  f32  4x256x28x28     affine         0 3.42
instance_norm wider-channel         f32  4x256x28x28     -              3.28 3.42
instance_norm image-track-stats     f16  8x128x32x32     running        0 2.94
instance_norm image-eval            f16  8x128x32x32     affine,running,eval 0 2.82
batch_norm_backward resnet50-fc     f16  32x64           -              1.696 1.95
batch_norm resnet50-fc              f16  32x64           affine,running 1.568 1.82
batch_norm resnet-stage3-eval       f16  4x256x28x28     affine,running,eval 2.497 2.66
batch_norm_backward resnet50-stage1 f16  8x64x32x32      -              3.007 3.39
batch_norm_backward resnet50-stage2 f16  4x128x32x32     -              2.528 2.94
batch_norm_backward resnet50-stage3 f16  4x256x28x28     -              3.168 4.19
batch_norm_backward resnet50-stage1 bf16 8x64x32x32      -              3.007 3.33
batch_norm_backward resnet50-stage3 f32  4x256x28x28     -              0 5.47
batch_norm_backward stage1-channels-last f16 8x64x32x32  cl             0 0
batch_norm resnet50-stage1          f16  8x64x32x32      affine,running 2.896 2.82
batch_norm resnet50-stage2          f16  4x128x32x32     affine,running 2.432 2.59
batch_norm resnet50-stage3          f16  4x256x28x28     affine,running 3.456 3.49
batch_norm resnet50-stage1          bf16 8x64x32x32      affine,running 2.896 2.75
batch_norm resnet50-stage3          f32  4x256x28x28     affine,running 3.424 4.45
batch_norm resnet-stem              bf16 8x64x56x56      -              7.68 6.46
batch_norm stage1-channels-last     f16  8x64x32x32      affine,running,cl 0 0
group_norm image-g32-affine         bf16 8x128x32x32     affine,g32     3.2 3.3
group_norm image-g32-affine         f16  8x128x32x32     affine,g32     3.2 3.27
group_norm image-g32                bf16 8x128x32x32     g32            5.888 3.17
group_norm image-g32                f16  8x128x32x32     g32            5.088 3.17
group_norm image-channels-last      f16  8x128x32x32     affine,g32,cl  0 0
group_norm tail-spatial-g16-affine  f16  4x128x30x30     affine,g16     3.52 3.91
group_norm tail-spatial-g16         f16  4x128x30x30     g16            4.353 3.17
group_norm wider-channel-g32-affine f16  4x256x28x28     affine,g32     3.472 3.94
group_norm wider-channel-g32        f16  4x256x28x28     g32            4.527 3.49
group_norm wider-channel-g32-affine f32  4x256x28x28     affine,g32     0 4.8
group_norm wider-channel-g32        f32  4x256x28x28     g32            3.328 4.42
batch_norm_backward large-spatial   f16  4x128x1024x1024 -              1217.729 1206
batch_norm large-spatial            f16  4x128x1024x1024 affine,running 746.192 750.4
"""


def read_rows(only: str) -> list[Row]:
    rows = []
    for text in ROWS.strip().splitlines():
        op, label, dtype, shape, flags, bar, page = text.split()
        dims = tuple(int(n) for n in shape.split("x"))
        rows.append(Row(op, label, dtype, dims, tuple(flags.split(",")), float(bar), float(page)))
    names = only.split(",")
    return [r for r in rows if any(n in f"{r.op} {r.label} {r.dtype}" for n in names)]


def reference(row: Row, tensors: list[Any]) -> list[torch.Tensor]:
    """Outputs and running statistics in float64, some channels at a time."""
    if not row.large:
        return reference_part(row, tensors)
    parts = []
    for c in range(0, row.shape[1], 8):
        cut = [None if t is None else t[c : c + 8] if t.ndim == 1 else t[:, c : c + 8]
               for t in tensors]  # fmt: skip
        parts.append(reference_part(row, cut))
    return [torch.cat(p, 1 if p[0].ndim > 1 else 0) for p in zip(*parts, strict=True)]


def reference_part(row: Row, tensors: list[Any]) -> list[torch.Tensor]:
    wide = [None if t is None else t.double() for t in tensors]
    outs = CATALOGUE[row.op].reference(*wide, **row.params)
    visible = outs if row.backward else outs[:1]
    running = wide[1:3] if "running" in row.flags else []
    dtypes = [DTYPES[row.dtype]] + [torch.float32] * 4
    return [t.to(d) for t, d in zip([*visible, *running], dtypes, strict=False)]


def wrong_elements(row: Row, got: list[torch.Tensor], want: list[torch.Tensor]) -> int:
    """How many elements are off by more than one unit in the last place; NaN is off."""
    wrong = 0
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        # A sum over millions of products is off by its terms' rounding, not by its own.
        count = math.prod(row.shape) // row.shape[1]
        sums = row.backward and k > 0
        rtol = TOLERANCE[row.dtype] if k == 0 else 1e-4 if sums else 1e-5
        atol = 1e-6 * math.sqrt(count) * 4 if sums else 2**-18
        for a, b in zip(g.flatten().split(2**27), w.flatten().split(2**27), strict=True):
            close = (a.float() - b.float()).abs() <= rtol * b.float().abs() + atol
            wrong += close.numel() - int(close.sum())
    return wrong


def baselines(row: Row, tensors: list[Any], compiled: bool) -> dict[str, Any]:
    """torch, and torch.compile of it; none for a row whose torch kernel takes milliseconds."""
    if row.large:
        return {}
    params = row.params
    functional = torch.nn.functional
    formula: Any = {
        "batch_norm": functional.batch_norm,
        "instance_norm": functional.instance_norm,
        "group_norm": lambda x, w, b, num_groups, eps: functional.group_norm(
            x, num_groups, w, b, eps
        ),
        "batch_norm_backward": CATALOGUE[row.op].native,
    }[row.op]
    found = {"torch": lambda: formula(*tensors, **params)}
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(lambda *t: formula(*t, **params), dynamic=False)
        found["torch-compile"] = lambda: function(*tensors)
    return found
