"""What sanitize.py runs under compute-sanitizer: small calls that launch every kernel of a family.

    python3 bench/probes/sanitize_cases.py FAMILY STATUS.json [PLANTED ...]

Sizes are odd where a kernel masks, and small: a sanitized launch takes 10 to 100 times as long.
"""

import importlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = (
    "core",
    "packages/norm",
    "packages/pool",
    "packages/rope",
    "packages/misc",
    "packages/conv",
)
sys.path[:0] = [str(ROOT / folder / "src") for folder in FOLDERS]

from sanitize_backwards import misc_backwards, pool_backwards, row_backwards  # noqa: E402
from sanitize_norms import Case, channel_norms, on_gpu, row_norms  # noqa: E402

PLANTED_SOURCE = """
extern "C" __global__ void planted_memory(int* x, long long n) { x[n + threadIdx.x] = 1; }
extern "C" __global__ void planted_race(int* x, long long n) {
    __shared__ int s[64];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
extern "C" __global__ void planted_sync(int* x, long long n) {
    if (threadIdx.x % 32 < 16) __syncthreads();
    x[threadIdx.x] = 1;
}
"""


def pools() -> Iterator[Case]:
    import torch
    from opkiln import functional as F

    given = {"backend": "opkiln"}
    for dtype in (torch.bfloat16, torch.float32):
        one, two = on_gpu(3, 5, 1001, dtype=dtype), on_gpu(3, 5, 55, 57, dtype=dtype)
        three, even = on_gpu(2, 3, 9, 14, 16, dtype=dtype), on_gpu(2, 8, 56, 56, dtype=dtype)
        small = on_gpu(3, 5, 9, 11, dtype=dtype)  # planes that are a row of a tile
        last = even.contiguous(memory_format=torch.channels_last)
        for indexed in (False, True):
            kind = f"{dtype} indices {indexed}"
            more = {"return_indices": indexed, **given}
            yield f"max_pool1d {kind}", lambda x=one, m=more: F.max_pool1d(x, 3, 2, 1, **m)
            for x in (two, even, last):
                name = f"max_pool2d {tuple(x.shape)} {x.stride()} {kind}"
                yield name, lambda x=x, m=more: F.max_pool2d(x, 3, 2, 1, **m)
                yield f"{name} 2x2", lambda x=x, m=more: F.max_pool2d(x, 2, 2, **m)
            yield f"max_pool3d {kind}", lambda x=three, m=more: F.max_pool3d(x, 3, 2, 1, **m)
            yield (
                f"adaptive_max_pool2d whole {kind}",
                lambda x=small, m=more: F.adaptive_max_pool2d(x, 1, **m),
            )
            for size in (1, 6, 7):
                yield (
                    f"adaptive_max_pool2d {size} {kind}",
                    lambda x=two, s=size, m=more: F.adaptive_max_pool2d(x, s, **m),
                )
        yield f"avg_pool1d {dtype}", lambda x=one: F.avg_pool1d(x, 4, 2, 1, True, **given)
        yield f"avg_pool2d {dtype}", lambda x=two: F.avg_pool2d(x, 3, 2, 1, True, **given)
        yield f"avg_pool3d {dtype}", lambda x=three: F.avg_pool3d(x, 3, 2, 1, **given)
        yield (
            f"adaptive_avg_pool2d whole {dtype}",
            lambda x=small: F.adaptive_avg_pool2d(x, 1, **given),
        )
        for size in (1, 6, 7):
            yield (
                f"adaptive_avg_pool2d {size} {dtype}",
                lambda x=two, s=size: F.adaptive_avg_pool2d(x, s, **given),
            )
        tokens = on_gpu(1, 100, 3, 40, dtype=dtype)
        ends = torch.tensor([0, 7, 64, 100], dtype=torch.int32).cuda()
        yield f"mean_pooling {dtype}", lambda x=tokens: F.mean_pooling(x, 16, **given)
        yield (
            f"mean_pooling varlen {dtype}",
            lambda x=tokens, e=ends: F.mean_pooling(x, 16, e, num_chunks=8, **given),
        )
    yield from tabled_maxima()
    yield from pool_backwards()


