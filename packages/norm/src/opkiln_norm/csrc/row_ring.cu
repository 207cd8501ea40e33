// Long row norms whose next rows are on their way while this one is reduced and written.
//
// y[m, n] = (x[m, n] - mean[m]) * rstd[m] * w[n] + b[n]. A persistent grid of clusters; cluster c
// takes rows c, c + clusters, ... Each CTA has a ring of STAGES slices of rows in shared memory. The
// copy engine fills it, so that reads stay in flight over the sums and the writes. A slice that all
// warps have moved to registers makes room for the one STAGES rows ahead. Every row meets the same
// columns of w and b in a thread, which keeps them in registers.
//
// Macros: those of row.cuh, and STAGES. HAS_RESIDUAL is 0 and WEIGHT_AT 1.

constexpr u32 SLICE = VECTORS * THREADS * 16;  // bytes
constexpr u32 PIECE = 16384;                   // bytes of one bulk copy

__device__ void copy_bulk(u32 shared, const char* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :: "r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_ring(const char* x, const char*, const char* w, const char* b, char* y, char*, float* mean_out,
         float* rstd_out, i64 rows, i64 n, i64 x_stride, i64, double eps) {
    extern __shared__ __align__(128) char ring[];  // [STAGES][SLICE]
    __shared__ Exchange exchange;
    __shared__ u64 filled[STAGES];
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const i64 step = gridDim.x / CLUSTER;
    const i64 first = (i64)rank * VECTORS * THREADS + threadIdx.x;
    const i64 left = n * VALUE_BYTES - (i64)rank * SLICE;
    const u32 bytes = EVEN || left > SLICE ? SLICE : left > 0 ? (u32)left : 0;
    const auto inside = [&](int i) { return EVEN || (i * THREADS + threadIdx.x) * 16 < bytes; };
    const auto fetch = [&](i64 row, int stage) {
        const u32 barrier = shared_address(filled + stage);
        const char* from = x + row * x_stride * VALUE_BYTES + (i64)rank * SLICE;
        expect(barrier, bytes);
#pragma unroll 1
        for (u32 at = 0; at < bytes; at += PIECE)
            copy_bulk(shared_address(ring) + stage * SLICE + at, from + at,
                      bytes - at < PIECE ? bytes - at : PIECE, barrier);
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
        if (HAS_WEIGHT && inside(i)) ws[i] = load_weight(w, first + i * THREADS);
        if (HAS_BIAS && inside(i)) bs[i] = load_weight(b, first + i * THREADS);
    }
    if constexpr (CLUSTER > 1) wait();
    else __syncthreads();

    u32 sums_made = 0, parity = 0;
    int stage = 0;
    for (; row < rows; row += step) {
        wait_phase(shared_address(filled + stage), parity);
        Words<4> xs[VECTORS];
        float sum = 0;  // of the values, or without CENTER of their squares
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            xs[i] = {};
            if (inside(i))
                xs[i] = load_shared(shared_address(ring) + stage * SLICE +
                                    (i * THREADS + threadIdx.x) * 16);
#pragma unroll
            for (int j = 0; j < VALUES; ++j) {
                const float v = value<TYPE>(xs[i], j);
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
#pragma unroll
                for (int j = 0; j < VALUES; ++j) {
                    const float v = value<TYPE>(xs[i], j) - mean;
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
            if (!inside(i)) continue;
            forget(xs[i]);
            if constexpr (HAS_WEIGHT) forget(ws[i]);
            if constexpr (HAS_BIAS) forget(bs[i]);
            float out[VALUES];
            normalize(out, [&](int j) { return value<TYPE>(xs[i], j); }, mean, rstd, ws[i], bs[i]);
            store_values(y + row * n * VALUE_BYTES, first + i * THREADS, out);
        }
    }
}
