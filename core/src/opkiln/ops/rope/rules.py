"""Frequency rules of rotary embeddings.

A rule gives the angle per position of each of the rotary_dim / 2 pairs, float64 on the device, and
the amplitude by which cos and sin are multiplied. Angles are position * frequency in float64 before
anything is rounded: in float32 the product is off by 4e-3 at position 131,071.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Rule = Callable[..., tuple[torch.Tensor, float]]


def plain(rotary_dim: int, device: torch.device, base: float) -> tuple[torch.Tensor, float]:
    """base^(-2i / rotary_dim). Su et al., "RoFormer", 2021."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device)
    return base ** (-exponent / rotary_dim), 1.0


def llama31(
    rotary_dim: int,
    device: torch.device,
    base: float,
    scale_factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position: int,
) -> tuple[torch.Tensor, float]:
    """Three bands by how often a pair turns within the original context.

    More than high_freq_factor turns: unchanged; fewer than low_freq_factor: divided by
    scale_factor; between: a straight blend of both.
    Grattafiori et al., "The Llama 3 Herd of Models", 2024.
    """
    freq, _ = plain(rotary_dim, device, base)
    turns = original_max_position * freq / (2 * math.pi)
    blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * freq / scale_factor + blend * freq, 1.0


def yarn(
    rotary_dim: int,
    device: torch.device,
    base: float,
    scale: float,
    original_max_position: int,
    beta_fast: float,
    beta_slow: float,
    attn_factor: float,
) -> tuple[torch.Tensor, float]:
    """Pairs that turn more than beta_fast times within the original context are kept, those that
    turn less than beta_slow times are divided by scale, a ramp with rounded ends lies between.

    Peng et al., "YaRN", 2023.
    """
    freq, _ = plain(rotary_dim, device, base)

    def pair_that_turns(turns: float) -> float:
        wavelength = original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), rotary_dim - 1)
    width = high - low or 0.001  # a step, without dividing by zero
    pair = torch.arange(rotary_dim // 2, dtype=torch.float64, device=device)
    ramp = ((pair - low) / width).clamp(0, 1)
    return freq / scale * ramp + freq * (1 - ramp), attn_factor


def longrope(
    rotary_dim: int,
    device: torch.device,
    base: float,
    rescale_factors: Sequence[float],
    max_position_embeddings: int,
    original_max_position_embeddings: int,
) -> tuple[torch.Tensor, float]:
    """Every pair's frequency divided by its own factor; amplitude sqrt(1 + ln s / ln L) with
    s = max_position_embeddings / L where s > 1, L = original_max_position_embeddings.

    Ding et al., "LongRoPE", 2024.
    """
    freq, _ = plain(rotary_dim, device, base)
    factors = torch.tensor(rescale_factors, dtype=torch.float64)
    factors = factors.to(device, non_blocking=True)  # a blocking copy would wait for the GPU
    s = max_position_embeddings / original_max_position_embeddings
    amplitude = 1.0
    if s > 1:
        amplitude = math.sqrt(1 + math.log(s) / math.log(original_max_position_embeddings))
    return freq / factors, amplitude
