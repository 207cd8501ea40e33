// topk_selector: for each row the positions of its `topk` largest scores within [start, end), -1 in
// what is left over. NaN is largest, +0 equals -0, of equal scores the lowest positions win.
//
// A CTA takes row after row. It guesses a bound that a little more than topk scores reach, from the
// order statistics of a sample, streams the row once and collects what reaches the bound, then selects
// among the collected. A guess that was too high (too few collected) or too low (more than fit) costs
// a second, slower pass that needs none: it thins the collection to topk whenever it is full, and from
// then on takes only what is larger than the smallest kept. Both are exact for every input.
//
// Every thread copies its scores into a ring of its own in shared memory, RING rounds ahead and over
// the ends of rows: memory stays busy while the CTA samples, selects and writes, and no barrier is
// needed. A warp streams a stretch of the row, so the first round is a sample from WARPS places.
//
// Macros: CAPACITY: scores that a CTA collects, at least twice topk; THREADS; BLOCKS: CTAs a
// multiprocessor; VECTOR: 4, or 1 for any alignment and strides, without the ring; UNROLL: vectors of
// a thread in a round; RING: rounds; BULK: a warp's round is one bulk copy; WARP_SLOTS: see take_slots;
// SORTED: positions ascend; START, END: integer types of the windows.

// tests/misc/test_topk_copies.h has the same for a CPU.
// Copies from global to shared memory that go on while the thread computes. Shared addresses of 32 bits.
DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }
// 16 bytes; seen by this thread after copies_wait.
DEVICE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last OPEN groups that this thread committed have arrived.
template <int OPEN>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory"); }
// One copy of a multiple of 16 bytes; seen by all who wait for its barrier, one copy a phase.
DEVICE void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier) {
    const u32 at = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(bytes), "r"(at) : "memory");
}
DEVICE void barrier_wait(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    } while (!done);
}

constexpr int WARPS = THREADS / 32;
constexpr int SCORES = 4 * UNROLL;        // of a thread in a round
constexpr int GRANULE = 32 * UNROLL;      // vectors of a warp in a round
constexpr int OWN_SAMPLES = 4096 / THREADS < 4 ? 4 : 4096 / THREADS > SCORES ? SCORES : 4096 / THREADS;
constexpr int SAMPLE = THREADS * OWN_SAMPLES;  // of a round
constexpr int ENTRIES = CAPACITY / THREADS;
constexpr int BINS = 2048;
constexpr int OWN_BINS = BINS / THREADS;  // a thread's
static_assert(CAPACITY % (2 * THREADS) == 0 && SCORES <= 32 && BINS % THREADS == 0, "sizes");

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

struct Row {
    const float* scores;
    i64 stride;
    int start, end;
    DEVICE float at(int position) const { return scores[position * stride]; }
};

struct Task {
    const float* scores;
    const START* starts;
    const END* ends;
    u32 rows, length, groups;
    i64 kv, stride_xb, stride_xs, stride_xkv, stride_xg, stride_sb, stride_ss, stride_eb, stride_es;
    int topk;

    template <typename I>
    DEVICE int clamped(I value) const { return static_cast<int>(value < 0 ? 0 : value > kv ? kv : value); }
    DEVICE Row row(u32 i) const {
        const u32 outer = i / groups, group = i - outer * groups;
        const u32 batch = outer / length, query = outer - batch * length;
        return {scores + batch * stride_xb + query * stride_xs + group * stride_xg, stride_xkv,
                clamped(starts[batch * stride_sb + query * stride_ss]),
                clamped(ends[batch * stride_eb + query * stride_es])};
    }
    DEVICE bool takes_all(const Row& row) const { return row.end - row.start <= topk; }
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

// What a warp streams of a row: `vectors` lie from this lane's first one to the row's end.
struct Share {
    int head, tail;  // whole vectors lie between these positions
    int first, rounds, vectors;
};
DEVICE Share share_of(const Row& row) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = static_cast<int>((row.start + 3u) / 4);
    const int end = max(row.end / 4, begin);
    const u32 granules = (end - begin + GRANULE - 1u) / GRANULE;
    const u32 mine = warp * granules / WARPS, next = (warp + 1) * granules / WARPS;
    const int first = begin + static_cast<int>(mine * GRANULE + lane);
    return {min(4 * begin, row.end), 4 * end, first, static_cast<int>(next - mine), end - first};
}

