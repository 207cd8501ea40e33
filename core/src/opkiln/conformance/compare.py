"""The one comparison: an output against the reference in double precision.

    |error| <= (output + work) * |expected| + work * sqrt(terms) * condition * rms(expected)

`output` is the rounding of the result to its dtype (half a unit in the last place), `work` that of
float32 arithmetic (float64 for float64), `terms` how many terms an element sums; where these
cancel, `least_scale` stands for the RMS. With `rounds_at_scale` (a spec says so) rounding is
relative to at least rms(expected). The RMS of all errors has to be smaller still. NaN and
infinities must stand in the same places; integers and the values of max pools must be equal.

Beside the verdict an error is told in units in the last place of the output's dtype, at the size of
the expected element or at rms(expected) where that is larger: where terms cancel, the unit of the
element itself says nothing.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

MANY = 64  # elements from which the RMS error says more than the largest one


@dataclass(frozen=True)
class Tolerance:
    """Relative errors: `output` of rounding the result, `work` of the arithmetic before it."""

    output: float
    work: float


# `work`: 4 units of float32, for rsqrt.approx, exp2.approx and sincos on a GPU (1 to 2 units each).
TOLERANCES = {
    torch.float16: Tolerance(2**-11, 2**-21),
    torch.bfloat16: Tolerance(2**-8, 2**-21),
    torch.float32: Tolerance(2**-24, 2**-21),
    torch.float64: Tolerance(2**-53, 2**-50),
    torch.complex64: Tolerance(2**-24, 2**-21),
    torch.complex128: Tolerance(2**-53, 2**-50),
}
# Triton's interpreter truncates float32 to bfloat16 (one unit) where a GPU rounds (half a unit).
INTERPRETED_BF16 = Tolerance(2**-7, 2**-21)


@dataclass(frozen=True)
class Comparison:
    """ratio: the largest error over its tolerance, at most 1 where ok; message: one line if not;
    ulp: the largest error in units in the last place.
    """

    ok: bool
    ratio: float
    message: str = ""
    ulp: float = 0.0


def tolerance_of(dtype: torch.dtype, backend: str = "", device: str = "cuda") -> Tolerance:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and device == "cpu"
    if dtype is torch.bfloat16 and interpreted and backend not in ("torch", "torch-ref"):
        return INTERPRETED_BF16
    return TOLERANCES[dtype]


def compare(
    name: str,
    out: torch.Tensor,
    expected: torch.Tensor,
    terms: int = 1,
    condition: float = 1.0,
    least_scale: float = 0.0,
    exact: bool = False,
    backend: str = "",
    rounds_at_scale: bool = False,
) -> Comparison:
    """Compare an output with its expected values in double precision (integers as they are)."""
    if not (out.is_floating_point() or out.is_complex()) or exact:
        return equal(name, out, expected.to(out.dtype))
    if out.numel() == 0:
        return Comparison(True, 0.0)
    rounded = expected.to(out.dtype)
    out_wide, special = out.to(expected.dtype), ~rounded.isfinite()
    misplaced = (out.isfinite() == special) | (special & ~same(out, rounded))
    if misplaced.any():
        return describe(name, out, expected, misplaced, misplaced.double(), math.inf)
    tolerance = tolerance_of(out.dtype, backend, out.device.type)
    finite = expected.masked_fill(special, 0)
    error = (out_wide.masked_fill(special, 0) - finite).abs()
    count = max(int((~special).sum()), 1)
    scale = max(math.sqrt(float(finite.abs().square().sum()) / count), least_scale)
    work = tolerance.work * math.sqrt(max(terms, 1)) * condition * scale
    least = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    size = finite.abs().clamp(min=scale) if rounds_at_scale else finite.abs()
    limit = (tolerance.output + tolerance.work) * size + work + least
    over = error / limit
    ratio = float(over.max())
    if ratio > 1:
        return describe(name, out, expected, over > 1, over, ratio)
    if count >= MANY:
        rms = math.sqrt(float(error.square().sum()) / count)
        # Rounding errors are uniform: their RMS is 0.58 of the largest.
        rms_limit = 0.8 * (tolerance.output + tolerance.work) * scale + 0.5 * work + least
        if rms > rms_limit:
            message = f"{name}: RMS error {rms:.3g} is above {rms_limit:.3g} over {count} elements"
            return Comparison(False, rms / rms_limit, message)
    ulp = float((error / last_place(finite.abs().clamp(min=scale), out.dtype)).max())
    return Comparison(True, ratio, ulp=ulp)


def last_place(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place of `dtype` at positive values in double precision."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(size.clamp(min=info.smallest_normal)).exponent
    return torch.ldexp(torch.full_like(size, info.eps), exponent - 1)


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def equal(name: str, out: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Every element the same; NaN equals NaN."""
    wrong = ~same(out, expected)
    if not wrong.any():
        return Comparison(True, 0.0)
    return describe(name, out, expected, wrong, wrong.double(), math.inf)


def describe(
    name: str,
    out: torch.Tensor,
    expected: torch.Tensor,
    wrong: torch.Tensor,
    badness: torch.Tensor,
    ratio: float,
) -> Comparison:
    """One line with the worst element."""
    flat = int(badness.nan_to_num(nan=math.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), out.shape)]
    got, want = (repr_of(x[tuple(index)].item()) for x in (out, expected))
    times = f", {ratio:.3g} times the tolerance" if math.isfinite(ratio) else ""
    return Comparison(
        False,
        ratio,
        f"{name}{index} is {got}, expected {want}{times}; "
        f"{int(wrong.sum())} of {out.numel()} elements wrong",
    )


def repr_of(value: complex) -> str:
    return str(value) if isinstance(value, int) else f"{value:.8g}"
