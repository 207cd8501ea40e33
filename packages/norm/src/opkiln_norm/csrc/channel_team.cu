// Channel norms of small sets: a team of threads holds a set in registers, packed; x is read once.
//
// x and y are contiguous [N, CHANNELS, COLS]. Instance norm: a set is one plane, found in place.
// Batch norm (POOLED): a set is a channel, one plane of each of N samples.
//
// Macros, beside those of channel.cuh. CHANNELS, COLS. VECTOR_BYTES: 16 or 8, of a load; COLS is a
// multiple. TEAM_WARPS, CLUSTER: warps of a CTA, and CTAs, that share a set. TEAMS: sets a CTA.
// VECTORS: a thread's, at most. POOLED. GIVEN: the running statistics serve, a set is a plane.
// AVERAGED: a CTA's teams are the samples of one channel, whose statistics' average the running
// statistics take.
//
// All loads, the channel's parameters too, are under way before the first value is used. Threads
// merge their moments by Chan's formula, whose weights need only counts, known before the values.

constexpr int WORDS = VECTOR_BYTES / 4;
constexpr int VALUES = VECTOR_BYTES / VALUE_BYTES;
constexpr int TEAM_THREADS = 32 * TEAM_WARPS;
constexpr int THREADS = TEAM_THREADS * TEAMS;
constexpr int ALL = TEAM_THREADS * CLUSTER;  // threads of a set
constexpr int PARTIALS = TEAM_WARPS * CLUSTER;
constexpr int PLANE_VECTORS = COLS / VALUES;
constexpr i64 PLANE_BYTES = (i64)COLS * VALUE_BYTES;

// Which set a thread works on, and where its vectors lie.
struct Place {
    u32 team, rank, thread;  // thread: within the set
    i64 set, channel;
    u32 vectors;  // of the set; 0: none

    __device__ Place(i64 sets, u32 samples) {
        team = threadIdx.x / TEAM_THREADS;
        rank = CLUSTER > 1 ? cluster_rank() : 0;
        thread = rank * TEAM_THREADS + threadIdx.x % TEAM_THREADS;
        set = AVERAGED ? (i64)team * CHANNELS + blockIdx.x
                       : (i64)(blockIdx.x / CLUSTER) * TEAMS + team;
        channel = POOLED ? set : AVERAGED ? blockIdx.x : (u32)set % CHANNELS;
        const bool some = AVERAGED ? team < samples : set < sets;
        vectors = some ? PLANE_VECTORS * (POOLED ? samples : 1) : 0;
        if (!some) channel = 0;
    }
    __device__ bool inside(int i) const { return i * ALL + thread < vectors; }
    __device__ i64 offset(int i) const {
        const u32 v = i * ALL + thread, plane = POOLED ? v / PLANE_VECTORS : 0;
        return set * PLANE_BYTES + plane * (CHANNELS * PLANE_BYTES) +
               (v - plane * PLANE_VECTORS) * VECTOR_BYTES;
    }
    __device__ bool leader() const { return vectors && thread == 0; }
};

__device__ void load_set(const Place& at, const char* x, Words<WORDS> (&xs)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        xs[i] = {};
        if (at.inside(i)) xs[i] = load_words<WORDS>(x + at.offset(i));
    }
}

// Give `mine` of each warp to all warps of the set; slots: [TEAMS][PARTIALS][KINDS].
template <int KINDS>
__device__ void exchange(const Place& at, const float (&mine)[KINDS], float* slots) {
    if constexpr (PARTIALS == 1) return;
    const u32 lane = threadIdx.x % 32, warp = at.thread / 32;
    float* own = slots + (at.team * PARTIALS + warp) * KINDS;
    if constexpr (CLUSTER == 1) {
        if (lane == 0) {
#pragma unroll
            for (int k = 0; k < KINDS; ++k) own[k] = mine[k];
        }
        __syncthreads();
    } else {
        cluster_wait();  // the others run: their shared memory may be written
        if (lane < CLUSTER) {
#pragma unroll
            for (int k = 0; k < KINDS; ++k) send(own + k, lane, mine[k]);
        }
        cluster_arrive();
        cluster_wait();
    }
}

// Mean and squared distances of the set, from those of each thread.
__device__ Moments merge(const Place& at, Moments mine, const float (&share)[5],
                         const float (&cross)[5], float inverse_count, float* slots) {
#pragma unroll
    for (int k = 0; k < 5; ++k) {
        const float distance = __shfl_xor_sync(~0u, mine.mean, 16 >> k) - mine.mean;
        const float other = __shfl_xor_sync(~0u, mine.m2, 16 >> k);
        mine.mean += distance * share[k];
        mine.m2 += other + distance * distance * cross[k];
    }
    if constexpr (PARTIALS == 1) return mine;
    const float sent[3] = {mine.n, mine.mean, mine.m2};
    exchange(at, sent, slots);
    const float* theirs = slots + at.team * PARTIALS * 3;
    Moments whole = {};
#pragma unroll
    for (int p = 0; p < PARTIALS; ++p) whole.mean += theirs[3 * p] * theirs[3 * p + 1];
    whole.mean *= inverse_count;
#pragma unroll
    for (int p = 0; p < PARTIALS; ++p) {
        const float distance = theirs[3 * p + 1] - whole.mean;
        whole.m2 += theirs[3 * p + 2] + theirs[3 * p] * distance * distance;
    }
    return whole;
}

