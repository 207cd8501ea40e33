"""What the pooling kernels share on the device: reducers, window arithmetic, registers as tuples.

REDUCE is "avg" (sum in f32), "max", or "argmax" (the value and where it was found). Of several NaN
the last wins, of equal values the first.
"""

import triton
import triton.language as tl


@triton.jit
def identity(REDUCE: tl.constexpr):
    """What an element outside the input counts as."""
    return 0.0 if REDUCE == "avg" else float("-inf")


@triton.jit
def compute(x, WIDE: tl.constexpr):
    """Loaded elements in the dtype that they are reduced in: f32 if WIDE, else their own."""
    return x.to(tl.float32) if WIDE else x


@triton.jit
def combine(a, b, REDUCE: tl.constexpr):
    """Sum or maximum; a NaN in either is kept."""
    return a + b if REDUCE == "avg" else tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def follow(best, best_at, value, at):
    """Argmax step for a value that comes after `best` in the window: torch's own rule."""
    wins = (value > best) | (value != value)
    return tl.where(wins, value, best), tl.where(wins, at, best_at)


# Argmax of two pairs of 16-bit values at once: $0, $1 = follow($2, $3, $4, $5), where $6 is a pair
# of inf. lop3 0xca selects: (wins & $5) | (~wins & $3).
FOLLOW_F16 = tl.constexpr("""{
    .reg .b32 least, wins;
    min.f16x2 least, $2, $6;
    set.gtu.u32.f16x2 wins, $4, least;
    max.NaN.f16x2 $0, $2, $4;
    lop3.b32 $1, wins, $5, $3, 0xca;
}""")
FOLLOW_BF16 = tl.constexpr(FOLLOW_F16.value.replace("f16", "bf16"))


