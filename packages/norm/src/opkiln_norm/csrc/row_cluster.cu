// Row norms whose row is spread over a cluster of CTAs and kept in registers, packed as it is in
// memory: y[m, n] = ((x[m, n] + r[m, n]) - mean[m]) * rstd[m] * w[n] + b[n]; x is read once.
//
// Decode: few rows, one or two vectors a thread, so that little more than one memory latency
// passes. Long rows: a persistent grid; a thread that has written a vector asks for the same vector
// of its next row.
//
// Macros: those of row.cuh and row_shift.cuh. PREFETCH: ask for the next row while this one is
// written. Nothing outside the row is read, with SHIFT neither.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_cluster(const char* x, const char* r, const char* w, const char* b, char* y, char* s,
            float* mean_out, float* rstd_out, i64 rows, i64 n, i64 x_stride, i64 r_stride,
            double eps) {
    extern __shared__ char weights[];  // [2][VECTORS][THREADS] Weight, if WEIGHT_AT is 2: w and b
    __shared__ Exchange exchange;
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int shift = SHIFT ? (int)(blockIdx.x / CLUSTER * n % VALUES) : 0;
    const i64 row_vectors = (shift + n + VALUES - 1) / VALUES;
    const i64 first = (i64)rank * VECTORS * THREADS + threadIdx.x;
    const i64 step = gridDim.x / CLUSTER;
    const auto inside = [&](int i) {
        return EVEN || (SHIFT && i < VECTORS - 1) || first + i * THREADS < row_vectors;
    };
    const auto part = [&](int i) -> Part {
        if constexpr (!SHIFT) return {0, VALUES};
        const int v = (int)first + i * THREADS, end = shift + (int)n - v * VALUES;
        return {i == 0 && v == 0 ? shift : 0, i == VECTORS - 1 && end < VALUES ? end : VALUES};
    };
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
        const i64 offset = (first + i * THREADS) * 16 - shift * VALUE_BYTES;
        const char* of_x = x + row * x_stride * VALUE_BYTES + offset;
        const char* of_r = r + row * r_stride * VALUE_BYTES + offset;
        xs[i] = rs[i] = {};
        if (inside(i) && part(i).whole()) {
            xs[i] = load_vector(of_x);
            if constexpr (HAS_RESIDUAL) rs[i] = load_vector(of_r);
        } else if (SHIFT && inside(i)) {
            xs[i] = load_part(of_x, part(i));
            if constexpr (HAS_RESIDUAL) rs[i] = load_part(of_r, part(i));
        }
    };
    const auto store_row_vector = [&](char* to, i64 row, int i, const float (&values)[VALUES]) {
        to += (row * n - shift) * VALUE_BYTES;
        if (part(i).whole()) store_values(to, first + i * THREADS, values);
        else store_part(to + (first + i * THREADS) * 16, part(i), values);
    };
    const auto affine_vector = [&](const char* from, int i) {
#if SHIFT
        return load_moved(from, first + i * THREADS, n, shift, part(i));
#else
        return load_weight(from, first + i * THREADS);
#endif
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
            if (HAS_WEIGHT && inside(i)) ws[i] = affine_vector(w, i);
            if (HAS_BIAS && inside(i)) bs[i] = affine_vector(b, i);
        }
    }
    Weight* kept_w = (Weight*)weights + threadIdx.x;
    Weight* kept_b = kept_w + (HAS_WEIGHT ? VECTORS * THREADS : 0);
    if constexpr (WEIGHT_AT == 2) {  // each thread reads back what it wrote: no barrier
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (HAS_WEIGHT && inside(i)) kept_w[i * THREADS] = affine_vector(w, i);
            if (HAS_BIAS && inside(i)) kept_b[i * THREADS] = affine_vector(b, i);
        }
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
                store_row_vector(s, row, i, sums);
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
            const bool all = !(CENTER && SHIFT) || part(i).whole();
#pragma unroll
            for (int j = 0; j < VALUES; ++j) {
                const float v = input(i, j) - mean;
                if (all || part(i).has(j)) moment += v * v;
            }
        }
        const float rstd = rsqrtf(cluster_sum(moment, exchange, sums_made) / n + (float)eps);
        if (rank == 0 && threadIdx.x == 0) {
            if (mean_out) mean_out[row] = mean;
            if (rstd_out) rstd_out[row] = rstd;
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            forget(xs[i]);
            if (inside(i)) {
                Weight wi = {}, bi = {};
                if constexpr (HAS_WEIGHT && WEIGHT_AT == 0) wi = affine_vector(w, i);
                if constexpr (HAS_BIAS && WEIGHT_AT == 0) bi = affine_vector(b, i);
                if constexpr (HAS_WEIGHT && WEIGHT_AT == 1) wi = ws[i];
                if constexpr (HAS_BIAS && WEIGHT_AT == 1) bi = bs[i];
                if constexpr (HAS_WEIGHT && WEIGHT_AT == 2) wi = kept_w[i * THREADS];
                if constexpr (HAS_BIAS && WEIGHT_AT == 2) bi = kept_b[i * THREADS];
                float out[VALUES];
                normalize(out, [&](int j) { return input(i, j); }, mean, rstd, wi, bi);
                store_row_vector(y, row, i, out);
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
