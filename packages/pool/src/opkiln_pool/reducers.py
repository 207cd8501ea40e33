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
    """Values and their positions (below 2^16 for 16-bit values) as integers whose largest is the
    argmax: of equal values the first, of several NaN the last, of masked elements none.
    """
    order, nan = to_order(x)
    if x.dtype.primitive_bitwidth == 16:
        low = tl.where(nan, position, 2**16 - 1 - position)
        keys = tl.where(mask, order * 2**16 + low, -(2**31))
    else:
        low = tl.where(nan, position, 2**31 - 1 - position)
        keys = tl.where(mask, order.to(tl.int64) * 2**32 + low, -(2**63))
    return keys


@triton.jit
def from_keys(keys, DTYPE: tl.constexpr):
    """Values and positions of keys."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    LARGEST: tl.constexpr = 2**15 - 1 if BITS == 16 else 2**31 - 1
    order = (keys >> BITS).to(tl.int32)
    low = (keys & (2 * LARGEST + 1)).to(tl.int32)
    last: tl.constexpr = 2**16 - 1 if BITS == 16 else 2**31 - 1
    return from_order(order, DTYPE), tl.where(order == LARGEST, low, last - low)


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
def explode(x, BLOCK: tl.constexpr, N: tl.constexpr):
    """The columns of x [BLOCK, N] as N tensors [BLOCK]; nothing moves between threads. N: 4, 8."""
    even, odd = tl.split(tl.reshape(x, [BLOCK, N // 2, 2]))
    if N == 4:
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        columns = (x0, x1, x2, x3)
    else:
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
