"""Pools seen alike: planes of three spatial dims, and a window or an adaptive output over them."""

import math
from dataclasses import dataclass
from typing import Any

import torch

Dims = tuple[int, int, int]
ONES: Dims = (1, 1, 1)


@dataclass(frozen=True, slots=True)
class Geometry:
    """One pool. Dims are (d, h, w); missing leading ones have size 1.

    kernel: of an adaptive pool, the widest window. strides: of the input over (n, c, d, h, w), in
    elements. channels: None where all planes are evenly spaced, n apart. scale: 1 / divisor, where
    `divisor` is "scale"; else it says what a window counts (see `window_taps.divide`).
    """

    reduce: str
    adaptive: bool
    itemsize: int
    planes: int
    channels: int | None
    sizes: Dims
    outs: Dims
    kernel: Dims
    stride: Dims
    padding: Dims
    dilation: Dims
    strides: tuple[int, int, int, int, int]
    channels_last: bool
    aligned: bool
    divisor: str = "scale"
    scale: float = 1.0

    @property
    def outputs(self) -> int:
        return self.planes * math.prod(self.outs)

    @property
    def plane_count(self) -> tuple[int, ...]:
        """Sizes of the dims that count planes, as `strides` steps over them."""
        return (self.planes, 1) if self.channels is None else (self.planes // self.channels,
                                                               self.channels)  # fmt: skip

    def last_tap(self, dim: int) -> int:
        """Coordinate of the last tap of the last window."""
        reach = (self.kernel[dim] - 1) * self.dilation[dim]
        return (self.outs[dim] - 1) * self.stride[dim] - self.padding[dim] + reach

    @property
    def check(self) -> tuple[bool, bool, bool]:
        """For each dim, whether a tap may lie outside the input (adaptive: past its window)."""
        if self.adaptive:
            d, h, w = (s % o != 0 for s, o in zip(self.sizes, self.outs, strict=True))
        else:
            d, h, w = (self.padding[i] > 0 or self.last_tap(i) >= self.sizes[i] for i in range(3))
        return d, h, w

    @property
    def can_miss(self) -> bool:
        """Whether the taps of a window may all lie outside the input."""
        return any(d > s for d, s in zip(self.dilation, self.sizes, strict=True))

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits; blocks reach a little past the end."""
        counts = (*self.plane_count, *self.sizes)
        span = sum((n - 1) * abs(s) for n, s in zip(counts, self.strides, strict=True))
        return max(span, self.outputs) >= 2**31 - 2**24

    def dense_plane(self) -> bool:
        """Whether a plane is one stretch of memory."""
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=False):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def is_whole(self) -> bool:
        """Whether every plane is one window."""
        if self.outs != ONES:
            return False
        fixed = self.kernel == self.sizes and self.padding == (0, 0, 0)
        steps = zip(self.kernel, self.dilation, strict=True)
        return self.adaptive or (fixed and all(k == 1 or d == 1 for k, d in steps))

    def unit(self, limit: int, unit_dim: int = 4) -> int:
        """The largest power of two up to `limit` that divides every stride but `unit_dim`'s, 1."""
        counts = (*self.plane_count, *self.sizes)
        return common_unit(limit, counts, self.strides, unit_dim) if self.aligned else 1


def common_unit(
    limit: int, counts: tuple[int, ...], strides: tuple[int, ...], unit_dim: int
) -> int:
    """What divides `limit` and all strides of dims with several elements but `unit_dim`'s, which is
    1; else 1.
    """
    if strides[unit_dim] != 1:
        return 1
    dims = enumerate(zip(counts, strides, strict=True))
    return math.gcd(limit, *[s for i, (n, s) in dims if n > 1 and i != unit_dim])


def three(values: Any, fill: int) -> Dims:
    """A value a dim, with `fill` for the dims that the pool does not have."""
    values = tuple(values)
    d, h, w = (fill,) * (3 - len(values)) + values
    return d, h, w


def divisor_of(p: Any, sizes: Dims, outs: Dims, kernel: Dims, stride: Dims, padding: Dims) -> Any:
    """What an average with fixed windows divides by: (divisor, scale)."""
    override = getattr(p, "divisor_override", None)
    if override is not None:
        return "scale", 1.0 / override
    over = [
        padding[i] if p.count_include_pad else 0 for i in range(3)
    ]  # how far a window may reach past the input and still be whole
    whole = all(
        padding[i] == over[i]
        and (outs[i] - 1) * stride[i] - padding[i] + kernel[i] <= sizes[i] + over[i]
        for i in range(3)
    )
    if whole:
        return "scale", 1.0 / math.prod(kernel)
    return ("padded" if p.count_include_pad else "inside"), 1.0


def geometry_of(call: Any) -> Geometry:
    """The geometry of a call of any pool but mean_pooling."""
    x, out, p = call.tensors.input, call.outputs[0], call.params
    adaptive = hasattr(p, "output_size")
    ndim = 2 if adaptive else len(p.kernel_size)
    sizes, outs = three(x.shape[-ndim:], 1), three(out.shape[-ndim:], 1)
    if call.spec.name.startswith(("avg", "adaptive_avg")):
        reduce = "avg"
    else:
        reduce = "max" if len(call.outputs) == 1 else "argmax"
    divisor: tuple[str, float] = ("scale", 1.0)
    if adaptive:
        widest = [-(-(q - 1 + s) // q) for s, q in lowest_terms(sizes, outs)]
        kernel, stride, padding, dilation = three(widest, 1), ONES, three((), 0), ONES
        divisor = ("all", 1.0)
    else:
        kernel, stride = three(p.kernel_size, 1), three(p.stride, 1)
        padding, dilation = three(p.padding, 0), three(getattr(p, "dilation", ONES[:ndim]), 1)
        if reduce == "avg":
            divisor = divisor_of(p, sizes, outs, kernel, stride, padding)
    lead, steps = x.shape[:-ndim], x.stride[:-ndim]
    planes, channels = math.prod(lead), None
    stride_n, stride_c = steps[-1], 0
    if len(lead) == 2:
        even = lead[0] == 1 or steps[0] == lead[1] * steps[1]
        if lead[1] == 1:
            stride_n = steps[0]
        elif out.channels_last or not even:
            channels, stride_n, stride_c = lead[1], steps[0], steps[1]
    spatial = three(x.stride[-ndim:], 0)
    return Geometry(
        reduce=reduce, adaptive=adaptive, itemsize=x.dtype.itemsize, planes=planes,
        channels=channels, sizes=sizes, outs=outs, kernel=kernel, stride=stride, padding=padding,
        dilation=dilation, strides=(stride_n, stride_c, *spatial), aligned=x.aligned,
        channels_last=out.channels_last and channels is not None,
        divisor=divisor[0], scale=divisor[1],
    )  # fmt: skip


def lowest_terms(sizes: Dims, outs: Dims) -> list[tuple[int, int]]:
    """Each size / out as p / q in lowest terms."""
    pairs = [(s, o, math.gcd(s, o)) for s, o in zip(sizes, outs, strict=True)]
    return [(s // g, o // g) for s, o, g in pairs]


def compute_in_f32(reduce: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Averages are summed in f32; maxima stay in their dtype, but Triton's interpreter computes
    wrongly in bfloat16.
    """
    return reduce == "avg" or (dtype == torch.bfloat16 and device.type == "cpu")


def pairs_in_asm(device: torch.device) -> bool:
    """Whether `reducers.follow_pairs` may use its assembly, which needs compute capability 9.0."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return device.type != "cpu"
