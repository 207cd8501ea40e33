"""A tensor without its data, and the dtypes that specs speak of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDE = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INDEX = (torch.int32, torch.int64)
SAME = ()  # a tensor with no list of its own has the first tensor's dtype

Shape = tuple[int, ...]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that statistics and sums of `dtype` values are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor without its data. `aligned`: the first element lies on a 16-byte boundary."""

    shape: Shape
    dtype: torch.dtype
    stride: Shape
    device: torch.device
    aligned: bool = True
    channels_last: bool = False

    @staticmethod
    def of(t: torch.Tensor, real: bool = True) -> TensorMeta:
        """`real=False` for tensors without an address: fake, or inside a function transform."""
        aligned = not real or t.data_ptr() % 16 == 0
        return TensorMeta(
            tuple(t.shape), t.dtype, t.stride(), t.device, aligned, is_channels_last(t)
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1:
                if stride != expected:
                    return self.numel == 0
                expected *= size
        return True

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def is_channels_last(t: torch.Tensor) -> bool:
    """True for a 4-D or 5-D tensor that is channels_last and not also contiguous."""
    if is_wrapped(t):  # vmap cannot be asked for a memory format
        return False
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return (
        t.ndim in formats
        and not t.is_contiguous()
        and t.is_contiguous(memory_format=formats[t.ndim])
    )


def is_wrapped(t: torch.Tensor) -> bool:
    """Whether `t` stands for another tensor inside vmap or a functional gradient."""
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


def is_readable(t: torch.Tensor) -> bool:
    """Whether `t` has values of its own, which a tensor inside vmap has not."""
    functorch = torch._C._functorch
    while is_wrapped(t):
        if functorch.is_batchedtensor(t):
            return False
        t = functorch.get_unwrapped(t)
    return True
