"""The tensors of a row, on a device. The same row always gets the same values."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from opkiln_bench.catalogue import TORCH_NAMES, CatalogueError, Row, TensorRow


def make_inputs(row: Row, device: torch.device) -> dict[str, torch.Tensor]:
    """Tensor name -> tensor. Seeded by the row's name, so that every run sees the same data."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(row).encode()))
    made: dict[str, torch.Tensor] = {}
    for name, spec in row.tensors.items():
        of_input = STATISTICS.get(spec.fill) if isinstance(spec.fill, str) else None
        made[name] = of_input(made["input"]) if of_input else _filled(spec, device, generator)
        if spec.stride is not None:
            made[name] = strided(made[name], spec.stride)
    return made


def strided(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The values of `x` in memory with these strides; of an expanded dim its first."""
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, stride, strict=True))
    out = x.new_empty(span if x.numel() else 0).as_strided(x.shape, stride)
    kept = tuple(slice(0, 1 if step == 0 else None) for step in stride)
    out[kept].copy_(x[kept])
    return out


def channel_mean(x: torch.Tensor) -> torch.Tensor:
    """What a training forward saves: the mean of each channel, in float32."""
    return x.mean([0, *range(2, x.ndim)], dtype=torch.float32)


def channel_rstd(x: torch.Tensor) -> torch.Tensor:
    """What a training forward saves: 1 / sqrt(variance + 1e-5) of each channel, in float32."""
    dims = [0, *range(2, x.ndim)]
    return torch.rsqrt(torch.var(x.float(), dims, correction=0) + 1e-5)


STATISTICS = {"channel_mean": channel_mean, "channel_rstd": channel_rstd}
RANDOM = ("normal", "positive", "arange")


def check_fill(fill: Any) -> None:
    """CatalogueError where `make_inputs` cannot fill a tensor so."""
    bounds = isinstance(fill, dict) and fill.keys() == {"low", "high"}
    known = bounds or isinstance(fill, list | int | float) or fill in (*RANDOM, *STATISTICS)
    if not known:
        raise CatalogueError(
            f"unknown fill {fill!r}: {', '.join((*RANDOM, *STATISTICS))}, number, list, bounds"
        )


def _filled(spec: TensorRow, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    dtype = getattr(torch, TORCH_NAMES[spec.dtype])
    fill: Any = spec.fill
    if fill == "normal":
        return torch.randn(spec.shape, dtype=dtype, device=device, generator=generator)
    if fill == "positive":
        return torch.rand(spec.shape, dtype=dtype, device=device, generator=generator) + 0.5
    if fill == "arange":
        return torch.arange(spec.shape[0], dtype=dtype, device=device)
    if isinstance(fill, list):
        return torch.tensor(fill, dtype=dtype, device=device).reshape(spec.shape)
    if isinstance(fill, dict):  # integers
        low, high = fill["low"], fill["high"] + 1
        drawn = torch.randint(low, high, spec.shape, device=device, generator=generator)
        return drawn.to(dtype)
    check_fill(fill)
    return torch.full(spec.shape, fill, dtype=dtype, device=device)
