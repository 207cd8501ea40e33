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
def add(a, b):
    return a + b


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_at(a, a_at, b, b_at):
    """Argmax of two values in any order; `at` numbers them in scan order."""
    wins = (b > a) | ((b == a) & (b_at < a_at)) | ((b != b) & ((a == a) | (b_at > a_at)))
    return tl.where(wins, b, a), tl.where(wins, b_at, a_at)


@triton.jit
def reduce_axis(x, AXIS: tl.constexpr, REDUCE: tl.constexpr):
    """Sum or maximum along an axis."""
    if REDUCE == "avg":
        found = tl.reduce(x, AXIS, add)
    else:
        found = tl.reduce(x, AXIS, larger)
    return found


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
