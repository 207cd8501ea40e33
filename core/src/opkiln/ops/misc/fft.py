"""Discrete Fourier transform of complex numbers along one dim.

out[k] = scale * sum_j input[j] exp(-2 pi i j k / n). The dim is cropped or zero-padded to n; scale
is 1 ("backward"), 1 / sqrt(n) ("ortho") or 1 / n ("forward"). The gradient is
the conjugate transform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from opkiln.errors import ArgumentError, DimError
from opkiln.ops.derive import with_backward
from opkiln.spec import COMPLEX, Call, OpSpec, OutputSpec, ParamSpec, TensorMeta, TensorSpec

# The norm under which torch's inverse transform has the scale of the forward one.
SAME_SCALE = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


def reference(input: torch.Tensor, n: int, dim: int, norm: str) -> torch.Tensor:
    return native(input.to(torch.complex128), n, dim, norm).to(input.dtype)


def native(input: torch.Tensor, n: int, dim: int, norm: str) -> torch.Tensor:
    shape = list(input.shape)
    shape[dim] = n
    if 0 in shape:  # MKL refuses an empty batch
        return input.sum() * input.new_zeros(shape)
    return torch.fft.fft(input, n, dim, norm)


def transform_back(
    grad_out: torch.Tensor, input_shape: Sequence[int], dim: int, norm: str
) -> torch.Tensor:
    """Inverse transform with the forward's scale, then zeros where the input was cropped away."""
    if grad_out.numel() == 0:
        return grad_out.sum() * grad_out.new_zeros(input_shape)
    grad = torch.fft.ifft(grad_out, dim=dim, norm=SAME_SCALE[norm])
    missing = input_shape[dim] - grad.shape[dim]
    if missing <= 0:
        return grad.narrow(dim, 0, input_shape[dim])
    zeros = grad.new_zeros((*grad.shape[:dim], missing, *grad.shape[dim + 1 :]))
    return torch.cat((grad, zeros), dim)


def backward_reference(
    grad_out: torch.Tensor,
    n: int,
    dim: int,
    norm: str,
    input_shape: Sequence[int],
    output_mask: list[bool],
) -> tuple[torch.Tensor]:
    grad = transform_back(grad_out.to(torch.complex128), input_shape, dim, norm)
    return (grad.to(grad_out.dtype),)


def backward_native(
    grad_out: torch.Tensor,
    n: int,
    dim: int,
    norm: str,
    input_shape: Sequence[int],
    output_mask: list[bool],
) -> tuple[torch.Tensor]:
    return (transform_back(grad_out, input_shape, dim, norm),)


def transformed(call: Call) -> TensorMeta:
    shape = list(call.tensors.input.shape)
    shape[call.params.dim] = call.params.n
    return call.new(shape, call.tensors.input.dtype)


def check(call: Call) -> None:
    shape, p = call.tensors.input.shape, call.params
    if not 0 <= p.dim < len(shape):
        raise DimError(f"fft: dim is {p.dim}, input has {len(shape)} dims")
    if p.n < 1:
        raise ArgumentError(f"fft: n, the number of points, must be at least 1, got {p.n}")
    if p.norm not in SAME_SCALE:
        raise ArgumentError(f"fft: norm must be one of {', '.join(SAME_SCALE)}, got {p.norm!r}")


def flops(call: Call) -> int:
    """5 n log2 n for each transform."""
    shape = next(iter(vars(call.tensors).values())).shape
    n, dim = call.params.n, call.params.dim
    rows = math.prod((*shape[:dim], *shape[dim + 1 :]))
    return round(5 * n * math.log2(n)) * rows


def terms(call: Call) -> int:
    """An output sums n products, in log2(n) rounds of additions."""
    return max(call.params.n.bit_length(), 1)


SPEC, BACKWARD = with_backward(
    OpSpec(
        op="FFTC2CFwd",
        name="fft",
        family="misc",
        tensors=(TensorSpec("input", "*shape", COMPLEX),),
        params=(ParamSpec("n", "int"), ParamSpec("dim", "int"), ParamSpec("norm", "str")),
        outputs=(OutputSpec("out", transformed),),
        reference=reference,
        native=native,
        flops=flops,
        check=check,
        reduction=terms,
        doc="Complex discrete Fourier transform along one dim.",
    ),
    wrt=("input",),
    needs=(),
    reference=backward_reference,
    native=backward_native,
    flops=flops,
    double="backward",
)
SPECS = (SPEC, BACKWARD)