struct Ring {
    const Task& task;
    float4* mine;       // the first of this lane's slots
    u64* barriers;      // a warp's, if BULK
    u32 row;            // opened next
    const float4* from;  // copied next
    int left, vectors;  // of the row that is open
    int in, out, turn;  // rounds: filled next, read next; parity of the readers' lap

    DEVICE Ring(const Task& task, unsigned char* memory) : task(task), row(blockIdx.x), left(0), in(0), out(0), turn(0) {
        if (VECTOR == 1) return;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        mine = reinterpret_cast<float4*>(memory) + warp * GRANULE + lane;
        if (BULK) {
            barriers = reinterpret_cast<u64*>(memory + RING * 16 * UNROLL * THREADS) + warp * RING;
            if (lane < RING) barrier_init(barriers + lane);
            __syncwarp();
        }
        for (int i = 0; i < RING; ++i) refill();
    }
    // Copies the next round of this row or of one to come.
    DEVICE void refill() {
        while (left == 0 && row < task.rows) {
            const Row next = task.row(row);
            row += gridDim.x;
            if (task.takes_all(next)) continue;
            const Share share = share_of(next);
            from = reinterpret_cast<const float4*>(next.scores) + share.first;
            left = share.rounds;
            vectors = share.vectors;
        }
        float4* to = mine + in * (WARPS * GRANULE);
        if (BULK) {
            __syncwarp();  // all lanes have read the slots
            if (left && threadIdx.x % 32 == 0) bulk_copy(to, from, 16 * min(vectors, GRANULE), barriers + in);
        } else {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (left && 32 * u < vectors) copy_async(to + 32 * u, from + 32 * u);
            }
            copies_commit();
        }
        if (left) {
            --left;
            from += GRANULE;
            vectors -= GRANULE;
            in = in + 1 == RING ? 0 : in + 1;
        }
    }
    // This lane's vectors of the round, 32 apart.
    DEVICE const float4* arrived() const {
        if (BULK) barrier_wait(barriers + out, turn);
        else copies_wait<RING - 1>();
        return mine + out * (WARPS * GRANULE);
    }
    DEVICE void next() {
        turn ^= out + 1 == RING;
        out = out + 1 == RING ? 0 : out + 1;
        refill();
    }
};

DEVICE u32 lanes_below() { return (1u << threadIdx.x % 32) - 1; }

