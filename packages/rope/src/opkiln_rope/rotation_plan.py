"""How a rotary embedding is launched: its tensors as [B, S, H, D], and the tiling for them."""

import math
from dataclasses import dataclass
from typing import Any

INTERLEAVED = ("rope_non_neox",)
# Parameters that say where the tokens are, not what the frequencies are.
NOT_OF_THE_RULE = ("offset", "max_position", "x_shape", "output_mask")
MAX_TOKENS = 2**31 - 2**16  # their numbers are 32-bit, and blocks reach past the end
MAX_POSITIONS = 2**31 - 2**16  # the same
MAX_PAIRS = 4096  # a block is a row or more, and a program holds it in registers
FEW_PAIRS = 2**19  # up to here all fits the registers of 132 multiprocessors at once


@dataclass(frozen=True, slots=True)
class Tiling:
    """See `rotation_kernel`."""

    block_t: int
    block_h: int
    steps: int
    num_warps: int
    evict: str = ""
    store_cache: str = ""
    max_registers: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """sizes: the kernel's run-time arguments after its tensors and the amplitude."""

    tiling: Tiling
    grid: tuple[int, int, int]
    sizes: tuple[Any, ...]
    interleaved: bool
    back: bool
    batched: bool
    rest: int
    even_h: bool
    even_p: bool
    align: int
    block_p: int

    def options(self) -> dict[str, Any]:
        """The compiler's. Masks and wide strides need more registers than the tiling grants."""
        is_plain = self.align == 16 and self.even_h and self.even_p and not self.rest
        limit = self.tiling.max_registers if is_plain else None
        return {"num_warps": self.tiling.num_warps, "maxnreg": limit}

    def constexprs(self) -> dict[str, Any]:
        """The kernel's compile-time arguments, in its order."""
        t = self.tiling
        return {
            "INTERLEAVED": self.interleaved,
            "BACK": self.back,
            "BATCHED": self.batched,
            "REST": self.rest,
            "EVEN_H": self.even_h,
            "EVEN_P": self.even_p,
            "ALIGN": self.align,
            "BLOCK_T": t.block_t,
            "BLOCK_H": t.block_h,
            "BLOCK_P": self.block_p,
            "STEPS": t.steps,
            "EVICT": t.evict,
            "STORE_CACHE": t.store_cache,
        }


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def rule(tokens: int, heads: int, pairs: int, itemsize: int) -> Tiling:
    """A vector of a and one of b a thread and step, two warps: every row of heads computes the
    angles anew, so few rows and more steps. Where there is little to do, half vectors and four
    warps, so that more threads share it: [4096, 128] 2.15 us instead of 2.27.
    """
    is_little = tokens * heads * pairs <= FEW_PAIRS
    block_p = power_of_two(pairs)
    vector = 16 // itemsize // (2 if is_little else 1)
    num_warps = min(max(block_p // 512, 4 if is_little else 2), 8)
    rows = max(num_warps * 32 * vector // block_p, 1)
    block_h = min(power_of_two(heads), rows)
    steps = 1
    while not is_little and steps < 4 and heads >= 2 * steps * block_h:
        steps *= 2
    # 16 programs of 2 warps fit a multiprocessor, so that 2048 run at once; without it, 68 to 70.
    registers = 64 if steps == 4 else None
    return Tiling(max(rows // block_h, 1), block_h, steps, num_warps, max_registers=registers)


def as_4d(values: tuple[int, ...], filler: int) -> tuple[int, int, int, int]:
    """[S, D], [T, H, D] or [B, S, H, D] -> B, S, H, D."""
    if len(values) == 2:
        return filler, values[0], filler, values[1]
    return (filler, *values)[-4:]  # type: ignore[return-value]


def plan_for(call: Any, tiling: Tiling | None = None) -> Plan | None:
    """ValueError says what the kernel cannot serve; None: nothing to compute."""
    p = call.params
    name = call.spec.forward_op or call.spec.name
    back = call.spec.name.endswith("_backward")
    if back and not call.outputs:
        return None
    x = next(iter(vars(call.tensors).values()))
    out = call.outputs[0] if call.outputs else x
    batch, length, heads, channels = as_4d(x.shape, 1)
    pairs = p.rotary_dim // 2
    tokens = batch * length
    if pairs == 0:
        raise ValueError("no channel turns")
    if tokens > MAX_TOKENS or pairs > MAX_PAIRS or channels > 2 * MAX_PAIRS:
        raise ValueError(f"{tokens} tokens of {channels} channels do not fit its index")
    strides, out_strides = as_4d(x.stride, 0), as_4d(out.stride, 0)
    dense = strides[3] == 1 and out_strides[3] == 1
    align = math.gcd(16, pairs, channels, *strides[:3], *out_strides[:3]) if dense else 1
    # Batch invariance: the tiling of many tokens, for any number.
    regime = MAX_TOKENS if call.policy.batch_invariant else tokens
    t = tiling or rule(regime, heads, pairs, x.dtype.itemsize)
    block_p = power_of_two(pairs)
    rest = channels - 2 * pairs
    ids = getattr(call.tensors, "position_ids", None)
    positions = p.max_position if ids is not None else p.offset + length
    if positions > MAX_POSITIONS:
        raise ValueError(f"positions up to {positions} do not fit its angles")
    head_blocks = -(-heads // (t.block_h * t.steps))
    if head_blocks > 65535:
        raise ValueError(f"{heads} heads do not fit its grid")
    sizes = (
        tuple(s // align for s in strides[:3]),
        tuple(s // align for s in out_strides[:3]),
        None if dense else strides[3],
        None if dense else out_strides[3],
        0 if ids is None else ids.stride[0],
        tokens,
        length,
        heads,
        pairs // align,
        rest // align,
        getattr(p, "offset", 0),
        positions - 1,
    )
    return Plan(
        tiling=t,
        grid=(-(-tokens // t.block_t), head_blocks, 1),
        sizes=sizes,
        interleaved=name in INTERLEAVED,
        back=back,
        batched=batch > 1,
        rest=power_of_two(rest) if rest and call.outputs else 0,
        even_h=heads % (t.block_h * t.steps) == 0,
        even_p=block_p == pairs,
        align=align,
        block_p=block_p,
    )