@triton.jit
def follow_pairs(best, best_at, value, at, ASM: tl.constexpr):
    """`follow` for 16-bit values and places [int16]. ASM: two at a time, on sm_90."""
    if ASM:
        half: tl.constexpr = best.dtype == tl.float16
        inf = tl.full(best.shape, float("inf"), best.dtype)
        # A NaN counts as inf when it is compared with, so that only another NaN wins over it.
        best, best_at = tl.inline_asm_elementwise(
            FOLLOW_F16 if half else FOLLOW_BF16, "=&r,=&r,r,r,r,r,r",
            [best, best_at, value, at, inf], (best.dtype, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        wide = value.to(tl.float32)
        wins = (wide > best.to(tl.float32)) | (wide != wide)
        best = tl.where(wins, value, best)
        best_at = tl.where(wins, at, best_at)
    return best, best_at


@triton.jit
def to_order(x):
    """Integers [int32] that sort as the values do, NaN largest and both zeros equal; which are NaN.

    The largest of integers is one instruction a warp, and does not depend on the order of steps.
    """
    if x.dtype.primitive_bitwidth == 16:
        LOW: tl.constexpr = -(2**15)
        INF: tl.constexpr = 0x7C00 if x.dtype == tl.float16 else 0x7F80
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        LOW: tl.constexpr = -(2**31)
        INF: tl.constexpr = 0x7F800000
        bits = x.to(tl.int32, bitcast=True)
    nan = (bits & (-LOW - 1)) > INF
    return tl.where(nan, -LOW - 1, tl.where(bits < 0, LOW - bits, bits)), nan


@triton.jit
def from_order(order, DTYPE: tl.constexpr):
    """The values again."""
    if DTYPE.primitive_bitwidth == 16:
        bits = tl.where(order < 0, -(2**15) - order, order).to(tl.int16)
    else:
        bits = tl.where(order < 0, -(2**31) - order, order)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def to_keys(x, position, mask):
    """f32 values and their positions as int64 whose largest is the argmax: of equal values the
    first, of several NaN the last, of masked elements none.
    """
    order, nan = to_order(x)
    low = tl.where(nan, position, 2**31 - 1 - position)
    return tl.where(mask, order.to(tl.int64) * 2**32 + low, -(2**63))


@triton.jit
def from_keys(keys, DTYPE: tl.constexpr):
    """Values and positions of keys."""
    LARGEST: tl.constexpr = 2**31 - 1
    order = (keys >> 32).to(tl.int32)
    low = (keys & (2**32 - 1)).to(tl.int32)
    return from_order(order, DTYPE), tl.where(order == LARGEST, low, LARGEST - low)


# $0, $1 = order, low of the pairs $2 with places $3. x * 1 + 0 makes every NaN 0x7fff and -0 0,
# prmt spreads the signs; the places of all but NaN are inverted.
KEYS_F16 = tl.constexpr("""{
    .reg .b32 x, sign, nan;
    fma.rn.f16x2 x, $2, $4, $5;
    prmt.b32 sign, x, 0, 0xbb99;
    lop3.b32 $0, x, sign, 0x7fff7fff, 0x78;
    set.nan.u32.f16x2 nan, $2, $2;
    lop3.b32 $1, $3, nan, 0, 0xc3;
}""")
KEYS_BF16 = tl.constexpr(KEYS_F16.value.replace("f16", "bf16"))


@triton.jit
def to_pair_keys(x, place, ASM: tl.constexpr):
    """16-bit values and places [int16, the bits of 0 to 65535] as int32 keys like `to_keys`."""
    if ASM:
        one = tl.full(x.shape, 1.0, x.dtype)
        zero = tl.full(x.shape, 0.0, x.dtype)
        half: tl.constexpr = x.dtype == tl.float16
        order, low = tl.inline_asm_elementwise(
            KEYS_F16 if half else KEYS_BF16, "=&r,=&r,r,r,r,r", [x, place, one, zero],
            (tl.int16, tl.int16), is_pure=True, pack=2,
        )  # fmt: skip
        order = order.to(tl.int32)
    else:
        order, nan = to_order(x)
        order = tl.where(order < 0, order - 1, order)
        low = tl.where(nan, place, ~place)
    return order * 2**16 + (low.to(tl.int32) & 0xFFFF)


@triton.jit
def from_pair_keys(keys, DTYPE: tl.constexpr):
    """Values and places of keys."""
    order = keys >> 16
    low = tl.where(order == 2**15 - 1, keys, ~keys) & 0xFFFF
    return (order ^ ((order >> 31) & 0x7FFF)).to(tl.int16).to(DTYPE, bitcast=True), low


@triton.jit
def accumulate(total, places, x, place, mask, REDUCE: tl.constexpr, F32: tl.constexpr,
               PAIRS: tl.constexpr):  # fmt: skip
    """A tile x reduced into the tiles before it, element by element; total None: the first tile.

    total: sums, maxima, for argmax keys; where PAIRS is not None, maxima, and their `places`.
    """
    if PAIRS is not None:
        place = place.to(tl.int16)
        if total is None:
            total = x
        else:
            total, place = follow_pairs(total, places, x, place, PAIRS)
    elif REDUCE == "argmax":
        keys = to_keys(x, place, mask)
        total = keys if total is None else tl.maximum(total, keys)
    else:
        value = compute(x, F32)
        total = value if total is None else combine(total, value, REDUCE)
    return total, place


@triton.jit
def first_tap(start, K: tl.constexpr, DILATION: tl.constexpr, PADDING: tl.constexpr):
    """The first tap of a window along one dim that is not in the padding before the input."""
    if PADDING == 0 or K == 1:
        tap = start * 0
    else:
        tap = (tl.maximum(-start, 0) + DILATION - 1) // DILATION
    return tap


@triton.jit
def counted(start, size, K: tl.constexpr, PADDING: tl.constexpr, INCLUDE_PAD: tl.constexpr):
    """Elements of a window along one dim that an average divides by."""
    if INCLUDE_PAD:
        count = tl.minimum(start + K, size + PADDING) - start
    else:
        count = tl.minimum(start + K, size) - tl.maximum(start, 0)
    return count


@triton.jit
def to_sums(x, out_ptr):
    """f64 where gradients are f32: windows that cancel leave few of the bits of an f32 sum."""
    if out_ptr.dtype.element_ty == tl.float32:
        x = x.to(tl.float64)
    return x


@triton.jit
def explode(x, BLOCK: tl.constexpr, N: tl.constexpr):
    """The columns of x [BLOCK, N] as N tensors [BLOCK], in the same threads. N: 2, 4 or 8."""
    if N == 2:
        x0, x1 = tl.split(x)
        columns = (x0, x1)
    elif N == 4:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        columns = (x0, x1, x2, x3)
    else:
        even, odd = tl.split(tl.reshape(x, [BLOCK, 4, 2]))
        e0, e1, e2, e3 = explode(even, BLOCK, 4)
        o0, o1, o2, o3 = explode(odd, BLOCK, 4)
        columns = (e0, o0, e1, o1, e2, o2, e3, o3)
    return columns


@triton.jit
def implode(columns, BLOCK: tl.constexpr, N: tl.constexpr):
    """The inverse: N tensors [BLOCK] as one [BLOCK, N]. N: 1, 2, 4 or 8."""
    if N == 1:
        x = columns[0][:, None]
    elif N == 2:
        x = tl.join(columns[0], columns[1])
    elif N == 4:
        even = tl.join(columns[0], columns[2])
        odd = tl.join(columns[1], columns[3])
        x = tl.reshape(tl.join(even, odd), [BLOCK, 4])
    else:
        even = implode((columns[0], columns[2], columns[4], columns[6]), BLOCK, 4)
        odd = implode((columns[1], columns[3], columns[5], columns[7]), BLOCK, 4)
        x = tl.reshape(tl.join(even, odd), [BLOCK, 8])
    return x
