// Backward of row norms: rows in a ring of shared memory, their column sums in registers.
//
// With v = x - mean and a = g * w, over N columns:
//   dx = rstd * (a - mean_n(a) - h * mean_n(a * h)) + r, h = v * rstd
//   dw = sum of g * h, db = sum of g over the CTA's rows
// Without CENTER mean and mean_n(a) are 0 and there is no db. A persistent grid: CTA c takes rows
// c, c + grid, ... The copy engine fills STAGES slots of x and g and two of r. A row's x and g move
// to registers before its sums are complete, so their slot then takes the row STAGES ahead; r is
// read last, and its slot takes the row after the next.
//
// Macros: those of row.cuh, with CLUSTER 1; STAGES; GIVEN: mean and rstd are, else rstd is taken
// from x (only without CENTER). WEIGHT_AT: 1 in registers, 2 in shared memory.

constexpr u32 SLICE = VECTORS * THREADS * 16;  // bytes
constexpr u32 PIECE = 16384;                   // bytes of one bulk copy

__device__ void copy_row(u32 shared, const char* global, u32 bytes, u32 barrier) {
#pragma unroll 1
    for (u32 at = 0; at < bytes; at += PIECE)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], %2, [%3];"
                     :: "r"(shared + at), "l"(global + at),
                        "r"(bytes - at < PIECE ? bytes - at : PIECE), "r"(barrier) : "memory");
}

// Both sums over the CTA, in every thread. The slots of `turn` are read before the next sums are
// complete, and written again only after.
__device__ float2 block_sums(float a, float b, float2* slots) {
    const u32 lane = threadIdx.x % 32;
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane == 0) slots[threadIdx.x / 32] = {a, b};
    __syncthreads();
    const float2 part = lane < WARPS ? slots[lane] : float2{0, 0};
    return {warp_sum(part.x), warp_sum(part.y)};
}