// n slots for this lane: one request a warp, or one a lane.
DEVICE u32 take_slots(Collection& c, u32 n) {
    if (!WARP_SLOTS) return n ? atomicAdd(&c.count, n) : 0;
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

// Scores of any stride, one by one.
template <int COUNT>
DEVICE void append_strided(Collection& c, const Row& row, int first, int end, u64 above) {
    float x[COUNT];
    auto position = [&](int e) { return first + e * THREADS; };
#pragma unroll
    for (int e = 0; e < COUNT; ++e) x[e] = position(e) < end ? row.at(position(e)) : 0;
    auto hit = [&](int e) { return position(e) < end && rank_of(x[e], position(e)) > above; };
    append(c, x, hit, position);
}

// Collect what is not below the bound; the order is free.
DEVICE void stream(Collection& c, const Row& row, float bound) {
    const u64 below = (static_cast<u64>(key_of(bound)) << 32) - 1;
#pragma unroll 1
    for (int base = row.start; base < row.end; base += THREADS * SCORES) {
        append_strided<SCORES>(c, row, base + threadIdx.x, row.end, below);
    }
}
DEVICE void stream(Collection& c, Ring& ring, const Row& row, const Share& share, float bound) {
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32 && (row.start % 4 || row.end % 4)) {
        const int at = lane < 4 ? row.start + lane : share.tail + lane - 4;
        const bool inside = lane < 4 ? at < share.head : lane < 8 && at < row.end;
        const float x[1] = {inside ? row.at(at) : 0};
        append(c, x, [&](int) { return inside && !(x[0] < bound); }, [&](int) { return at; });
    }
    int first = 4 * share.first, left = share.vectors;
#pragma unroll 1
    for (int round = 0; round < share.rounds; ++round) {
        const float4* vectors = ring.arrived();
        float x[SCORES];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const float4 v = vectors[32 * u];
            x[4 * u] = v.x;
            x[4 * u + 1] = v.y;
            x[4 * u + 2] = v.z;
            x[4 * u + 3] = v.w;
        }
        ring.next();
        auto hit = [&](int e) { return e / 4 * 32 < left && !(x[e] < bound); };
        append(c, x, hit, [&](int e) { return first + e / 4 * 128 + e % 4; });
        first += 4 * GRANULE;
        left -= GRANULE;
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

// Keep the topk largest of the collection; returns the least of them.
NOT_INLINED u64 thin(Collection& c, int topk) {
    const u64 least = least_chosen(c, topk, 0, ~0u);
    float scores[ENTRIES];
    int positions[ENTRIES];
    const u32 count = c.count;
#pragma unroll
    for (int e = 0; e < ENTRIES; ++e) {
        const u32 slot = e * THREADS + threadIdx.x;
        scores[e] = slot < count ? c.scores[slot] : 0;
        positions[e] = slot < count ? c.positions[slot] : -1;
    }
    __syncthreads();
    if (threadIdx.x == 0) c.count = 0;
    __syncthreads();
    auto kept = [&](int e) { return positions[e] >= 0 && rank_of(scores[e], positions[e]) >= least; };
    append(c, scores, kept, [&](int e) { return positions[e]; });
    __syncthreads();
    return least;
}

// In order of position, without a guess: thin the collection whenever another chunk might not fit.
NOT_INLINED void stream_exactly(Collection& c, const float* scores, i64 stride, int start, int end, int topk) {
    const Row row = {scores, stride, start, end};
    u64 least = 0;  // only larger ranks can still be among the topk
    __syncthreads();
    if (threadIdx.x == 0) c.count = 0;
    __syncthreads();
#pragma unroll 1
    for (int base = start; base < end; base += CAPACITY / 2) {
        const bool full = c.count > CAPACITY / 2;
        __syncthreads();
        if (full) least = thin(c, topk);
        append_strided<ENTRIES / 2>(c, row, base + threadIdx.x, min(end, base + CAPACITY / 2), least);
        __syncthreads();
    }
}

DEVICE void sort(u32* values, int count) {
    int size = 1;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) values[i] = ~0u;
    for (int run = 2; run <= size; run *= 2) {
        for (int distance = run / 2; distance; distance /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < size; i += THREADS) {
                const int other = i ^ distance;
                const u32 a = values[i], b = values[other];
                if (other > i && (a > b) == ((i & run) == 0)) {
                    values[i] = b;
                    values[other] = a;
                }
            }
        }
    }
    __syncthreads();
}

// The positions of the ranks that reach `least`; a warp's follow each other.
DEVICE void write(Collection& c, int* out, u64 least) {
    const u32 count = c.count;
    auto chosen = [&](u32 base) {
        const u32 slot = base + threadIdx.x;
        return __ballot_sync(ALL_LANES, slot < count && rank_at(c, slot) >= least);
    };
    u32 n = 0, at = 0;
    for (u32 base = 0; base < count; base += THREADS) n += __popc(chosen(base));
    if (threadIdx.x % 32 == 0) at = atomicAdd(&c.slots, n);
    at = __shfl_sync(ALL_LANES, at, 0);
    for (u32 base = 0; base < count; base += THREADS) {
        const u32 some = chosen(base);
        if (some >> threadIdx.x % 32 & 1) {
            out[at + __popc(some & lanes_below())] = c.positions[base + threadIdx.x];
        }
        at += __popc(some);
    }
}

