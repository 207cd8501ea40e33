// Row norms whose row is spread over a cluster of CTAs and kept in registers, packed as it is in
// memory: y[m, n] = ((x[m, n] + r[m, n]) - mean[m]) * rstd[m] * w[n] + b[n]; x is read once.
//
// Decode: few rows, one or two vectors a thread, so that little more than one memory latency
// passes. Long rows (128 KB and more): a persistent grid; a thread that has written a vector asks
// for the same vector of its next row.
//
// Macros. TYPE, WEIGHT_TYPE: 0 f16, 1 bf16, 2 f32, of x, r, y, s and of w, b. CLUSTER: CTAs a row.
// THREADS: a CTA's. VECTORS: 16-byte vectors of x a thread. RESIDENT: CTAs an SM, for the register
// limit. EVEN: the vectors cover the row exactly. CENTER: subtract the mean. HAS_RESIDUAL,
// HAS_WEIGHT, HAS_BIAS. WEIGHT_AT: 0 read after the reduction, 1 before it into registers, 2 once
// into shared memory. PREFETCH: ask for the next row while this one is written. STREAM: y is
// stored as data not read again.
//
// One CTA's slice of a row is contiguous: VECTORS strips of THREADS vectors. Partial sums go from
// every warp to every CTA of the cluster, then each warp adds all of them in one order.

using u32 = unsigned int;
using i64 = long long;

constexpr int F32 = 2;
constexpr int WARPS = THREADS / 32;
constexpr int PARTIALS = WARPS * CLUSTER;
constexpr int VALUES = TYPE == F32 ? 4 : 8;                                   // in a vector of x
constexpr int WEIGHT_WORDS = VALUES / (WEIGHT_TYPE == F32 ? 1 : 2);           // 32-bit, beside it
constexpr int VALUE_BYTES = TYPE == F32 ? 4 : 2;
constexpr int WEIGHT_BYTES = WEIGHT_TYPE == F32 ? 4 : 2;

template <int WORDS>
struct Words {
    u32 at[WORDS];
};

// Element i of packed words, as f32.
template <int KIND, int WORDS>
__device__ float value(const Words<WORDS>& words, int i) {
    if constexpr (KIND == F32) return __uint_as_float(words.at[i]);
    const u32 word = words.at[i / 2];
    if constexpr (KIND == 1) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)(i % 2 ? word >> 16 : word)));
    return wide;
}

__device__ u32 pack(float low, float high) {
    u32 word;
    if constexpr (TYPE == 1)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Volatile: loads and stores stay in the order written here.
__device__ Words<4> load_vector(const char* p) {
    Words<4> w;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3]) : "l"(p));
    return w;
}

__device__ void store_vector(char* p, const Words<4>& w) {
    if constexpr (STREAM)
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]), "r"(w.at[3]));
    else
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]), "r"(w.at[3]));
}

using Weight = Words<WEIGHT_WORDS>;

__device__ Weight load_weight(const char* base, i64 vector) {
    const char* p = base + vector * VALUES * WEIGHT_BYTES;
    Weight w;
    if constexpr (WEIGHT_WORDS == 2) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w.at[0]), "=r"(w.at[1]) : "l"(p));
    } else {
#pragma unroll
        for (int i = 0; i < WEIGHT_WORDS; i += 4)
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w.at[i]), "=r"(w.at[i + 1]), "=r"(w.at[i + 2]), "=r"(w.at[i + 3])
                         : "l"(p + 4 * i));
    }
    return w;
}

__device__ void store_values(char* base, i64 vector, const float (&values)[VALUES]) {
    Words<4> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (TYPE == F32) out.at[i] = __float_as_uint(values[i]);
        else out.at[i] = pack(values[2 * i], values[2 * i + 1]);
    }
    store_vector(base + vector * 16, out);
}

// The compiler may not remember what it converted the words to: they stay packed.
__device__ void forget(Words<4>& words) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(words.at[i]));
}

__device__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ float warp_sum(float v) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
    return v;
}

// Sum over the cluster, the same bits in every thread. Two calls in a row need different `slots`:
// the barrier of the second says that all have read those of the first.
__device__ float cluster_sum(float v, float* slots) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    v = warp_sum(v);
    if constexpr (CLUSTER == 1) {
        if (lane == 0) slots[warp] = v;
        __syncthreads();
    } else {
        if (lane < CLUSTER) {
            const u32 mine = (u32)__cvta_generic_to_shared(slots + cluster_rank() * WARPS + warp);
            u32 theirs;
            asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                         : "=r"(theirs) : "r"(mine), "r"(lane));
            asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(theirs), "f"(v) : "memory");
        }
        arrive();
        wait();
    }
    float total = 0;
#pragma unroll
    for (int i = 0; i < PARTIALS; i += 32)
        if (PARTIALS % 32 == 0 || i + lane < PARTIALS) total += slots[i + lane];
    return warp_sum(total);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_cluster(const char* x, const char* r, const char* w, const char* b, char* y, char* s,
            float* mean_out, float* rstd_out, i64 rows, i64 n, i64 x_stride, i64 r_stride,
            double eps) {
    extern __shared__ char weights[];  // [VECTORS][THREADS] Weight, if WEIGHT_AT is 2
    __shared__ float slots[2][PARTIALS];
    const u32 rank = CLUSTER > 1 ? cluster_rank() : 0;
    const i64 row_vectors = n / VALUES;
    const i64 first = (i64)rank * VECTORS * THREADS + threadIdx.x;
    const i64 step = gridDim.x / CLUSTER;
    const auto inside = [&](int i) { return EVEN || first + i * THREADS < row_vectors; };
    if constexpr (CLUSTER > 1) arrive();

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

    int turn = 0;
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
            mean = cluster_sum(sum, slots[0]) / n;
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
        // Without a mean every other row has the other slots.
        turn = CENTER ? 1 : turn ^ 1;
        const float rstd = rsqrtf(cluster_sum(moment, slots[turn]) / n + (float)eps);
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
#pragma unroll
                for (int j = 0; j < VALUES; ++j) {
                    out[j] = (input(i, j) - mean) * rstd;
                    if constexpr (HAS_WEIGHT) out[j] *= value<WEIGHT_TYPE>(wi, j);
                    if constexpr (HAS_BIAS) out[j] += value<WEIGHT_TYPE>(bi, j);
                }
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