extern "C" __global__ void __launch_bounds__(THREADS)
channel_team_forward(const char* x, void* rm, void* rv, const void* w, const void* b, char* y,
                     float* mean_out, float* rstd_out, i64 sets, i64 samples, i64 saved,
                     float inverse_count, float unbiased, float eps, float momentum) {
    __shared__ float slots[TEAMS * PARTIALS * 3];
    __shared__ float averages[2][TEAMS];
    if constexpr (CLUSTER > 1) cluster_arrive();
    const Place at(sets, samples);
    Words<WORDS> xs[VECTORS];
    load_set(at, x, xs);
    const Channel own = load_channel(w, b, rm, rv, at.channel);

    float mean, rstd;
    if constexpr (GIVEN) {
        mean = own.mean;
        rstd = rsqrtf(own.var + eps);
    } else {
        Moments mine = {};
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) mine.n += at.inside(i) ? VALUES : 0;
        const float inverse = mine.n > 0 ? 1 / mine.n : 0;
        float share[5], cross[5];
#pragma unroll
        for (int k = 0; k < 5; ++k) {
            const float other = __shfl_xor_sync(~0u, mine.n, 16 >> k), both = mine.n + other;
            share[k] = both > 0 ? other / both : 0;
            cross[k] = mine.n * share[k];
            mine.n = both;
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < VALUES; ++j) mine.mean += value<TYPE>(xs[i], j);
        mine.mean *= inverse;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int j = 0; j < VALUES; ++j) {
                const float distance = at.inside(i) ? value<TYPE>(xs[i], j) - mine.mean : 0;
                mine.m2 += distance * distance;
            }
        }
        const Moments whole = merge(at, mine, share, cross, inverse_count, slots);
        mean = whole.mean;
        rstd = rsqrtf(whole.m2 * inverse_count + eps);
        if constexpr (HAS_RUNNING && !AVERAGED) {
            if (at.leader())
                move_running(rm, rv, at.channel, own, mean, whole.m2 * unbiased, momentum);
        }
        if constexpr (AVERAGED) {
            if (at.thread == 0) {
                averages[0][at.team] = at.vectors ? mean : 0;
                averages[1][at.team] = at.vectors ? whole.m2 * unbiased : 0;
            }
        }
    }
    const float scale = rstd * own.weight;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        Values<WORDS> out;
#pragma unroll
        for (int j = 0; j < VALUES; ++j)
            out[j] = (value<TYPE>(xs[i], j) - mean) * scale + own.bias;
        if (at.inside(i)) store_values<WORDS>(y + at.offset(i), out);
    }
    if (at.leader() && at.set < saved) {
        if (mean_out) mean_out[at.set] = mean;
        if (rstd_out) rstd_out[at.set] = rstd;
    }
    if constexpr (AVERAGED) {
        __syncthreads();
        if (threadIdx.x == 0) {
            float sums[2] = {};
#pragma unroll
            for (int team = 0; team < TEAMS; ++team)
                for (int k = 0; k < 2; ++k) sums[k] += averages[k][team];
            move_running(rm, rv, at.channel, own, sums[0] / samples, sums[1] / samples, momentum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
channel_team_backward(const char* g, const char* x, const void* w, const float* means,
                      const float* rstds, char* d, void* gw, void* gb, i64 sets, i64 samples,
                      float inverse_count) {
    __shared__ float slots[TEAMS * PARTIALS * 2];
    if constexpr (CLUSTER > 1) cluster_arrive();
    const Place at(sets, samples);
    Words<WORDS> gs[VECTORS], xs[VECTORS];
    load_set(at, g, gs);
    load_set(at, x, xs);
    const float weight = HAS_WEIGHT ? load_one<WEIGHT_TYPE>(w, at.channel) : 1;
    const float mean = means[at.channel], rstd = rstds[at.channel];

    float sums[2] = {};  // of g, and of g * (x - mean)
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            sums[0] += value<TYPE>(gs[i], j);
            sums[1] += value<TYPE>(gs[i], j) * (value<TYPE>(xs[i], j) - mean);
        }
    }
    sums[0] = warp_sum(sums[0]);
    sums[1] = warp_sum(sums[1]);
    exchange(at, sums, slots);
    if constexpr (PARTIALS > 1) {
        const float* theirs = slots + at.team * PARTIALS * 2;
        sums[0] = sums[1] = 0;
#pragma unroll
        for (int p = 0; p < 2 * PARTIALS; ++p) sums[p % 2] += theirs[p];
    }
    const float scale = rstd * weight, shift = sums[0] * inverse_count;
    const float slope = sums[1] * rstd * rstd * inverse_count;
    if (at.leader()) {
        if (gw) store_one<WEIGHT_TYPE>(gw, at.channel, sums[1] * rstd);
        if (gb) store_one<WEIGHT_TYPE>(gb, at.channel, sums[0]);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        Values<WORDS> out;
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            const float distance = value<TYPE>(xs[i], j) - mean;
            out[j] = scale * (value<TYPE>(gs[i], j) - shift - slope * distance);
        }
        if (at.inside(i)) store_values<WORDS>(d + at.offset(i), out);
    }
}