def tabled_maxima() -> Iterator[Case]:
    """Few planes of what the CUDA kernels serve; an odd number of rows of outputs."""
    import torch
    from opkiln import functional as F

    half, brain, whole = torch.float16, torch.bfloat16, torch.float32
    given = {"backend": "opkiln", "return_indices": True}
    line, stem = on_gpu(3, 2, 4096, dtype=half), on_gpu(3, 1, 112, 112, dtype=half)
    flat, video = on_gpu(3, 1, 56, 56, dtype=whole), on_gpu(1, 3, 16, 56, 56, dtype=half)
    volume = on_gpu(1, 1, 32, 112, 112, dtype=brain)
    yield "max_pool1d tabled", lambda: F.max_pool1d(line, 3, **given)
    yield "max_pool2d tabled stem", lambda: F.max_pool2d(stem, 3, 2, 1, **given)
    yield "max_pool2d tabled", lambda: F.max_pool2d(flat, 2, **given)
    yield "max_pool3d tabled", lambda: F.max_pool3d(video, 2, **given)
    for indexed in (False, True):
        more = given | {"return_indices": indexed}
        yield (
            f"max_pool3d tabled {indexed}",
            lambda m=more: F.max_pool3d(volume, 3, 2, 1, ceil_mode=True, **m),
        )


def ropes() -> Iterator[Case]:
    import torch
    from opkiln import functional as F

    given = {"backend": "opkiln"}
    ids = torch.randint(0, 50, (37,), dtype=torch.int32).cuda()
    for dtype in (torch.bfloat16, torch.float32):
        flat, heads = on_gpu(37, 64, dtype=dtype), on_gpu(2, 37, 5, 96, dtype=dtype)
        for op in (F.rope_neox, F.rope_non_neox, F.rope_llama31, F.rope_yarn):
            name = f"{op.__name__} {dtype}"
            yield f"{name} flat", lambda op=op, x=flat: op(x, **given)
            yield f"{name} heads", lambda op=op, x=heads: op(x, offset=3, **given)
            yield f"{name} partial", lambda op=op, x=heads: op(x, rotary_dim=64, **given)
            yield f"{name} inplace", lambda op=op, x=heads: op(x.clone(), inplace=True, **given)
        yield f"backward {dtype}", lambda d=dtype: rope_backward(F, d)
        x = on_gpu(37, 5, 64, dtype=dtype)
        yield (
            f"rope_neox_position_ids {dtype}",
            lambda x=x: F.rope_neox_position_ids(x, ids, max_position=50, **given),
        )


def rope_backward(functional: Any, dtype: Any) -> None:
    x = on_gpu(2, 37, 5, 64, dtype=dtype, grad=True)
    out = functional.rope_neox(x, backend="opkiln")
    out.backward(on_gpu(*out.shape, dtype=dtype))


