"""What the channel norm kernels share: where a tile lies, loads, sums and moments of a set.

A program works on rows i [BLOCK_M, 1] and cols j [1, BLOCK_N] of outer index o, CHUNKS tiles at a
time along the cols. See channel_plan for what outer, rows and cols are. Offsets are 64-bit.
"""

import triton
import triton.language as tl


@triton.jit
def place(unit, row_blocks, ONE_OUTER: tl.constexpr, ROWS: tl.constexpr):
    """Outer index and first row of a unit of work."""
    if ONE_OUTER:
        outer = unit * 0
        block = unit
    else:
        outer = unit // row_blocks
        block = unit % row_blocks
    return outer, block * ROWS


@triton.jit
def nested_offsets(index, inner_sizes, strides):
    """Offset of each index over nested dims, outermost first, whose size is not needed."""
    offsets = index.to(tl.int64) * 0
    for d in tl.static_range(len(inner_sizes), 0, -1):
        offsets += (index % inner_sizes[d - 1]).to(tl.int64) * strides[d]
        index = index // inner_sizes[d - 1]
    return offsets + index.to(tl.int64) * strides[0]


@triton.jit
def row_pointers(ptr, outer, i, outer_sizes, steps, DENSE: tl.constexpr, ALIGN: tl.constexpr):
    """Pointer [BLOCK_M, 1] to the first col of each row."""
    base = ptr + nested_offsets(outer, outer_sizes, steps[0]) * ALIGN
    return base + i if DENSE == 0 else base + i.to(tl.int64) * steps[1] * ALIGN


@triton.jit
def col_pointers(rows, j, col_sizes, steps, DENSE: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers [BLOCK_M, BLOCK_N] to cols j of the rows."""
    return rows + j if DENSE == 1 else rows + nested_offsets(j, col_sizes, steps[2]) * ALIGN


@triton.jit
def load_tiles(rows, row_ok, first, n_cols, col_sizes, steps, DENSE: tl.constexpr,
               ALIGN: tl.constexpr,
               EVEN: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
               EVICT: tl.constexpr):  # fmt: skip
    """CHUNKS neighbouring tiles from col `first` on, in their own dtype, 0 where none is."""
    tiles = ()
    for c in tl.static_range(CHUNKS):
        j = first + c * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        ptrs = col_pointers(rows, j, col_sizes, steps, DENSE, ALIGN)
        if EVEN:
            tile = tl.load(ptrs, eviction_policy=EVICT)
        else:
            tile = tl.load(ptrs, mask=row_ok & (j < n_cols), other=0.0, eviction_policy=EVICT)
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def store_tile(rows, tile, row_ok, first, n_cols, col_sizes, steps, DENSE: tl.constexpr,
               ALIGN: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
               STORE_CACHE: tl.constexpr):  # fmt: skip
    j = first + tl.arange(0, BLOCK_N)[None, :]
    ptrs = col_pointers(rows, j, col_sizes, steps, DENSE, ALIGN)
    tile = tile.to(rows.dtype.element_ty)
    if EVEN:
        tl.store(ptrs, tile, cache_modifier=STORE_CACHE)
    else:
        tl.store(ptrs, tile, mask=row_ok & (j < n_cols), cache_modifier=STORE_CACHE)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def over_groups(rows, i, per_group):
    """For each row of [BLOCK_M, 1] the sum over the rows of its group."""
    group = i // per_group
    return tl.sum(tl.where(group == tl.trans(group), tl.trans(rows), 0.0), axis=1, keep_dims=True)


@triton.jit
def over_set(tile, i, per_group, POOL: tl.constexpr, SEGMENT: tl.constexpr):
    """Sum over a set: a scalar if POOL, else [BLOCK_M, 1].

    A tile of products has to come from tl.fma. Triton fuses a plain product into the sum's first
    exchange, as fma(a, b, the other lane's): then lanes round differently, and their copies of
    the sum, which they write to the same shared word, differ (racecheck found it).
    """
    if POOL:
        total = tl.sum(tile)
    else:
        total = tl.sum(tile, axis=1, keep_dims=True)
        if SEGMENT:
            total = over_groups(total, i, per_group)
    return total


@triton.jit
def channel_of(outer, i, channels, per_group, CHANNEL: tl.constexpr):
    """Channel of each row [BLOCK_M, 1]; of all, a scalar, where it lies along outer."""
    if CHANNEL == "outer":
        channel = outer
    elif CHANNEL == "row":
        channel = i % channels
    elif CHANNEL == "plane":  # the number of its group, of `per_group` planes
        channel = (outer * channels + i) // per_group
    else:
        channel = outer % (channels // per_group) * per_group + i
    return channel


@triton.jit
def load_channel(ptr, channel, stride, ok, CHANNEL: tl.constexpr):
    """A per-channel parameter in f32; `default` where it is absent."""
    if CHANNEL == "outer":
        value = tl.load(ptr + channel.to(tl.int64) * stride)
    else:
        value = tl.load(ptr + channel.to(tl.int64) * stride, mask=ok, other=0.0)
    return value.to(tl.float32)


@triton.jit
def store_channel(ptr, channel, stride, value, ok, CHANNEL: tl.constexpr):
    value = value.to(ptr.dtype.element_ty)
    if CHANNEL == "outer":
        tl.store(ptr + channel.to(tl.int64) * stride, value)
    else:
        tl.store(ptr + channel.to(tl.int64) * stride, value, mask=ok)


@triton.jit
def store_statistic(ptr, value, outer, i, row_ok, stat, per_group,
                    POOL: tl.constexpr, SEGMENT: tl.constexpr):  # fmt: skip
    """A set's statistic. stat: strides along outer and rows, and how many there are."""
    if POOL:
        tl.store(ptr + outer, value)
    elif SEGMENT:
        first = row_ok & (i % per_group == 0)
        tl.store(ptr + outer.to(tl.int64) * stat[0] + i // per_group, value, mask=first)
    else:
        index = outer.to(tl.int64) * stat[0] + i.to(tl.int64) * stat[1]
        tl.store(ptr + index, value, mask=row_ok & (index < stat[2]))


@triton.jit
def item_place(item, first, n_cols, POOL: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [BLOCK_M, 1] and first col of a set's tile; a pooled set has bands of rows."""
    col_blocks = tl.cdiv(n_cols, WIDTH)
    if POOL:
        first = item // col_blocks * BLOCK_M
        item = item % col_blocks
    return first + tl.arange(0, BLOCK_M)[:, None], item * WIDTH


@triton.jit
def slice_items(items, part, slices):
    """First and end of the items of slice `part`: equal shares, the rest spread over the slices."""
    share = items // slices
    rest = items % slices
    first = part * share + tl.minimum(part, rest)
    return first, first + share + (part < rest)
