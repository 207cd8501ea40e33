"""The rows and tilings of misc_backward.py."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import common
import torch
from common import ROOT

sys.path[:0] = [str(ROOT / "core/src"), str(ROOT / "packages/misc/src")]

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_misc import fft, mhc_post_backward, mhc_pre_backward  # noqa: E402

TYPES = common.DTYPES | {"c64": torch.complex64, "c128": torch.complex128}
STREAMS = 4
ARGS = {"alpha_pre": 0.01, "alpha_post": 0.01, "alpha_res": 0.01, "sinkhorn_eps": 0.02}


@dataclasses.dataclass(frozen=True)
class Row:
    """sizes: batch and columns of a stream (MHC), or the input's shape; repeat: Sinkhorn's."""

    op: str
    label: str
    dtype: str
    sizes: tuple[int, ...]
    repeat: int = 1
    bar: float = 0
    page: float = 0

    def forward(self, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The forward's tensors and parameters."""
        dtype = TYPES[self.dtype]
        new = functools.partial(torch.randn, device=device)
        if self.op.startswith("fft"):
            n, dim = self.sizes[-1], len(self.sizes) - 1
            return [new(self.sizes, dtype=dtype)], {"n": n, "dim": dim, "norm": "backward"}
        batch, columns = self.sizes
        width = STREAMS * columns
        if self.op.startswith("mhc_post"):
            layer, res = new(batch, columns).to(dtype), new(batch, width).to(dtype)
            return [layer, new(batch, STREAMS), res], {}
        m = STREAMS * (STREAMS + 2)
        given = [new(width, m) / width**0.5, new(batch, width).to(dtype), new(m)]
        return given, ARGS | {"sinkhorn_repeat": self.repeat, "return_h_post": False}

    def call(self, device: str) -> tuple[Call, list[torch.Tensor], list[torch.Tensor]]:
        """The backward's call, its tensors, and those of the forward."""
        given, params = self.forward(device)
        spec = CATALOGUE[self.op]
        rest = {"output_mask": (True,) * len(spec.outputs)}
        randn = torch.randn_like
        if self.op == "mhc_pre_backward":
            layer = given[1][:, : self.sizes[1]].contiguous()
            empty = torch.empty(0, device=device)
            tensors = [randn(given[1]), randn(layer), empty, *given]
        elif self.op == "mhc_post_backward":
            tensors = [randn(given[2]), *given[:2]]
            rest["x_res_shape"] = tuple(given[2].shape)
        else:
            tensors = [randn(given[0])]
            rest["input_shape"] = self.sizes
        real = device != "meta"
        return Call.of(spec, tensors, params | rest, real=real), tensors, given


ROWS = [
    *[Row("fft_backward", f"fft-4k-{d}-b64", d, (64, 4096)) for d in ("c64", "c128")],
    Row("fft_backward", "fft-4k-c64-unbatched", "c64", (4096,)),
    *[
        Row(f"mhc_{op}_backward", f"{op}-{name}", "bf16", sizes)
        for op in ("post", "pre")
        for name, sizes in (("large", (4, 2560)), ("medium", (2, 1920)), ("small", (1, 1280)))
    ],
    Row("mhc_pre_backward", "pre-64", "bf16", (64, 2560)),
    Row("mhc_pre_backward", "pre-tokens", "bf16", (8192, 2560), 20),
    Row("mhc_pre_backward", "pre-tokens", "f32", (4096, 1280), 20),
    Row("mhc_post_backward", "post-64", "bf16", (64, 2560)),
    Row("mhc_post_backward", "post-tokens", "bf16", (8192, 2560)),
    Row("mhc_post_backward", "post-tokens", "f32", (8192, 1280)),
]


def pre_tilings(row: Row) -> list[Any]:
    """The rule's, and others around it."""
    own = mhc_pre_backward.rule(*row.sizes, STREAMS, TYPES[row.dtype].itemsize)
    change, columns = functools.partial(dataclasses.replace, own), row.sizes[1]
    if row.label == "pre-medium":
        return [own]
    found = [own, change(sum_warps=8 if own.fold else 4)]
    if own.fold:
        found += [change(sum_columns=b, splits=columns // b) for b in (32, 128)]
        found += [change(columns=32), change(warps=8), change(columns=128, warps=8)]
        return [*found, change(fold=False, gate_rows=1, gate_warps=4)]
    found += [change(groups=g) for g in (own.groups * 2, own.groups * 4)]
    found += [change(splits=own.splits * 2), change(sum_rows=16), change(rows=32)]
    if row.dtype == "bf16" and row.sizes[0] > 64:
        found += [change(sum_columns=64), change(sum_rows=64), change(stages=2), change(stages=3)]
        found += [change(precision="ieee"), change(gate_rows=8), change(gate_rows=1)]
    return found


def post_tilings(row: Row) -> list[Any]:
    """The rule's for few rows and for many, and others."""
    sizes = (STREAMS, row.sizes[1], TYPES[row.dtype].itemsize)
    own = mhc_post_backward.rule(row.sizes[0], *sizes)
    many, few = mhc_post_backward.rule(65, *sizes), mhc_post_backward.rule(1, *sizes)
    found = [own, few, many]
    if own.spread:
        found += [dataclasses.replace(own, num_warps=w) for w in (2, 4, 8, 16)]
    blocks = ((256, 1), (512, 2), (1024, 2), (1024, 4), (1024, 8), (2048, 8))
    return [*found, *[dataclasses.replace(many, block_c=b, num_warps=w) for b, w in blocks]]


def fft_tilings(row: Row) -> list[Any]:
    transforms = row.sizes[0] if len(row.sizes) > 1 else 1
    own = fft.rule(row.sizes[-1], TYPES[row.dtype], transforms, False)
    others = [fft.Tiling(p, cluster=c) for p in (8, 16) for c in (1, 2, 8)]
    return [own, *others]


TILINGS: dict[str, Callable[[Row], list[Any]]] = {
    "fft_backward": fft_tilings,
    "mhc_pre_backward": pre_tilings,
    "mhc_post_backward": post_tilings,
}


def name_of(tiling: Any, own: Any) -> str:
    """What differs from the rule's."""
    given, usual = dataclasses.asdict(tiling), dataclasses.asdict(own)
    return " ".join(f"{k}={v}" for k, v in given.items() if v != usual[k]) or "own"


def named(row: Row) -> dict[str, Any]:
    tilings = list(dict.fromkeys(TILINGS[row.op](row)))
    return {name_of(t, tilings[0]): t for t in tilings}
