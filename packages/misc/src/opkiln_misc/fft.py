"""How fft and fft_backward are launched: csrc/fft.cu, in one step, or in two for more points than a
CTA holds. The backward is the inverse transform with the forward's scale, cropped or followed by
zeros where the forward's input was padded or cropped.

The two steps of n = n1 * n2 points: n2 transforms of every n2-th point, turned; then n1 transforms
of n2 neighbours. Between them lies a workspace of the output's size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opkiln.device import cuda

from opkiln_misc.sources import source

REALS = {torch.complex64: "float", torch.complex128: "double"}
MAX_POINTS = 2**24  # the angle k / n is exact in float32
ONE_STEP = {torch.complex64: 8192, torch.complex128: 4096}  # more would spill
CLUSTERED_POINTS = 4096
MOST_CLUSTERED = 66  # two CTAs each fill 132 multiprocessors
FEW = 16  # eight CTAs each
MAX_DIMS = 4
MAX_SHARED_BYTES = 227 << 10

Dims = list[tuple[int, int, int]]  # size, stride of the input, stride of the output


@dataclass(frozen=True, slots=True)
class Tiling:
    """See csrc/fft.cu."""

    points: int
    threads: int = 128  # at least so many, where a transform has fewer
    buffers: int = 2
    cluster: int = 1  # CTAs a transform; more than one: at most `points`, and a CTA takes no other
    asynchronous: bool = False  # of a cluster: ASYNC


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. sizes: the kernel's arguments after its tensors, but for the scale."""

    macros: dict[str, Any]
    transforms: int
    per_cta: int
    threads: int
    shared_bytes: int
    cluster: int
    sizes: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, int, int]:
        return (
            -(-self.transforms // self.per_cta)
            if self.cluster == 1
            else self.transforms * self.cluster,
            1,
            1,
        )


def rule(n: int, dtype: torch.dtype, transforms: int, invariant: bool) -> Tiling:
    """Measured on an H200 at 4,096 points, 64 transforms and (complex64) one: a cluster where there
    are fewer transforms than multiprocessors; ASYNC wins for one (2.40 us against 2.62), loses for
    64 (4.00 against 3.81). invariant: the same for any number of transforms.
    """
    if n != CLUSTERED_POINTS or transforms > MOST_CLUSTERED or invariant:
        return Tiling(points=min(n, 16))
    points, few = 8 if dtype == torch.complex64 else 16, transforms <= FEW
    return Tiling(points, cluster=8 if few else 2, asynchronous=few)


def collapse(dims: Sequence[tuple[int, int, int]]) -> Dims:
    """Neighbouring dims that both tensors step through as one, merged; size-1 dims vanish."""
    found: Dims = []
    for size, into, out in dims:
        if size == 1:
            continue
        if found and found[-1][1:] == (size * into, size * out):
            found[-1] = (found[-1][0] * size, into, out)
        else:
            found.append((size, into, out))
    return found


def step(
    dtype: torch.dtype, n: int, dims: Dims, strides: tuple[int, int], ends: tuple[int, int],
    total: int, tiling: Tiling, more: Mapping[str, int],
) -> Step:  # fmt: skip
    """strides: of the points, in and out. ends: how many there are, in and out, the latter of all
    transforms that are APART from each other. more: INVERSE and APART.
    """
    if len(dims) > MAX_DIMS:
        raise ValueError(f"the other dims collapse to {len(dims)} strides, at most {MAX_DIMS} fit")
    spread, points = tiling.cluster > 1, n
    apart = more.get("APART", 1)
    n = n // tiling.points if spread else n
    lanes = n // tiling.points
    inner = dims[-1] if dims else (1, 0, 0)
    per_cta = tiling.points // tiling.cluster if spread else max(tiling.threads // lanes, 1)
    # Without bank conflicts for the lanes of one access, that are neighbours of per_cta transforms.
    pitch = n + n // 16 + (max(128 // dtype.itemsize // per_cta, 1) if spread else 1)
    buffers = 2 if spread else tiling.buffers
    arrivals = 16 if spread else 0
    if buffers * per_cta * pitch * dtype.itemsize + arrivals > MAX_SHARED_BYTES:
        if spread:  # the cluster writes to the second buffer
            raise ValueError(f"{points} points do not fit {tiling}")
        buffers = 1
    macros = {
        "REAL": REALS[dtype],
        "N": n,
        "POINTS": tiling.points,
        "PER_CTA": per_cta,
        "PITCH": pitch,
        "CLUSTER": tiling.cluster,
        "COLUMNS": int(spread or inner[1] < strides[0] or inner[2] < strides[1]),
        "DIMS": len(dims),
        "DENSE": int(strides == (1, 1) and ends == (points, points)),
        "BUFFERS": buffers,
        "ASYNC": int(tiling.asynchronous),
        "TOTAL": total,
        "EDGE": int(ends[1] != points * apart),
        "APART": apart,
        "INVERSE": more.get("INVERSE", 0),
    }
    transforms = math.prod(size for size, _, _ in dims)
    full = [(1, 0, 0)] * (MAX_DIMS - len(dims)) + dims
    sizes = (
        transforms, *[d[0] for d in full[1:]], *[d[1] for d in full], *[d[2] for d in full],
        *strides, *ends,
    )  # fmt: skip
    shared = buffers * per_cta * pitch * dtype.itemsize + arrivals
    return Step(macros, transforms, per_cta, lanes * per_cta, shared, tiling.cluster, sizes)


def plan_for(call: Any, tiling: Tiling | None = None) -> list[Step]:
    """ValueError says what the kernel cannot serve."""
    (x,), (out,), p = vars(call.tensors).values(), call.outputs, call.params
    n, dim = p.n, p.dim
    inverse = {"INVERSE": int(call.spec.name == "fft_backward")}
    if n < 2 or n & (n - 1) or n > MAX_POINTS:
        raise ValueError(f"serves powers of two from 2 to {MAX_POINTS} points, got {n}")
    others = [(size, x.stride[i], out.stride[i]) for i, size in enumerate(out.shape) if i != dim]
    strides = (x.stride[dim], out.stride[dim])
    present, kept = min(x.shape[dim], n), out.shape[dim]
    if n <= ONE_STEP[x.dtype]:
        transforms = math.prod(d[0] for d in others)
        chosen = tiling or rule(n, x.dtype, transforms, call.policy.batch_invariant)
        return [step(x.dtype, n, collapse(others), strides, (present, kept), 0, chosen, inverse)]
    n1 = 1 << (n.bit_length() - 1) // 2
    n2 = n // n1
    batch = [d[0] for d in others]
    between = [n * math.prod(batch[i + 1 :]) for i in range(len(batch))]
    first = [(d[0], d[1], w) for d, w in zip(others, between, strict=True)]
    second = [(d[0], w, d[2]) for d, w in zip(others, between, strict=True)]
    tilings = [Tiling(points=min(size, 16)) for size in (n1, n2)]
    columns = (n2, strides[0], 1)
    rows = (n1, n2, strides[1])
    return [
        step(
            x.dtype, n1, [*collapse(first), columns], (n2 * strides[0], n2), (present, n1), n,
            tilings[0], inverse,
        ),
        step(
            x.dtype, n2, [*collapse(second), rows], (1, n1 * strides[1]), (n2, kept), 0,
            tilings[1], inverse | {"APART": n1},
        ),
    ]  # fmt: skip


SCALES = {"backward": lambda n: 1.0, "ortho": lambda n: n**-0.5, "forward": lambda n: 1.0 / n}


def prepare(call: Any, tiling: Tiling | None = None) -> Callable[..., torch.Tensor]:
    """Compile and plan once; the result allocates and launches."""
    steps = plan_for(call, tiling)
    scale = SCALES[call.params.norm](call.params.n)
    runs = []
    for s in steps:
        kernel = cuda.load(source("fft"), "fft", call.device, s.macros)
        runs.append(kernel.configure(s.grid, (s.threads, 1, 1), s.shared_bytes, s.cluster))
    (meta,) = call.outputs
    points = call.params.n * math.prod(d for i, d in enumerate(meta.shape) if i != call.params.dim)

    def launch(x: torch.Tensor) -> torch.Tensor:
        out = meta.empty()
        if len(steps) == 1:
            runs[0](x, out, *steps[0].sizes, scale)
            return out
        between = out.new_empty(points)
        runs[0](x, between, *steps[0].sizes, 1.0)
        runs[1](between, out, *steps[1].sizes, scale)
        return out

    return launch