def misc() -> Iterator[Case]:
    import torch
    from opkiln import functional as F
    from opkiln import use

    given = {"backend": "opkiln"}
    for dtype in (torch.complex64, torch.complex128):
        for shape in ((3, 8), (5, 256), (3, 4096), (4096,), (2, 65536)):
            x = torch.randn(shape, dtype=dtype).cuda()
            yield f"fft {shape} {dtype}", lambda x=x: F.fft(x, **given)
            params = {"n": shape[-1], "dim": len(shape) - 1, "norm": "backward"}
            clusters = [(p, 128, 2, c, a) for p, c in ((16, 2), (8, 8)) for a in (False, True)]
            for tiling in clusters if shape[-1] == 4096 else ():
                yield (
                    f"fft {shape} {dtype} {tiling}",
                    lambda x=x, p=params, t=tiling: direct("fft", "fft", [x], p, t),
                )
        x = torch.randn(300, 5, dtype=dtype).cuda()
        yield f"fft padded columns {dtype}", lambda x=x: F.fft(x, 512, 0, **given)
    for batch, n, c in ((1, 4, 40), (4, 4, 2560), (3, 8, 33)):
        m = n * n + 2 * n
        phi, b = on_gpu(n * c, m, dtype=torch.float32), on_gpu(m, dtype=torch.float32)
        x, layer = on_gpu(batch, n * c), on_gpu(batch, c)
        post = on_gpu(batch, n, dtype=torch.float32)
        name = f"{batch} x {n} x {c}"
        yield (
            f"mhc_pre {name}",
            lambda p=phi, x=x, b=b: F.mhc_pre(
                p, x, b, 1.0, 1.0, 1.0, 2, return_h_post=True, **given
            ),
        )
        yield f"mhc_post {name}", lambda x=x, y=layer, h=post: F.mhc_post(y, h, x, **given)
        params = {
            "alpha_pre": 1.0, "alpha_post": 1.0, "alpha_res": 1.0, "sinkhorn_repeat": 2,
            "sinkhorn_eps": 0.02, "return_h_post": True,
        }  # fmt: skip
        for tiling in ((1, 512, 10), (1, 256, 10), (4, 512, 8), (4, 256, 8, 8)):
            yield (
                f"mhc_pre {tiling} {name}",
                lambda t=[phi, x, b], p=params, g=tiling: direct("mhc_pre", "mhc_pre", t, p, g),
            )
    for kv, k in ((20000, 1024), (20001, 100), (900, 1024)):
        scores = {
            "normal": torch.randn(1, 2, kv, 1),
            "ties": torch.randint(0, 3, (1, 2, kv, 1)).float(),
        }
        starts = torch.tensor([[0, 7]], dtype=torch.int32).cuda()
        for name, s in scores.items():
            args = (s.cuda(), starts, torch.full_like(starts, kv - 1), k)
            yield f"topk {kv} {k} {name}", lambda a=args: F.topk_selector(*a, **given)
        with_order = lambda a=args: in_order(use, F.topk_selector, a)  # noqa: E731
        yield f"topk {kv} {k} in order", with_order
    yield from misc_backwards()


def direct(op: str, module: str, tensors: list[Any], params: Any, tiling: tuple[Any, ...]) -> Any:
    """By one of the family's modules, with a tiling that its rule need not name."""
    from opkiln.ops import CATALOGUE
    from opkiln.spec import Call

    found = importlib.import_module(f"opkiln_misc.{module}")
    call = Call.of(CATALOGUE[op], tensors, params)
    return found.prepare(call, found.Tiling(*tiling))(*tensors)


def in_order(use: Any, function: Any, args: tuple[Any, ...]) -> None:
    with use(deterministic=True):
        function(*args, backend="opkiln")


def convs() -> Iterator[Case]:
    """Nothing as long as the family registers nothing."""
    from opkiln_conv.plugin import opkiln_implementations

    if not opkiln_implementations():
        return
    import torch
    from opkiln import functional as F

    given = {"backend": "opkiln"}
    for c_in, c_out, k, s, p in (
        (64, 64, 3, 1, 1),
        (64, 96, 1, 1, 0),
        (3, 64, 3, 2, 1),
        (64, 64, 3, 2, 1),
        (128, 128, 3, 2, 1),  # of the table: patch, in clusters of 8
    ):
        x, w, b = on_gpu(2, c_in, 28, 28), on_gpu(c_out, c_in, k, k), on_gpu(c_out)
        yield (
            f"conv2d {c_in} {c_out} {k} {s}",
            lambda x=x, w=w, b=b, s=s, p=p: F.conv2d(x, w, b, s, p, **given),
        )
    for last in (False, True):
        x, w = on_gpu(2, 32, 14, 14, dtype=torch.float32), on_gpu(32, 1, 3, 3, dtype=torch.float32)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        yield (
            f"conv2d depthwise {last}",
            lambda x=x, w=w: F.conv2d(x, w, None, 1, 1, 1, 32, **given),
        )
    x, w = on_gpu(1, 80, 300), on_gpu(128, 80, 3)
    yield "conv1d", lambda: F.conv1d(x, w, None, 1, 1, **given)
    y, v = on_gpu(1, 32, 4, 16, 16), on_gpu(64, 32, 3, 3, 3)
    yield "conv3d", lambda: F.conv3d(y, v, None, 1, 1, **given)