DEVICE void sample(const Ring& ring, const Share& share, u32 (&keys)[OWN_SAMPLES]) {
    const float4* x = share.rounds ? ring.arrived() : ring.mine;
#pragma unroll
    for (int e = 0; e < OWN_SAMPLES; ++e) {
        const float score = reinterpret_cast<const float*>(x + e / 4 * 32)[e % 4];
        keys[e] = share.rounds && e / 4 * 32 < share.vectors ? key_of(score) : 0;
    }
}
// From WARPS places of the row.
DEVICE void sample(const Row& row, u32 (&keys)[OWN_SAMPLES]) {
    const i64 warp = threadIdx.x / 32, free = row.end - row.start - 32 * OWN_SAMPLES;
    const int first = row.start + static_cast<int>(free * warp / (WARPS - 1)) + threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < OWN_SAMPLES; ++e) keys[e] = key_of(row.at(first + 32 * e));
}

DEVICE void select_row(Collection& c, Ring& ring, const Row& row, int* out, int topk) {
    const int length = row.end - row.start;
    if (length <= topk) {
        for (int i = threadIdx.x; i < topk; i += THREADS) out[i] = i < length ? row.start + i : -1;
        return;
    }
    __syncthreads();  // the last row's collection is no longer read
    if (threadIdx.x == 0) c.count = c.slots = c.top = 0;
    __syncthreads();
    const Share share = share_of(row);
    u32 bound = 0;
    if (length > CAPACITY) {
        u32 keys[OWN_SAMPLES];
        if (VECTOR == 4) sample(ring, share, keys);
        else sample(row, keys);
        bound = guess_bound(c, keys, length, topk);
    }
    const float least = score_of(bound);
    if (VECTOR == 4) stream(c, ring, row, share, least);
    else stream(c, row, least);
    __syncthreads();
    // NaN keys lie above every bound that a comparison can use.
    u32 low = min(bound, key_of(least)), top = bound ? c.top : ~0u;
    if (c.count < topk || c.count > CAPACITY) {
        stream_exactly(c, row.scores, row.stride, row.start, row.end, topk);
        low = 0;
        top = ~0u;
    }
    if (SORTED) {
        if (c.count > topk) thin(c, topk);
        sort(reinterpret_cast<u32*>(c.positions), topk);
        for (int i = threadIdx.x; i < topk; i += THREADS) out[i] = c.positions[i];
    } else {
        write(c, out, least_chosen(c, topk, low, top));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) topk_selector(
    const float* scores, const START* starts, const END* ends, int* out, i64 rows, i64 length, i64 groups,
    i64 kv, i64 stride_xb, i64 stride_xs, i64 stride_xkv, i64 stride_xg, i64 stride_sb, i64 stride_ss,
    i64 stride_eb, i64 stride_es, i64 topk) {
    const Task task = {scores, starts, ends, static_cast<u32>(rows), static_cast<u32>(length),
                       static_cast<u32>(groups), kv, stride_xb, stride_xs, stride_xkv, stride_xg,
                       stride_sb, stride_ss, stride_eb, stride_es, static_cast<int>(topk)};
    Collection& c = *reinterpret_cast<Collection*>(dynamic_shared());
    for (int i = threadIdx.x; i < BINS; i += THREADS) c.bins[i] = 0;
    Ring ring(task, dynamic_shared() + (sizeof(Collection) + 15) / 16 * 16);
    for (u32 i = blockIdx.x; i < task.rows; i += gridDim.x) {
        select_row(c, ring, task.row(i), out + i * topk, task.topk);
    }
}