__device__ void store_sums(float* to, const float (&sums)[VALUES]) {
#pragma unroll
    for (int j = 0; j < VALUES; j += 4)
        *(float4*)(to + j) = {sums[j], sums[j + 1], sums[j + 2], sums[j + 3]};
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_backward(const char* g, const char* x, const char* r, const char* w, const float* mean_in,
             const float* rstd_in, char* dx, float* dw, float* db, i64 rows, i64 n, i64 g_stride,
             i64 x_stride, i64 r_stride, double eps) {
    extern __shared__ __align__(128) char ring[];  // [STAGES][x, g][SLICE], r [2][SLICE], weights
    __shared__ float2 slots[2][WARPS];
    __shared__ u64 filled[STAGES], r_filled[2];
    const u32 bytes = (u32)n * VALUE_BYTES;
    const u32 mine = threadIdx.x * 16;
    const u32 r_ring = shared_address(ring) + STAGES * 2 * SLICE;
    const auto inside = [&](int i) { return EVEN || i * THREADS * 16 + mine < bytes; };
    const auto fetch = [&](i64 row, int stage) {
        const u32 barrier = shared_address(filled + stage);
        const u32 slot = shared_address(ring) + stage * 2 * SLICE;
        expect(barrier, 2 * bytes);
        copy_row(slot, x + row * x_stride * VALUE_BYTES, bytes, barrier);
        copy_row(slot + SLICE, g + row * g_stride * VALUE_BYTES, bytes, barrier);
    };
    const auto fetch_r = [&](i64 row, u32 turn) {
        const u32 barrier = shared_address(r_filled + turn);
        expect(barrier, bytes);
        copy_row(r_ring + turn * SLICE, r + row * r_stride * VALUE_BYTES, bytes, barrier);
    };
    const i64 step = gridDim.x;
    i64 row = blockIdx.x;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) init_barrier(shared_address(filled + s));
        for (int s = 0; s < 2; ++s) init_barrier(shared_address(r_filled + s));
        publish_barriers();
        for (int s = 0; s < STAGES; ++s) {
            if (row + s * step < rows) fetch(row + s * step, s);
            if (HAS_RESIDUAL && s == 0) fetch_r(row, 0);
        }
    }
    __syncwarp();
    Weight ws[VECTORS];
    Weight* weights = (Weight*)(ring + (STAGES * 2 + 2 * HAS_RESIDUAL) * SLICE) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (!inside(i)) continue;
        ws[i] = load_weight(w, i * THREADS + threadIdx.x);
        if constexpr (WEIGHT_AT == 2) weights[i * THREADS] = ws[i];
    }
    float sum_w[VECTORS][VALUES] = {}, sum_b[VECTORS][VALUES] = {};
    float next_mean = GIVEN && CENTER ? mean_in[row] : 0, next_rstd = GIVEN ? rstd_in[row] : 0;
    __syncthreads();

    u32 parity = 0, turn = 0, r_parity = 0;
    int stage = 0;
    for (; row < rows; row += step) {
        const float mean = next_mean;
        float rstd = next_rstd;
        if (GIVEN && row + step < rows) {
            if constexpr (CENTER) next_mean = mean_in[row + step];
            next_rstd = rstd_in[row + step];
        }
        wait_phase(shared_address(filled + stage), parity);
        const u32 slot = shared_address(ring) + stage * 2 * SLICE + mine;
        Words<4> xs[VECTORS], gs[VECTORS];
        float sum = 0, sum_av = 0;  // of a, or without statistics of the squares
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (!inside(i)) continue;
            xs[i] = load_shared(slot + i * THREADS * 16);
            gs[i] = load_shared(slot + SLICE + i * THREADS * 16);
            const Weight weight = WEIGHT_AT == 2 ? weights[i * THREADS] : ws[i];
#pragma unroll
            for (int j = 0; j < VALUES; ++j) {
                const float v = value<TYPE>(xs[i], j) - (CENTER ? mean : 0);
                const float a = value<TYPE>(gs[i], j) * value<WEIGHT_TYPE>(weight, j);
                sum_av += a * v;
                if constexpr (CENTER) sum += a;
                else if constexpr (!GIVEN) sum += v * v;
            }
        }
        const float2 sums = block_sums(sum, sum_av, slots[turn]);
        if (threadIdx.x == 0) {
            if (row + STAGES * step < rows) fetch(row + STAGES * step, stage);
            if (HAS_RESIDUAL && row + step < rows) fetch_r(row + step, turn ^ 1);
        }
        if (!GIVEN) rstd = rsqrtf(sums.x / n + (float)eps);
        const float mean_a = CENTER ? sums.x / n : 0, mean_ah = sums.y * rstd / n;
        if constexpr (HAS_RESIDUAL) wait_phase(shared_address(r_filled + turn), r_parity);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (!inside(i)) continue;
            forget(xs[i]);
            forget(gs[i]);
            if constexpr (WEIGHT_AT == 1) forget(ws[i]);
            const Weight weight = WEIGHT_AT == 2 ? weights[i * THREADS] : ws[i];
            Words<4> rs;
            if constexpr (HAS_RESIDUAL)
                rs = load_shared(r_ring + turn * SLICE + mine + i * THREADS * 16);
            float out[VALUES];
#pragma unroll
            for (int j = 0; j < VALUES; ++j) {
                const float h = (value<TYPE>(xs[i], j) - (CENTER ? mean : 0)) * rstd;
                const float up = value<TYPE>(gs[i], j);
                out[j] = rstd * (up * value<WEIGHT_TYPE>(weight, j) - mean_a - h * mean_ah);
                if constexpr (HAS_RESIDUAL) out[j] += value<TYPE>(rs, j);
                sum_w[i][j] += up * h;
                if constexpr (CENTER) sum_b[i][j] += up;
            }
            store_values(dx + row * n * VALUE_BYTES, i * THREADS + threadIdx.x, out);
        }
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
        r_parity ^= turn;
        turn ^= 1;
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (!inside(i)) continue;
        const i64 at = blockIdx.x * n + (i64)(i * THREADS + threadIdx.x) * VALUES;
        store_sums(dw + at, sum_w[i]);
        if constexpr (CENTER) store_sums(db + at, sum_b[i]);
    }
}
