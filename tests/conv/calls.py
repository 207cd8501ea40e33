"""Calls of the tests of CUDA C++ convolutions, and what their outputs have to be."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_conv import conv_plan
from opkiln_conv.geometry import geometry_of
from opkiln_conv.launch import prepare

F16, BF16 = torch.float16, torch.bfloat16


def call_of(x, w, bias, stride=1, padding=0, dilation=1, groups=1, real=True):
    n = x.ndim - 2
    params = dict(stride=(stride,) * n, padding=(padding,) * 2 * n, dilation=(dilation,) * n)
    params |= dict(groups=groups, allow_tf32=False)
    return Call.of(CATALOGUE[f"conv{n}d"], [x, w, bias], params, real=real)


def call_of_row(row, dtype=F16, bias=False):
    """A call of one image that the table's row serves."""
    shape = (1, row["groups"] * row["of_group"], *row["sizes"])
    weight = (row["groups"] * row["group_outs"], row["of_group"], *row["kernel"])
    x, w = (torch.empty(s, dtype=dtype, device="meta") for s in (shape, weight))
    b = torch.empty(weight[0], dtype=dtype, device="meta") if bias else None
    how = {k: tuple(row[k]) for k in ("stride", "dilation")} | {"groups": row["groups"]}
    how |= dict(padding=tuple(p for p in row["padding"] for _ in "ab"), allow_tf32=False)
    return Call.of(CATALOGUE["conv3d"], [x, w, b], how, real=False)


def assert_right(call, got, x, w, bias):
    """Against float64, relative to the output's scale: sums of many products cancel."""
    wide = [None if v is None else v.double() for v in (x, w, bias)]
    want = call.spec.reference(*wide, **vars(call.params))
    tolerance = {F16: 2**-10, BF16: 2**-7}[x.dtype]
    scale = float(want.square().mean().sqrt())
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale)


def cuobjdump(what, cubin, folder):
    """What Triton's cuobjdump prints of a cubin."""
    triton = pytest.importorskip("triton")
    path = folder / "kernels.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, path], capture_output=True, text=True, check=True).stdout


def stacks(cubin, folder):
    """Bytes of stack of each kernel: spills, or arrays indexed at run time."""
    return re.findall(r"STACK:(\d+)", cuobjdump("-res-usage", cubin, folder))


def by_engine(engine, monkeypatch):
    """What runs a convolution by a tiling of `engine`, on random tensors, and checks the output."""
    torch.manual_seed(0)

    def run(shape, weight, t, dtype=F16, bias=True, **window):
        monkeypatch.setattr(conv_plan, "tuned", lambda *_: (t, "test"))
        x, w = torch.randn(shape).to(dtype), torch.randn(weight).to(dtype)
        b = torch.randn(weight[0]).to(dtype) if bias else None
        call = call_of(x, w, b, **window)
        assert engine.can_use(geometry_of(call), t)
        got = prepare(call)(x, w, b)
        assert_right(call, got, x, w, b)
        return got

    return run
