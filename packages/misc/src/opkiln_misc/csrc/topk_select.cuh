// topk_selector's collection of scores, and how the largest are found in it by histograms: see topk.cu.

// The `want` largest of the n ranks from low to last, and all above.
struct Cut {
    u64 low, last;
    u32 want, n;
};

struct Collection {
    float scores[CAPACITY];
    int positions[CAPACITY];
    u32 bins[BINS];  // zeros between two uses
    u32 sums[WARPS];
    Cut cut;
    u32 count, slots, top;
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
// Larger is better, and no two are equal: the key, then the position inverted.
DEVICE u64 rank_of(float score, int position) {
    return static_cast<u64>(key_of(score)) << 32 | ~static_cast<u32>(position);
}
DEVICE u64 rank_at(const Collection& c, u32 slot) { return rank_of(c.scores[slot], c.positions[slot]); }

DEVICE u32 lanes_below() { return (1u << threadIdx.x % 32) - 1; }

// n slots for this lane, by one request a warp.
DEVICE u32 take_slots(Collection& c, u32 n) {
    const int lane = threadIdx.x % 32;
    u32 end = n, base = 0;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, end, d);
        if (lane >= d) end += other;
    }
    if (lane == 31 && end) base = atomicAdd(&c.count, end);
    return __shfl_sync(ALL_LANES, base, 31) + end - n;
}

// Collects the scores that hit(e) says. More than CAPACITY are counted, not kept.
template <int COUNT, typename Hit, typename Position>
DEVICE void append(Collection& c, const float (&x)[COUNT], Hit hit, Position position) {
    u32 n = 0;
#pragma unroll
    for (int e = 0; e < COUNT; ++e) {
        if (hit(e)) ++n;
    }
    u32 slot = take_slots(c, n);
    if (slot + n > CAPACITY) return;
#pragma unroll
    for (int e = 0; e < COUNT; ++e) {
        if (hit(e)) {
            c.scores[slot] = x[e];
            c.positions[slot++] = position(e);
        }
    }
}

// Bins as wide that BINS of them span the range: bits to shift.
DEVICE int bin_shift(u64 range) {
    const u32 high = static_cast<u32>(range >> 32);
    const int bits = high ? 64 - __clz(high) : 32 - __clz(static_cast<u32>(range));
    return max(bits - 11, 0);
}

// A thread's ranks of a sample, of the collection.
struct Sampled {
    const u32 (&keys)[OWN_SAMPLES];
    template <typename F>
    DEVICE void each(F f) const {
#pragma unroll
        for (int e = 0; e < OWN_SAMPLES; ++e) f(static_cast<u64>(keys[e]) << 32);
    }
};
struct Collected {
    const Collection& c;
    u32 count;
    template <typename F>
    DEVICE void each(F f) const {
        for (u32 slot = threadIdx.x; slot < count; slot += THREADS) f(rank_at(c, slot));
    }
};

// The bin in which a cut ends.
template <typename Ranks>
DEVICE Cut narrow(Collection& c, const Ranks& ranks, Cut cut, int shift) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ranks.each([&](u64 rank) {
        if (rank < cut.low || rank > cut.last) return;
        const u64 bin = (rank - cut.low) >> shift;
        atomicAdd(&c.bins[bin < BINS ? bin : BINS - 1], 1u);
    });
    __syncthreads();
    const int first = BINS - OWN_BINS * (threadIdx.x + 1);  // thread 0 has the highest
    auto* own = reinterpret_cast<Vector<u32, OWN_BINS>*>(c.bins + first);
    const Vector<u32, OWN_BINS> bins = *own;
    u32 n = 0;
#pragma unroll
    for (int b = 0; b < OWN_BINS; ++b) n += bins.at[b];
    *own = {};
    u32 above = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, above, d);
        if (lane >= d) above += other;
    }
    if (lane == 31) c.sums[warp] = above;
    __syncthreads();
    above += __reduce_add_sync(ALL_LANES, lane < warp ? c.sums[lane] : 0) - n;
    if (above < cut.want && cut.want <= above + n) {
#pragma unroll
        for (int b = OWN_BINS - 1; b >= 0; --b) {
            if (above < cut.want && cut.want <= above + bins.at[b]) {
                const u64 low = cut.low + (static_cast<u64>(first + b) << shift), width = (1ull << shift) - 1;
                const bool highest = first + b == BINS - 1 || cut.last - low < width;
                c.cut = {low, highest ? cut.last : low + width, cut.want - above, bins.at[b]};
            }
            above += bins.at[b];
        }
    }
    __syncthreads();
    return c.cut;
}

// A key that a little more than topk of `length` scores reach, most likely. keys: a sample; 0: none.
DEVICE u32 guess_bound(Collection& c, const u32 (&keys)[OWN_SAMPLES], int length, int topk) {
    u32 top = 0;
#pragma unroll
    for (int e = 0; e < OWN_SAMPLES; ++e) top = max(top, keys[e]);
    top = __reduce_max_sync(ALL_LANES, top);
    if (threadIdx.x % 32 == 0) atomicMax(&c.top, top);
    const int sampled = min(SAMPLE, length);
    const float expected = static_cast<float>(sampled) / length * topk;
    // 5.5 standard deviations of what a sample of independent scores has above the topk-th largest.
    const u32 want = min(static_cast<u32>(expected + 5.5f * sqrtf(expected) + 1), static_cast<u32>(sampled));
    Cut cut = narrow(c, Sampled{keys}, Cut{0, ~0ull, want, 0}, 64 - 11);
    if (cut.n > want / 8) cut = narrow(c, Sampled{keys}, cut, bin_shift(cut.last - cut.low));
    return static_cast<u32>(cut.low >> 32);
}

// The least of the topk largest ranks of the collection; keys lie from low to about top.
DEVICE u64 least_chosen(Collection& c, int topk, u32 low, u32 top) {
    const u32 count = c.count;
    Cut cut = {static_cast<u64>(low) << 32, ~0ull, static_cast<u32>(topk), count};
    int shift = bin_shift((static_cast<u64>(top) << 32 | ~0u) - cut.low);
#pragma unroll 1
    while (cut.n != cut.want) {
        cut = narrow(c, Collected{c, count}, cut, shift);
        shift = bin_shift(cut.last - cut.low);
    }
    return cut.low;
}
