// topk_selector: for each row the positions of its `topk` largest scores within [start, end), -1 in
// what is left over. NaN is largest, +0 equals -0, of equal scores the lowest positions win.
//
// A CTA takes a row. It guesses a bound that a little more than topk scores reach, from the order
// statistics of a sample, streams the row once and collects what reaches the bound, then selects
// among the collected. A guess that was too high (too few collected) or too low (more than fit) costs
// a second, slower pass that needs none: it thins the collection to topk whenever it is full, and from
// then on takes only what is larger than the smallest kept. Both are exact for every input.
//
// Macros: CAPACITY: scores that a CTA collects, at least topk + THREADS * VECTOR; THREADS; BLOCKS:
// CTAs a multiprocessor; VECTOR: scores loaded at once (1: any strides); UNROLL: loads in flight a
// thread; SORTED: positions ascend; START, END: integer types of the windows.

constexpr int ENTRIES = CAPACITY / THREADS;  // of the collection, a thread's
constexpr int WARPS = THREADS / 32;
constexpr int CHUNK = THREADS * VECTOR;
constexpr int SAMPLE = 4096;
constexpr int SAMPLES = SAMPLE / THREADS;  // a thread's
constexpr int SEGMENTS = 16;               // places of the row that the sample comes from
static_assert(CAPACITY % THREADS == 0 && ENTRIES <= 32 && SAMPLES % VECTOR == 0, "sizes");

struct Collection {
    u32 keys[CAPACITY];
    int positions[CAPACITY];
    u32 votes[2 * WARPS];
    u32 count, slots;
};

struct Row {
    const float* scores;
    i64 stride;
    int start, end;
    DEVICE float at(int position) const { return scores[position * stride]; }
};

// Unsigned integers in the order of the scores; 0 is no score's key.
DEVICE u32 key_of(float score) {
    const u32 bits = __float_as_uint(score + 0.0f);  // -0 + 0 = +0
    if (score != score) return ~0u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
// The largest score that is not NaN with at most this key.
DEVICE float score_of(u32 key) {
    const u32 infinity = 0xff800000u;
    if (key > infinity) key = infinity;
    if (key < ~infinity) key = ~infinity;
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// Sums over the CTA, one barrier each; two sets of slots, so that none is overwritten while read.
struct Votes {
    u32* slots;
    int turn;
    DEVICE u32 gather(u32 of_warp, bool largest) {
        const int lane = threadIdx.x % 32;
        u32* set = slots + (turn ^= WARPS);
        if (lane == 0) set[threadIdx.x / 32] = of_warp;
        __syncthreads();
        const u32 value = lane < WARPS ? set[lane] : 0;
        return largest ? __reduce_max_sync(ALL_LANES, value) : __reduce_add_sync(ALL_LANES, value);
    }
    template <int COUNT>
    DEVICE u32 at_least(const u32 (&keys)[COUNT], u32 bound) {
        u32 n = 0;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) n += keys[e] >= bound;
        return gather(__reduce_add_sync(ALL_LANES, n), false);
    }
    template <int COUNT>
    DEVICE u32 largest(const u32 (&keys)[COUNT]) {
        u32 most = 0;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) most = max(most, keys[e]);
        return gather(__reduce_max_sync(ALL_LANES, most), true);
    }
};

// The largest key that at least `want` of the CTA's keys reach, or one that `reached` keys reach, at
// most want + slack. `want` reach low, none is above high.
template <int COUNT>
DEVICE u32 search(const u32 (&keys)[COUNT], u32 want, u32 slack, u32 low, u32 high, Votes& votes, u32& reached) {
    reached = 0;
#pragma unroll 1
    while (low < high) {
        const u32 middle = low + (high - low) / 2 + 1;
        const u32 n = votes.at_least(keys, middle);
        if (n < want) {
            high = middle - 1;
        } else {
            low = middle;
            reached = n;
            if (n - want <= slack) break;
        }
    }
    if (reached == 0) reached = votes.at_least(keys, low);
    return low;
}

// A key that a little more than topk of the row's keys reach, most likely.
DEVICE u32 guess_bound(const Row& row, int topk, Votes& votes) {
    const int length = row.end - row.start;
    constexpr int PER_SEGMENT = SAMPLE / SEGMENTS;
    u32 keys[SAMPLES];
#pragma unroll
    for (int e = 0; e < SAMPLES; e += VECTOR) {
        const int i = (threadIdx.x + e / VECTOR * THREADS) * VECTOR;
        const int segment = i / PER_SEGMENT;
        int at = row.start + static_cast<int>((length - PER_SEGMENT) * static_cast<i64>(segment) / (SEGMENTS - 1));
        at = at / VECTOR * VECTOR + (i % PER_SEGMENT);
        at = at < row.start ? at + VECTOR : at;
        if (VECTOR == 4) {
            const float4 x = *reinterpret_cast<const float4*>(row.scores + at);
            keys[e] = key_of(x.x);
            keys[e + 1] = key_of(x.y);
            keys[e + 2] = key_of(x.z);
            keys[e + 3] = key_of(x.w);
        } else {
            keys[e] = key_of(row.at(at));
        }
    }
    const float expected = static_cast<float>(SAMPLE) * topk / length;
    const u32 rank = static_cast<u32>(expected + 5.5f * sqrtf(expected) + 1);
    u32 reached;
    return search(keys, min(rank, static_cast<u32>(SAMPLE)), rank / 8, 1, votes.largest(keys), votes, reached);
}

