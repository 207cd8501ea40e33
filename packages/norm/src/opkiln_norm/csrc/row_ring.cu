// Long row norms whose next rows are on their way while this one is reduced and written.
//
// y[m, n] = ((x[m, n] + r[m, n]) - mean[m]) * rstd[m] * w[n] + b[n]. A persistent grid of clusters; cluster c
// takes rows c, c + clusters, ... Each CTA has a ring of STAGES slices of rows in shared memory. The
// copy engine fills it, so that reads stay in flight over the sums and the writes. A slice that all
// warps have moved to registers makes room for the one STAGES rows ahead. Every row meets the same
// columns of w and b in a thread, which keeps them in registers.
//
// Macros: those of row.cuh and row_shift.cuh, and STAGES. WEIGHT_AT is 1. With SHIFT the copies
// are of whole vectors of memory, with what they hold of the rows beside; but not behind the last.

constexpr u32 SLICE = VECTORS * THREADS * 16;  // bytes
constexpr u32 PIECE = 16384;                   // bytes of one bulk copy

__device__ void copy_bulk(u32 shared, const char* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}

constexpr int INPUTS = 1 + HAS_RESIDUAL;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_ring(const char* x, const char* r, const char* w, const char* b, char* y, char* s,
         float* mean_out, float* rstd_out, i64 rows, i64 n, i64 x_stride, i64 r_stride,
         double eps) {
    extern __shared__ __align__(128) char ring[];  // [STAGES][INPUTS][SLICE]
    __shared__ Exchange exchange;
    __shared__ u64 filled[STAGES];
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const i64 step = gridDim.x / CLUSTER;
    const i64 first = (i64)rank * VECTORS * THREADS + threadIdx.x;
    const int shift = SHIFT ? (int)(blockIdx.x / CLUSTER * n % VALUES) : 0;
    const i64 left = (shift + n + VALUES - 1) / VALUES * 16 - (i64)rank * SLICE;
    const u32 bytes = EVEN || left > SLICE ? SLICE : left > 0 ? (u32)left : 0;
    const auto inside = [&](int i) {
        return EVEN || (SHIFT && i < VECTORS - 1) || (i * THREADS + threadIdx.x) * 16 < bytes;
    };
    const auto part = [&](int i) -> Part {
        if constexpr (!SHIFT) return {0, VALUES};
        const int v = (int)first + i * THREADS, end = shift + (int)n - v * VALUES;
        return {i == 0 && v == 0 ? shift : 0, i == VECTORS - 1 && end < VALUES ? end : VALUES};
    };
    // The last vector of all may reach past the tensor.
    const bool torn = SHIFT && left <= SLICE && (shift + n) % VALUES;
    const auto fetch = [&](i64 row, int stage) {
        const u32 barrier = shared_address(filled + stage);
        const u32 size = SHIFT && torn && row + 1 == rows ? bytes - 16 : bytes;
        expect(barrier, INPUTS * size);
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) {
            const char* from = k ? r + row * r_stride * VALUE_BYTES : x + row * x_stride * VALUE_BYTES;
            from += (i64)rank * SLICE - shift * VALUE_BYTES;
#pragma unroll 1
            for (u32 at = 0; at < size; at += PIECE)
                copy_bulk(shared_address(ring) + (stage * INPUTS + k) * SLICE + at, from + at,
                          size - at < PIECE ? size - at : PIECE, barrier);
        }
    };
    const auto affine_vector = [&](const char* from, int i) {
#if SHIFT
        return load_moved(from, first + i * THREADS, n, shift, part(i));
#else
        return load_weight(from, first + i * THREADS);
#endif
    };
    const auto store_row_vector = [&](char* to, i64 row, int i, const float (&values)[VALUES]) {
        to += (row * n - shift) * VALUE_BYTES;
        if (part(i).whole()) store_values(to, first + i * THREADS, values);
        else store_part(to + (first + i * THREADS) * 16, part(i), values);
    };
    i64 row = blockIdx.x / CLUSTER;
    if (threadIdx.x == 0) {
        init(exchange);
        for (int s = 0; s < STAGES; ++s) init_barrier(shared_address(filled + s));
        publish_barriers();
        for (int s = 0; s < STAGES; ++s)
            if (row + s * step < rows) fetch(row + s * step, s);
    }
    __syncwarp();
    if constexpr (CLUSTER > 1) arrive();
    Weight ws[VECTORS], bs[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (HAS_WEIGHT && inside(i)) ws[i] = affine_vector(w, i);
        if (HAS_BIAS && inside(i)) bs[i] = affine_vector(b, i);
    }
    if constexpr (CLUSTER > 1) wait();
    else __syncthreads();

    u32 sums_made = 0, parity = 0;
    int stage = 0;
    for (; row < rows; row += step) {
        wait_phase(shared_address(filled + stage), parity);
        Words<4> xs[VECTORS], rs[VECTORS];
        const auto input = [&](int i, int j) {
            const float v = value<TYPE>(xs[i], j);
            if constexpr (HAS_RESIDUAL) return v + value<TYPE>(rs[i], j);
            return v;
        };
        float sum = 0;  // of the values, or without CENTER of their squares
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const u32 from = shared_address(ring) + stage * INPUTS * SLICE +
                             (i * THREADS + threadIdx.x) * 16;
            xs[i] = rs[i] = {};
            if (inside(i)) {
                xs[i] = load_shared(from);
                if constexpr (HAS_RESIDUAL) rs[i] = load_shared(from + SLICE);
                if (SHIFT && !part(i).whole()) {
                    const i64 at = (row * n - shift) * VALUE_BYTES + (first + i * THREADS) * 16;
                    if (part(i).high < VALUES && row + 1 == rows) {
                        xs[i] = load_part(x + at, part(i));
                        if constexpr (HAS_RESIDUAL) rs[i] = load_part(r + at, part(i));
                    }
                    keep_part(xs[i], part(i));
                    if constexpr (HAS_RESIDUAL) keep_part(rs[i], part(i));
                }
                if constexpr (HAS_RESIDUAL) {
                    float sums[VALUES];
#pragma unroll
                    for (int j = 0; j < VALUES; ++j) sums[j] = input(i, j);
                    store_row_vector(s, row, i, sums);
                }
            }
#pragma unroll
            for (int j = 0; j < VALUES; ++j) {
                const float v = input(i, j);
                sum += CENTER ? v : v * v;
            }
        }
        float mean = 0, moment = cluster_sum(sum, exchange, sums_made);
        if (threadIdx.x == 0 && row + STAGES * step < rows) fetch(row + STAGES * step, stage);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
        if constexpr (CENTER) {
            mean = moment / n;
            moment = 0;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                forget(xs[i]);
                if (!inside(i)) continue;
                const bool all = !SHIFT || part(i).whole();
#pragma unroll
                for (int j = 0; j < VALUES; ++j) {
                    const float v = input(i, j) - mean;
                    if (all || part(i).has(j)) moment += v * v;
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
            if (!inside(i)) continue;
            forget(xs[i]);
            if constexpr (HAS_WEIGHT) forget(ws[i]);
            if constexpr (HAS_BIAS) forget(bs[i]);
            float out[VALUES];
            normalize(out, [&](int j) { return input(i, j); }, mean, rstd, ws[i], bs[i]);
            store_row_vector(y, row, i, out);
        }
    }
}
