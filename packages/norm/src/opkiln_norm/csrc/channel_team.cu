// Channel norms of small sets: a team of threads holds a set in registers, packed; x is read once.
//
// x and y are contiguous [N, CHANNELS, COLS]. Instance norm: a set is one plane, found in place.
// Batch norm (POOLED): a set is a channel, one plane of each of N samples.
//
// Macros, beside those of channel.cuh. CHANNELS, COLS. VECTOR_BYTES: 16 or 8, of a load; COLS is a
// multiple. TEAM_WARPS, CLUSTER: warps of a CTA, and CTAs, that share a set. TEAMS: sets a CTA.
// VECTORS: a thread's, at most. POOLED. GIVEN: the running statistics serve, a set is a plane.
// AVERAGED: a CTA's teams are the samples of one channel, whose statistics' average the running
// statistics take. GROUPED: a CTA's teams are samples of one channel.
//
// All loads, the channel's parameters too, are under way before the first value is used. Sums are
// made in VALUES chains: one chain of 32 additions takes 0.07 us, and nothing else fills the time.

constexpr int WORDS = VECTOR_BYTES / 4;
constexpr int VALUES = VECTOR_BYTES / VALUE_BYTES;
constexpr int TEAM_THREADS = 32 * TEAM_WARPS;
constexpr int THREADS = TEAM_THREADS * TEAMS;
constexpr u32 ALL = TEAM_THREADS * CLUSTER;  // threads of a set
constexpr int PARTIALS = TEAM_WARPS * CLUSTER;
constexpr u32 PLANE_VECTORS = COLS / VALUES;
constexpr i64 PLANE_BYTES = (i64)COLS * VALUE_BYTES;
constexpr bool ALWAYS = TEAMS == 1 && !AVERAGED;  // every thread has a set
constexpr bool EQUAL = ALWAYS && !POOLED && PLANE_VECTORS % ALL == 0;

// Which set a thread works on, and where its vectors lie.
struct Place {
    u32 team, thread;  // thread: within the set
    u32 set, channel;
    u32 vectors;  // of the set; 0: none

    __device__ Place(u32 sets, u32 samples) {
        team = TEAMS == 1 ? 0 : threadIdx.x / TEAM_THREADS;
        thread = threadIdx.x - team * TEAM_THREADS;
        if constexpr (CLUSTER > 1) thread += cluster_rank() * TEAM_THREADS;
        set = GROUPED ? (blockIdx.x / CHANNELS * TEAMS + team) * CHANNELS + blockIdx.x % CHANNELS
                      : blockIdx.x / CLUSTER * TEAMS + team;
        const bool some = ALWAYS || set < sets;
        vectors = some ? PLANE_VECTORS * (POOLED ? samples : 1) : 0;
        channel = !some ? 0 : POOLED ? set : set % CHANNELS;
    }
    __device__ bool inside(int i) const {
        return (ALWAYS && !POOLED && (i + 1) * ALL <= PLANE_VECTORS) || i * ALL + thread < vectors;
    }
    // Of vector i; from a thread's first to its others it is a constant where planes allow.
    __device__ i64 offset(int i) const {
        constexpr u32 PLANES = ALL / PLANE_VECTORS;  // at once
        constexpr i64 PITCH = CHANNELS * PLANE_BYTES;
        const i64 start = set * PLANE_BYTES;
        if constexpr (!POOLED || PLANE_VECTORS % ALL == 0) {
            const u32 v = i * ALL, plane = POOLED ? v / PLANE_VECTORS : 0;
            return start + thread * VECTOR_BYTES + plane * PITCH +
                   (i64)(v - plane * PLANE_VECTORS) * VECTOR_BYTES;
        } else if constexpr (ALL % PLANE_VECTORS == 0) {
            return start + thread / PLANE_VECTORS * PITCH +
                   thread % PLANE_VECTORS * VECTOR_BYTES + i * PLANES * PITCH;
        } else {
            const u32 v = i * ALL + thread;
            return start + v / PLANE_VECTORS * PITCH + v % PLANE_VECTORS * VECTOR_BYTES;
        }
    }
    __device__ bool leader() const { return (ALWAYS || vectors) && thread == 0; }
};

__device__ void load_set(const Place& at, const char* x, Words<WORDS> (&xs)[VECTORS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        xs[i] = {};
        if (at.inside(i)) xs[i] = load_in_order<WORDS>(x + at.offset(i));
    }
}

