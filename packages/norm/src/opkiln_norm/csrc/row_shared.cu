// Long row norms whose row lies in the shared memory and registers of one CTA, or of a cluster.
//
// y[m, n] = (x[m, n] - mean[m]) * rstd[m] * w[n] + b[n], x read once. A thread owns VECTORS vectors
// of its CTA's slice: SHARED of them come to shared memory by cp.async, the rest to registers. It
// alone reads them, so only the sums meet a barrier. An SM holds 256 KB of a row and more.
//
// Macros: those of row.cuh, and SHARED. FLIGHT: strips asked for ahead of the one that is summed.
// PREFETCH: ask for the next row's strip where this row's has been written. FIRST: x leaves L2
// first. HAS_RESIDUAL is 0 and WEIGHT_AT 0.

constexpr int KEPT = VECTORS - SHARED;
constexpr int AHEAD = THREADS * RESIDENT > 1024 ? 1 : 4;  // weights under way; 4 need 64 registers

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_shared(const char* x, const char*, const char* w, const char* b, char* y, char*,
           float* mean_out, float* rstd_out, i64 rows, i64 n, i64 x_stride, i64, double eps) {
    extern __shared__ __align__(16) char slots[];  // [SHARED][THREADS] vectors
    __shared__ Exchange exchange;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const u32 mine = shared_address(slots) + threadIdx.x * 16;
    const i64 row_vectors = n / VALUES;
    const i64 first = (i64)rank * VECTORS * THREADS + threadIdx.x;
    const i64 step = gridDim.x / CLUSTER;
    const u64 policy = first_policy();
    const auto inside = [&](int i) { return EVEN || first + i * THREADS < row_vectors; };
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) {
            init(exchange);
            publish_barriers();
        }
        __syncwarp();
        arrive();
    }
    Words<4> kept[KEPT + 1];  // and none of no elements
    const auto fetch = [&](i64 row, int i) {
        const char* from = x + row * x_stride * VALUE_BYTES + (first + i * THREADS) * 16;
        if (i >= SHARED) {
            kept[i - SHARED] = {};
            if (inside(i)) kept[i - SHARED] = load_vector(from, policy);
        } else {
            if (inside(i)) copy_async(mine + i * THREADS * 16, from, policy);
            commit_copies();
        }
    };
    const auto strip = [&](int i) -> Words<4> {
        if (i >= SHARED) return kept[i - SHARED];
        if (!inside(i)) return {};
        return load_shared(mine + i * THREADS * 16);
    };
    i64 row = blockIdx.x / CLUSTER;
    constexpr int START = PREFETCH ? VECTORS : FLIGHT;
    if (PREFETCH && row < rows) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) fetch(row, i);
    }
    if constexpr (CLUSTER > 1) wait();

    u32 sums_made = 0;
    for (; row < rows; row += step) {
        if constexpr (!PREFETCH) {
#pragma unroll
            for (int i = 0; i < START; ++i) fetch(row, i);
        }
        float sum = 0;  // of the values, or without CENTER of their squares
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            constexpr int LAST = SHARED - 1;
            if (i < SHARED) wait_copies<SHARED>(i + START > LAST ? LAST - i : START - 1);
            const Words<4> xs = strip(i);
#pragma unroll
            for (int j = 0; j < VALUES; ++j) {
                const float v = value<TYPE>(xs, j);
                sum += CENTER ? v : v * v;
            }
            if (i + START < VECTORS) fetch(row, i + START);
        }
        Weight ws[AHEAD], bs[AHEAD];
        const auto ask = [&](int i) {
            if (HAS_WEIGHT && inside(i)) ws[i % AHEAD] = load_weight(w, first + i * THREADS);
            if (HAS_BIAS && inside(i)) bs[i % AHEAD] = load_weight(b, first + i * THREADS);
        };
#pragma unroll
        for (int i = 0; i < AHEAD && i < VECTORS; ++i) ask(i);
        float mean = 0, moment = cluster_sum(sum, exchange, sums_made);
        if constexpr (CENTER) {
            mean = moment / n;
            moment = 0;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                if (!inside(i)) continue;
                if (i >= SHARED) forget(kept[i - SHARED]);
                const Words<4> xs = strip(i);
#pragma unroll
                for (int j = 0; j < VALUES; ++j) {
                    const float v = value<TYPE>(xs, j) - mean;
                    moment += v * v;
                }
            }
            moment = cluster_sum(moment, exchange, sums_made);
        }
        const float rstd = rsqrtf(moment / n + (float)eps);
        if (rank == 0 && threadIdx.x == 0) {
            if (mean_out) mean_out[row] = mean;
            if (rstd_out) rstd_out[row] = rstd;
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (i >= SHARED) forget(kept[i - SHARED]);
            if (inside(i)) {
                const Words<4> xs = strip(i);
                float out[VALUES];
                normalize(out, [&](int j) { return value<TYPE>(xs, j); }, mean, rstd,
                          ws[i % AHEAD], bs[i % AHEAD]);
                store_values(y + row * n * VALUE_BYTES, first + i * THREADS, out);
            }
            if (i + AHEAD < VECTORS) ask(i + AHEAD);
            if (PREFETCH && row + step < rows) fetch(row + step, i);
        }
    }
}
