"""Cosines and sines computed where they are used, from 8 bytes a frequency.

An angle is a fraction of a turn, position * frequency / 2 pi modulo 1, in fixed point: complete
turns overflow. A frequency has 64 bits and the product's top 32 are kept, so an angle is exact to
2^-32 of a turn at any 32-bit position. A table of cosines and sines has 8 bytes a position and
frequency instead: 4 MB for 8192 positions of 128 channels, where x may have 2 MB.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from opkiln.device.rope_tables import rope_tables
from opkiln.ops.rope.rules import Rule


def turns(
    rule: Rule, device: torch.device, rotary_dim: int, **numbers: Any
) -> tuple[torch.Tensor, ...]:
    """One tensor [2, pairs], shared by all calls: turns a position, each word of 32 bits stored as
    int32, the high one first.
    """

    def build(rows: int) -> tuple[torch.Tensor]:
        freq, _ = rule(rotary_dim, device, **numbers)
        scaled = (freq / math.tau).frac() * 2.0**32
        high = scaled.floor()
        low = ((scaled - high) * 2.0**32).floor()
        words = torch.stack((high, low)).to(torch.int64)
        words = words.view(torch.int32)[:, ::2]  # the lower half of each
        return (words.contiguous(),)

    return rope_tables(("turns", rule.__name__, rotary_dim, *numbers.values()), 1, device, build)


def amplitude(rule: Rule, rotary_dim: int, **numbers: Any) -> float | None:
    """What cos and sin are multiplied by; None: nothing."""
    _, factor = rule(rotary_dim, torch.device("meta"), **numbers)
    return None if factor == 1 else factor


@triton.jit
def cos_sin(position, high, low, scale):
    """position: integers below 2^31; high, low: int32. scale None: 1."""
    position = position.to(tl.uint32)
    high = high.to(tl.uint32, bitcast=True)
    low = low.to(tl.uint32, bitcast=True)
    phase = position * high + tl.umulhi(position, low)  # 2^-32 turns

    # cos and sin of u quarter turns, u in [-1, 1); the half turn that is left changes both signs.
    u = (phase << 1).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-31
    sign = (phase + 0x40000000) & 0x80000000
    y = u * u
    # Minimax to 3.4e-9; with the roundings of float32 the error is at most 1.8e-7.
    cos = 0.0009177887706545399 + y * -2.3848339145284714e-05
    cos = 0.25366934998469726 + y * (-0.02086275163760352 + y * cos)
    cos = 1.0 + y * (-1.2337005390219102 + y * cos)
    sin = -0.004672227912653798 + y * 0.00015082055925095828
    sin = -0.6459633598642335 + y * (0.07968848053337997 + y * sin)
    sin = u * (1.5707962900222656 + y * sin)
    cos = (cos.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    sin = (sin.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    if scale is not None:
        cos *= scale
        sin *= scale
    return cos, sin


@triton.jit
def angles(position, words, half, scale, EVEN: tl.constexpr, BLOCK_T: tl.constexpr,
           BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    """cos and sin [BLOCK_R, BLOCK_P], or [1, BLOCK_P] of one token, of position [BLOCK_R, 1] or a
    scalar. words: `half` high and `half` low ones.
    """
    cols = tl.arange(0, BLOCK_P)
    if BLOCK_T > 1:
        cols = tl.broadcast_to(cols[None, :], [BLOCK_R, BLOCK_P])
    mask = None
    if not EVEN:
        mask = cols < half
    high = tl.load(words + cols, mask=mask)
    low = tl.load(words + half + cols, mask=mask)
    cos, sin = cos_sin(position, high, low, scale)
    if BLOCK_T == 1:
        # Every thread computes other frequencies and gets what its channels need through shared
        # memory; else each row of threads would compute all of them.
        cos = tl.gather(cos, cols, 0)[None, :]
        sin = tl.gather(sin, cols, 0)[None, :]
    return cos, sin