DEVICE void append(Collection& c, u32 slot, float score, int position) {
    if (slot < CAPACITY) {
        c.keys[slot] = key_of(score);
        c.positions[slot] = position;
    }
}
DEVICE void offer(Collection& c, float score, int position, float bound) {
    if (!(score < bound)) append(c, atomicAdd(&c.count, 1u), score, position);
}
DEVICE void offer(Collection& c, const float4& x, int position, float bound) {
    const bool a = !(x.x < bound), b = !(x.y < bound), d = !(x.z < bound), e = !(x.w < bound);
    if (a | b | d | e) {
        u32 slot = atomicAdd(&c.count, static_cast<u32>(a + b + d + e));
        if (a) append(c, slot++, x.x, position);
        if (b) append(c, slot++, x.y, position + 1);
        if (d) append(c, slot++, x.z, position + 2);
        if (e) append(c, slot, x.w, position + 3);
    }
}

// Collect what is not below the bound; the order is free. More than CAPACITY are counted, not kept.
DEVICE void stream(Collection& c, const Row& row, float bound) {
    if (VECTOR == 1) {
        for (int base = row.start; base < row.end; base += THREADS * UNROLL) {
            float x[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int position = base + u * THREADS + threadIdx.x;
                if (position < row.end) x[u] = row.at(position);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int position = base + u * THREADS + threadIdx.x;
                if (position < row.end) offer(c, x[u], position, bound);
            }
        }
        return;
    }
    const int head = min((row.start + 3) / 4 * 4, row.end), tail = max(row.end / 4 * 4, head);
    const int thread = threadIdx.x;
    if (thread < head - row.start) offer(c, row.scores[row.start + thread], row.start + thread, bound);
    if (thread < row.end - tail) offer(c, row.scores[tail + thread], tail + thread, bound);
    const float4* vectors = reinterpret_cast<const float4*>(row.scores);
    const int last = tail / 4;
#pragma unroll 1
    for (int v = head / 4 + thread; v < last; v += THREADS * UNROLL) {
        float4 x[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (v + u * THREADS < last) x[u] = __ldcs(vectors + v + u * THREADS);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (v + u * THREADS < last) offer(c, x[u], 4 * (v + u * THREADS), bound);
        }
    }
}

DEVICE void load_keys(const Collection& c, u32 (&keys)[ENTRIES]) {
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const u32 slot = e * THREADS + threadIdx.x;
        keys[e] = slot < c.count ? c.keys[slot] : 0;
    }
}

// Which of a thread's entries of the collection are chosen, a bit each; the least chosen key.
struct Choice { u32 mask, least; };

// More keys than there is room for equal the least: of these the lowest positions.
NOT_INLINED Choice break_ties(const Collection& c, int topk, u32 least) {
    Votes votes = {const_cast<u32*>(c.votes), 0};
    u32 keys[ENTRIES], reached;
    __syncthreads();  // for the votes' slots
    load_keys(c, keys);
    const u32 above = least == ~0u ? 0 : votes.at_least(keys, least + 1);
    Choice choice = {0, least};
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        choice.mask |= static_cast<u32>(keys[e] > least) << e;
        keys[e] = keys[e] == least ? ~static_cast<u32>(c.positions[e * THREADS + threadIdx.x]) : 0;
    }
    const u32 first = search(keys, topk - above, 0, 0x80000000u, ~0u, votes, reached);
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) choice.mask |= static_cast<u32>(keys[e] >= first) << e;
    return choice;
}

// The topk largest of the collection, all of which reach `low`.
DEVICE Choice choose(const Collection& c, int topk, u32 low, Votes& votes) {
    u32 keys[ENTRIES], reached;
    load_keys(c, keys);
    Choice choice = {0, search(keys, topk, 0, low, votes.largest(keys), votes, reached)};
    if (reached != topk) return break_ties(c, topk, choice.least);
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) choice.mask |= static_cast<u32>(keys[e] >= choice.least) << e;
    return choice;
}

// A slot for each lane that wants one, counted in c.slots.
DEVICE u32 take_slot(Collection& c, bool wanted) {
    const u32 mask = __ballot_sync(ALL_LANES, wanted);
    const int lane = threadIdx.x % 32;
    u32 base = 0;
    if (lane == 0) base = atomicAdd(&c.slots, static_cast<u32>(__popc(mask)));
    return __shfl_sync(ALL_LANES, base, 0) + __popc(mask & ((1u << lane) - 1));
}

