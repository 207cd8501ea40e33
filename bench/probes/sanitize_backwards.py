"""The calls of sanitize_cases.py that launch the backwards of row norms, pools, FFT and MHC."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from sanitize_norms import Case, on_gpu


def gradients_of(function: Callable[..., Any], *tensors: Any, **options: Any) -> None:
    """Those of all tensors that have one, by our kernels."""
    import torch

    leaves = [
        t.detach().requires_grad_() if t is not None and (t.is_floating_point() or t.is_complex())
        else t for t in tensors
    ]  # fmt: skip
    out = function(*leaves, backend="opkiln", **options)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
    torch.autograd.backward(outs, [o.detach().clone() for o in outs])


def row_backwards() -> Iterator[Case]:
    import torch
    from opkiln import functional as F

    bf16, f32 = torch.bfloat16, torch.float32
    # Several rows a tile; one; one that is read again; one wider than a program.
    sizes = ((37, 250), (21, 1000), (5, 16384), (4, 40000))
    plain = [(*size, bf16) for size in sizes] + [(37, 250, f32), (9, 4096, f32)]
    for rows, n, dtype in plain:
        x, w = on_gpu(rows, n, dtype=dtype), on_gpu(n, dtype=dtype)
        name = f"{rows} x {n} {dtype} backward"
        yield (
            f"rms_norm {name}",
            lambda x=x, w=w: gradients_of(
                lambda x, w, **k: F.rms_norm(x, w.shape, w, **k), x, w
            ),
        )  # fmt: skip
        yield (
            f"layer_norm {name}",
            lambda x=x, w=w: gradients_of(
                lambda x, w, b, **k: F.layer_norm(x, w.shape, w, b, **k), x, w, w
            ),
        )
    for rows, n in sizes:
        x, r, w = on_gpu(rows, n), on_gpu(rows, n), on_gpu(n)
        yield (
            f"fused_add_rms_norm {rows} x {n} backward",
            lambda x=x, r=r, w=w: gradients_of(
                lambda x, r, w, **k: F.fused_add_rms_norm(x, r, w.shape, w, **k), x, r, w
            ),
        )
    yield from ring_backwards(F)
    x, r, w = on_gpu(21, 1000), on_gpu(21, 1000), on_gpu(1000)
    yield (
        "fused_add_layer_norm backward",
        lambda: gradients_of(
            lambda x, r, w, b, **k: F.fused_add_layer_norm(x, r, w.shape, w, b, **k), x, r, w, w
        ),
    )
    for shape, modulation in (
        ((21, 1000), (21, 1000)), ((3, 7, 1000), (3, 1, 1000)), ((2, 3, 16384), (2, 1, 16384)),
    ):  # fmt: skip
        x, m = on_gpu(*shape), on_gpu(*modulation)
        yield (
            f"ada_layer_norm_zero {shape} backward",
            lambda x=x, m=m: gradients_of(F.ada_layer_norm_zero, x, m, m, m),
        )


def ring_backwards(functional: Any) -> Iterator[Case]:
    """By the kernel in CUDA C++, whatever its rule: more rows than CTAs and stages hold."""
    from opkiln_norm import row_backward_ring

    for i, use in enumerate(((64, 2, 2), (128, 1, 3, 2), (64, 2, 1, 1, 2))):
        tiling = row_backward_ring.RingTiling(*use)
        x, r, w = on_gpu(700 + i, 1000), on_gpu(700 + i, 1000), on_gpu(1000)
        calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "rms_norm": (lambda x, w, **k: functional.rms_norm(x, w.shape, w, **k), (x, w)),
            "layer_norm": (
                lambda x, w, b, **k: functional.layer_norm(x, w.shape, w, b, **k), (x, w, w),
            ),
            "fused_add_rms_norm": (
                lambda x, r, w, **k: functional.fused_add_rms_norm(x, r, w.shape, w, **k),
                (x, r, w),
            ),
        }  # fmt: skip

        def run(function: Any, tensors: Any, tiling: Any = tiling) -> None:
            before, row_backward_ring.rule = row_backward_ring.rule, lambda call, plan: tiling
            gradients_of(function, *tensors)
            row_backward_ring.rule = before

        for op, (function, tensors) in calls.items():
            yield f"{op} {tiling} backward", lambda f=function, t=tensors, run=run: run(f, t)


def pool_backwards() -> Iterator[Case]:
    import torch
    from opkiln import functional as F

    for dtype in (torch.bfloat16, torch.float32):
        line, even = on_gpu(3, 5, 1001, dtype=dtype), on_gpu(2, 8, 56, 56, dtype=dtype)
        plane, volume = on_gpu(3, 5, 55, 57, dtype=dtype), on_gpu(2, 3, 9, 14, 16, dtype=dtype)
        last = even.contiguous(memory_format=torch.channels_last)
        small = on_gpu(3, 5, 9, 11, dtype=dtype)
        calls: dict[str, tuple[Any, ...]] = {
            "max_pool1d": (F.max_pool1d, line, (3, 2, 1)),
            "max_pool2d": (F.max_pool2d, plane, (3, 2, 1)),
            "max_pool2d even": (F.max_pool2d, even, (2, 2)),
            "max_pool2d dilated": (F.max_pool2d, plane, (3, 1, 1, 2)),
            "max_pool2d last": (F.max_pool2d, last, (3, 2, 1)),
            "max_pool3d": (F.max_pool3d, volume, (3, 2, 1)),
            "max_pool1d long": (F.max_pool1d, line, (128, 1)),
            "avg_pool1d": (F.avg_pool1d, line, (4, 2, 1, True)),
            "avg_pool2d": (F.avg_pool2d, plane, (3, 2, 1, True)),
            "avg_pool2d last": (F.avg_pool2d, last, (3, 2, 1)),
            "avg_pool3d": (F.avg_pool3d, volume, (3, 2, 1)),
            "adaptive_max_pool2d": (F.adaptive_max_pool2d, plane, (7,)),
            "adaptive_avg_pool2d": (F.adaptive_avg_pool2d, plane, (7,)),
            "adaptive_max_pool2d whole": (F.adaptive_max_pool2d, small, (1,)),
            "adaptive_avg_pool2d whole": (F.adaptive_avg_pool2d, small, (1,)),
        }
        for name, (function, x, args) in calls.items():
            yield (
                f"{name} backward {dtype}",
                lambda f=function, x=x, a=args: gradients_of(lambda t, **k: f(t, *a, **k), x),
            )
        tokens = on_gpu(1, 100, 3, 40, dtype=dtype)
        ends = torch.tensor([0, 7, 64, 100], dtype=torch.int32).cuda()
        yield (
            f"mean_pooling backward {dtype}",
            lambda x=tokens: gradients_of(lambda t, **k: F.mean_pooling(t, 16, **k), x),
        )
        yield (
            f"mean_pooling varlen backward {dtype}",
            lambda x=tokens, e=ends: gradients_of(
                lambda t, **k: F.mean_pooling(t, 16, e, num_chunks=8, **k), x
            ),
        )


def narrow_clusters() -> None:
    """From now on mhc_pre takes clusters of 8 CTAs where not all run at once. In wider ones, when
    another cluster comes, synccheck (2025.3.1) misses the waits of the ninth CTA and later ones,
    also in a kernel that only arrives at its own barrier and waits (docs/perf/misc.md).
    """
    from opkiln_misc import mhc_pre

    rule = mhc_pre.rule

    def narrow(batch: int, width: int, streams: int) -> mhc_pre.Tiling:
        tiling = rule(batch, width, streams)
        waves = -(-batch // tiling.rows) > mhc_pre.ONE_WAVE
        return dataclasses.replace(tiling, cluster=8) if waves else tiling

    mhc_pre.rule = narrow


def misc_backwards() -> Iterator[Case]:
    import torch
    from opkiln import functional as F

    if os.environ.get("SANITIZER") == "synccheck":
        narrow_clusters()
    for shape in ((3, 8), (5, 256), (3, 4096), (4096,)):
        x = torch.randn(shape, dtype=torch.complex64).cuda()
        yield f"fft {shape} backward", lambda x=x: gradients_of(F.fft, x)
    # Few rows in two launches, more in three, several groups of rows in four; 8 streams in parts.
    for batch, n, c in ((4, 4, 2560), (12, 4, 40), (70, 4, 40), (9, 8, 33)):
        m = n * n + 2 * n
        phi, b = on_gpu(n * c, m, dtype=torch.float32), on_gpu(m, dtype=torch.float32)
        x, layer = on_gpu(batch, n * c), on_gpu(batch, c)
        post = on_gpu(batch, n, dtype=torch.float32)
        yield (
            f"mhc_pre {batch} x {n} x {c} backward",
            lambda p=phi, x=x, b=b: gradients_of(
                lambda p, x, b, **k: F.mhc_pre(p, x, b, 1.0, 1.0, 1.0, 2, return_h_post=True, **k),
                p, x, b,
            ),
        )  # fmt: skip
        yield (
            f"mhc_post {batch} x {n} x {c} backward",
            lambda x=x, y=layer, h=post: gradients_of(F.mhc_post, y, h, x),
        )
