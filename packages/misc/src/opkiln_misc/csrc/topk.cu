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
// a thread in a round; RING: rounds; SORTED: positions ascend; START, END: integer types of the windows.

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
                if (other < i) continue;  // the other's thread may be writing both
                const u32 a = values[i], b = values[other];
                if ((a > b) == ((i & run) == 0)) {
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
    const int vectors = share.rounds ? share.vectors : 0;  // without rounds, what arrived is a later row's
    const float4* x = ring.arrived();
#pragma unroll
    for (int e = 0; e < OWN_SAMPLES; ++e) {
        keys[e] = e / 4 * 32 < vectors ? key_of(reinterpret_cast<const float*>(x + e / 4 * 32)[e % 4]) : 0;
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