// Keep the topk largest of the collection; returns the least key kept.
DEVICE u32 thin(Collection& c, int topk, Votes& votes) {
    u32 keys[ENTRIES];
    int positions[ENTRIES];
    const Choice choice = choose(c, topk, 1, votes);
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        keys[e] = c.keys[e * THREADS + threadIdx.x];
        positions[e] = c.positions[e * THREADS + threadIdx.x];
    }
    if (threadIdx.x == 0) c.slots = 0;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const bool kept = choice.mask >> e & 1;
        const u32 slot = take_slot(c, kept);
        if (kept) {
            c.keys[slot] = keys[e];
            c.positions[slot] = positions[e];
        }
    }
    if (threadIdx.x == 0) c.count = topk;
    __syncthreads();
    return choice.least;
}

// In order of position, without a guess: thin the collection whenever another chunk might not fit.
NOT_INLINED void stream_exactly(Collection& c, const float* scores, i64 stride, int start, int end, int topk) {
    Votes votes = {c.votes, 0};
    u32 least = 0;  // only larger keys can still be among the topk: equal ones come too late
    __syncthreads();
    if (threadIdx.x == 0) c.count = 0;
    __syncthreads();
#pragma unroll 1
    for (int base = start; base < end; base += CHUNK) {
        const bool full = c.count + CHUNK > CAPACITY;
        __syncthreads();
        if (full) least = thin(c, topk, votes);
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) {
            const int position = base + e * THREADS + threadIdx.x;
            if (position < end) {
                const float score = scores[position * stride];
                if (key_of(score) > least) append(c, atomicAdd(&c.count, 1u), score, position);
            }
        }
        __syncthreads();
    }
}

DEVICE void sort(u32* values, int size) {
    for (int run = 2; run <= size; run *= 2) {
        for (int distance = run / 2; distance; distance /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < size; i += THREADS) {
                const int other = i ^ distance;
                if (other > i && (values[i] > values[other]) == ((i & run) == 0)) {
                    const u32 kept = values[i];
                    values[i] = values[other];
                    values[other] = kept;
                }
            }
        }
    }
    __syncthreads();
}

// The topk largest of the collection, all of which reach `low`.
DEVICE void write_chosen(Collection& c, int* out, int topk, u32 low, Votes& votes) {
    const Choice choice = choose(c, topk, low, votes);
    if (threadIdx.x == 0) c.slots = 0;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const bool kept = choice.mask >> e & 1;
        const u32 slot = take_slot(c, kept);
        if (kept) {
            const int position = c.positions[e * THREADS + threadIdx.x];
            if (SORTED) c.keys[slot] = position;  // the keys are no longer read
            else out[slot] = position;
        }
    }
    if (SORTED) {
        int size = 1;
        while (size < topk) size *= 2;
        for (int i = topk + threadIdx.x; i < size; i += THREADS) c.keys[i] = ~0u;
        sort(c.keys, size);
        for (int i = threadIdx.x; i < topk; i += THREADS) out[i] = c.keys[i];
    }
}

DEVICE void select_row(Collection& c, const Row& row, int* out, int topk, Votes& votes) {
    const int length = row.end - row.start;
    if (length <= topk) {
        for (int i = threadIdx.x; i < topk; i += THREADS) out[i] = i < length ? row.start + i : -1;
        return;
    }
    __syncthreads();  // the last row's collection is no longer read
    if (threadIdx.x == 0) c.count = 0;
    __syncthreads();
    u32 bound = length <= CAPACITY ? 1 : guess_bound(row, topk, votes);
    stream(c, row, bound == 1 ? -__uint_as_float(0x7f800000u) : score_of(bound));
    __syncthreads();
    // NaN keys lie above every bound that a comparison can use.
    bound = min(bound, key_of(score_of(bound)));
    if (c.count < topk || c.count > CAPACITY) {
        stream_exactly(c, row.scores, row.stride, row.start, row.end, topk);
        bound = 1;
    }
    write_chosen(c, out, topk, bound, votes);
}

template <typename I>
DEVICE int clamped(const I* bounds, i64 offset, i64 kv) {
    const i64 value = bounds[offset];
    return static_cast<int>(value < 0 ? 0 : value > kv ? kv : value);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) topk_selector(
    const float* scores, const START* starts, const END* ends, int* out, i64 rows, i64 length, i64 groups,
    i64 kv, i64 stride_xb, i64 stride_xs, i64 stride_xkv, i64 stride_xg, i64 stride_sb, i64 stride_ss,
    i64 stride_eb, i64 stride_es, i64 topk) {
    Collection& c = *reinterpret_cast<Collection*>(dynamic_shared());
    Votes votes = {c.votes, 0};
    for (i64 i = blockIdx.x; i < rows; i += gridDim.x) {
        const i64 group = i % groups, query = i / groups % length, batch = i / groups / length;
        Row row;
        row.scores = scores + batch * stride_xb + query * stride_xs + group * stride_xg;
        row.stride = stride_xkv;
        row.start = clamped(starts, batch * stride_sb + query * stride_ss, kv);
        row.end = clamped(ends, batch * stride_eb + query * stride_es, kv);
        select_row(c, row, out + i * topk, static_cast<int>(topk), votes);
    }
}
