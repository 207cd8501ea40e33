// Row norms whose row is spread over a cluster of CTAs and kept in registers, packed as it is in
// memory: y[m, n] = ((x[m, n] + r[m, n]) - mean[m]) * rstd[m] * w[n] + b[n]; x is read once.
//
// Decode: few rows, one or two vectors a thread, so that little more than one memory latency
// passes. Long rows: a persistent grid; a thread that has written a vector asks for the same vector
// of its next row.
//
// Macros: those of row.cuh. PREFETCH: ask for the next row while this one is written.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_cluster(const char* x, const char* r, const char* w, const char* b, char* y, char* s,
            float* mean_out, float* rstd_out, i64 rows, i64 n, i64 x_stride, i64 r_stride,
            double eps) {
    extern __shared__ char weights[];  // [VECTORS][THREADS] Weight, if WEIGHT_AT is 2
    __shared__ Exchange exchange;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const i64 row_vectors = n / VALUES;
    const i64 first = (i64)rank * VECTORS * THREADS + threadIdx.x;
    const i64 step = gridDim.x / CLUSTER;
    const auto inside = [&](int i) { return EVEN || first + i * THREADS < row_vectors; };
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) {
            init(exchange);
            publish_barriers();
        }
        __syncwarp();
        arrive();
    }

    Words<4> xs[VECTORS], rs[VECTORS];
    const auto load_row_vector = [&](i64 row, int i) {
        const i64 offset = (first + i * THREADS) * 16;
        if (inside(i)) {
            xs[i] = load_vector(x + row * x_stride * VALUE_BYTES + offset);
            if constexpr (HAS_RESIDUAL)
                rs[i] = load_vector(r + row * r_stride * VALUE_BYTES + offset);
        } else {
            xs[i] = {};
            rs[i] = {};
        }
    };
    const auto input = [&](int i, int j) {
        const float v = value<TYPE>(xs[i], j);
        if constexpr (HAS_RESIDUAL) return v + value<TYPE>(rs[i], j);
        return v;
    };
    i64 row = blockIdx.x / CLUSTER;
    if (row < rows) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) load_row_vector(row, i);
    }
    Weight ws[VECTORS], bs[VECTORS];
    if constexpr (WEIGHT_AT == 1) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (HAS_WEIGHT && inside(i)) ws[i] = load_weight(w, first + i * THREADS);
            if (HAS_BIAS && inside(i)) bs[i] = load_weight(b, first + i * THREADS);
        }
    }
    if constexpr (WEIGHT_AT == 2) {  // each thread reads back what it wrote: no barrier
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (inside(i))
                ((Weight*)weights)[i * THREADS + threadIdx.x] = load_weight(w, first + i * THREADS);
    }
    if constexpr (CLUSTER > 1) wait();  // the others run: their shared memory may be written

    u32 sums_made = 0;
    for (; row < rows; row += step) {
        if constexpr (HAS_RESIDUAL) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                if (!inside(i)) continue;
                float sums[VALUES];
#pragma unroll
                for (int j = 0; j < VALUES; ++j) sums[j] = input(i, j);
                store_values(s + row * n * VALUE_BYTES, first + i * THREADS, sums);
            }
        }
        float mean = 0;
        if constexpr (CENTER) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < VALUES; ++j) sum += input(i, j);
            mean = cluster_sum(sum, exchange, sums_made) / n;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) forget(xs[i]);
        }
        float moment = 0;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (CENTER && !inside(i)) continue;
#pragma unroll
            for (int j = 0; j < VALUES; ++j) moment += (input(i, j) - mean) * (input(i, j) - mean);
        }
        const float rstd = rsqrtf(cluster_sum(moment, exchange, sums_made) / n + (float)eps);
        if (rank == 0 && threadIdx.x == 0) {
            if (mean_out) mean_out[row] = mean;
            if (rstd_out) rstd_out[row] = rstd;
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const i64 vector = first + i * THREADS;
            forget(xs[i]);
            if (inside(i)) {
                Weight wi = {}, bi = {};
                if constexpr (HAS_WEIGHT && WEIGHT_AT == 0) wi = load_weight(w, vector);
                if constexpr (HAS_BIAS && WEIGHT_AT != 1) bi = load_weight(b, vector);
                if constexpr (HAS_WEIGHT && WEIGHT_AT == 1) wi = ws[i];
                if constexpr (HAS_BIAS && WEIGHT_AT == 1) bi = bs[i];
                if constexpr (HAS_WEIGHT && WEIGHT_AT == 2)
                    wi = ((Weight*)weights)[i * THREADS + threadIdx.x];
                float out[VALUES];
                normalize(out, [&](int j) { return input(i, j); }, mean, rstd, wi, bi);
                store_values(y + row * n * VALUE_BYTES, vector, out);
            }
            if constexpr (PREFETCH) {
                if (row + step < rows) load_row_vector(row + step, i);
            }
        }
        if constexpr (!PREFETCH) {
            if (row + step < rows) {
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) load_row_vector(row + step, i);
            }
        }
    }
}