// `mine` of each warp to all warps of the set, which find the set's PARTIALS at what is returned.
__device__ const float4* exchange(const Place& at, float4 mine) {
    __shared__ float4 slots[TEAMS * PARTIALS];
    const u32 lane = threadIdx.x % 32;
    float4* own = slots + at.team * PARTIALS + at.thread / 32;
    if constexpr (CLUSTER == 1) {
        if (lane == 0) *own = mine;
        named_barrier(at.team + 1, TEAM_THREADS);
    } else {
        cluster_wait();  // the others run: their shared memory may be written
        if (lane < CLUSTER) {
            send(&own->x, lane, mine.x);
            send(&own->y, lane, mine.y);
            send(&own->z, lane, mine.z);
        }
        cluster_arrive();
        cluster_wait();
    }
    return slots + at.team * PARTIALS;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_team_forward(const char* x, void* rm, void* rv, const void* w, const void* b, char* y,
                     float* mean_out, float* rstd_out, i64 sets, i64 samples, i64 saved,
                     float inverse_count, float unbiased, float eps, float momentum) {
    if constexpr (CLUSTER > 1) cluster_arrive();
    const Place at(sets, samples);
    Words<WORDS> xs[VECTORS];
    const Channel own = load_channel(w, b, rm, rv, at.channel);
    load_set(at, x, xs);
    float count = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) count += at.inside(i) ? VALUES : 0;
    const float inverse = EQUAL ? 1.0f / (VECTORS * VALUES) : reciprocal(fmaxf(count, 1.0f));
    const LaneMerge<1, EQUAL> merge(count);

    float mean, rstd, var = 0;
    if constexpr (GIVEN) {
        mean = own.mean;
        rstd = rsqrtf(own.var + eps);
    } else {
        float sums[VALUES] = {}, squares[VALUES] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < VALUES; ++j) sums[j] += value<TYPE>(xs[i], j);
        const float center = add_up(sums) * inverse;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int j = 0; j < VALUES; ++j) {
                const float distance = value<TYPE>(xs[i], j) - center;
                if (at.inside(i)) squares[j] += distance * distance;
            }
        }
        Moments whole = merge(center, add_up(squares));
        if constexpr (PARTIALS > 1) {
            const float4* parts = exchange(at, {whole.n, whole.mean, whole.m2, 0});
            whole = merge_parts<PARTIALS>(parts, 1, inverse_count);
        }
        mean = whole.mean;
        rstd = rsqrtf(whole.m2 * inverse_count + eps);
        var = whole.m2 * unbiased;
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
    if (at.leader()) {
        if constexpr (HAS_RUNNING && !AVERAGED && !GIVEN)
            move_running(rm, rv, at.channel, own, mean, var, momentum);
        if (at.set < (u32)saved) {
            if (mean_out) mean_out[at.set] = mean;
            if (rstd_out) rstd_out[at.set] = rstd;
        }
    }
    if constexpr (AVERAGED) {
        __shared__ float averages[2][TEAMS];
        if (at.thread == 0) {
            averages[0][at.team] = at.vectors ? mean : 0;
            averages[1][at.team] = at.vectors ? var : 0;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            float sums[2] = {};
#pragma unroll
            for (int team = 0; team < TEAMS; ++team)
                for (int k = 0; k < 2; ++k) sums[k] += averages[k][team];
            const float share = reciprocal(samples);
            move_running(rm, rv, at.channel, own, sums[0] * share, sums[1] * share, momentum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_team_backward(const char* g, const char* x, const void* w, const float* means,
                      const float* rstds, char* d, void* gw, void* gb, i64 sets, i64 samples,
                      float inverse_count) {
    if constexpr (CLUSTER > 1) cluster_arrive();
    const Place at(sets, samples);
    Words<WORDS> gs[VECTORS], xs[VECTORS];
    const float mean = load_one<F32>(means, at.channel), rstd = load_one<F32>(rstds, at.channel);
    const float weight = HAS_WEIGHT ? load_one<WEIGHT_TYPE>(w, at.channel) : 1;
    load_set(at, x, xs);
    load_set(at, g, gs);

    float chains[2][VALUES] = {};  // of g, and of g * (x - mean)
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            chains[0][j] += value<TYPE>(gs[i], j);
            chains[1][j] += value<TYPE>(gs[i], j) * (value<TYPE>(xs[i], j) - mean);
        }
    }
    float sum_g = lane_sum<1>(add_up(chains[0])), sum_gx = lane_sum<1>(add_up(chains[1]));
    if constexpr (PARTIALS > 1) {
        const float4* parts = exchange(at, {sum_g, sum_gx, 0, 0});
        sum_g = sum_gx = 0;
#pragma unroll
        for (int p = 0; p < PARTIALS; ++p) sum_g += parts[p].x, sum_gx += parts[p].y;
    }
    const float scale = rstd * weight, shift = sum_g * inverse_count;
    const float slope = sum_gx * rstd * rstd * inverse_count;
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
    if (at.leader()) {
        if (gw) store_one<WEIGHT_TYPE>(gw, at.channel, sum_gx * rstd);
        if (gb) store_one<WEIGHT_TYPE>(gb, at.channel, sum_g);
    }
}