# A family's cases, its package, and which of the package's files hold its kernels.
FAMILIES: dict[str, tuple[Callable[[], Iterator[Case]], str, str]] = {
    "row_norm": (row_norms, "norm", "row_[!b]*"),
    "row_backward": (row_backwards, "norm", "row_backward*"),
    "channel_norm": (channel_norms, "norm", "channel*"),
    "pool": (pools, "pool", "*"),
    "rope": (ropes, "rope", "*"),
    "misc": (misc, "misc", "*"),
    "conv": (convs, "conv", "*"),
}


CUDA_KERNEL = r'extern "C" __global__ void(?:\s*__launch_bounds__\([^\n]*?\))?\s+(\w+)\('
TRITON_KERNEL = r"@triton\.jit[^\n]*\ndef (\w+_kernel)\("


def kernels_of(family: str) -> set[str]:
    """Names of the family's kernels, from its sources: CUDA C++ ones, and Triton ones *_kernel."""
    _, package, files = FAMILIES[family]
    folder = next((ROOT / "packages" / package / "src").iterdir())
    found: set[str] = set()
    for path in sorted(folder.rglob(files)):
        if path.suffix == ".cu":
            text = path.read_text("utf-8")
            found |= set(re.findall(CUDA_KERNEL, text))
        elif path.suffix == ".py":
            text = path.read_text("utf-8")
            found |= set(re.findall(TRITON_KERNEL, text))
    return found


def planted(name: str) -> None:
    """Launch the kernel with the error of this name."""
    import torch
    from opkiln.device import cuda

    x = torch.zeros(1000, dtype=torch.int32).cuda()
    if name.endswith("_triton"):
        planted_memory_triton[(1,)](x, 1000, num_warps=1)
    else:
        run = cuda.load(PLANTED_SOURCE, name, x.device).configure((1, 1, 1), (64, 1, 1))
        run(x, 1000)
    torch.cuda.synchronize()


def main() -> None:
    family, status, *errors = sys.argv[1:]
    import torch
    from opkiln.device import cuda
    from triton import knobs

    told: dict[str, Any] = {"cases": {}, "kernels": []}
    names: set[str] = set()
    knobs.runtime.kernel_load_end_hook.add(lambda module, function, name, *rest: names.add(name))
    load = cuda.load

    def recorded(source: str, name: str, *rest: Any) -> Any:
        names.add(name)
        return load(source, name, *rest)

    cuda.load = recorded
    cases, _, _ = FAMILIES[family]
    for name, run in cases():
        try:
            run()
            torch.cuda.synchronize()
            told["cases"][name] = "ok"
        except Exception as error:  # told to the parent; the other cases still run
            told["cases"][name] = f"{type(error).__name__}: {error}"[:300]
        told["kernels"] = sorted(names)
        pathlib.Path(status).write_text(json.dumps(told), "utf-8")
    for name in errors:
        try:
            planted(name)
        except Exception as error:  # that it was found is what the log tells
            print(f"{name}: {type(error).__name__}", flush=True)
    told["finished"] = True
    pathlib.Path(status).write_text(json.dumps(told), "utf-8")


if __name__ == "__main__":
    import triton
    import triton.language as tl

    @triton.jit
    def planted_memory_triton(x_ptr, n):
        tl.store(x_ptr + n + tl.arange(0, 32), 1)

    main()
