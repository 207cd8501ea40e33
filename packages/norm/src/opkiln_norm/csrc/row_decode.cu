// Row norms of few rows: y[m, n] = ((x[m, n] + r[m, n]) - mean[m]) * rstd[m] * w[n] + b[n].
//
// Little but latency counts. COPIES CTAs take a row: each reads all of x and r and sums them, its
// own share first, so that none waits for another, but reads w and b and writes y and s only for its
// share. A CTA's warps meet once. Loads are all under way before the first is waited for; what does
// not need the sums is done before the barrier.
//
// Macros: those of row.cuh; CLUSTER 1, EVEN 1, WEIGHT_AT 1; COPIES, which divides VECTORS.

constexpr int OWN = VECTORS / COPIES;            // strips that a CTA writes
constexpr int HELD = VECTORS * VALUES;           // elements of a thread
constexpr int COLUMNS = HELD * THREADS;
constexpr int LINE = WARPS < 4 ? WARPS : 4;

// Over the warp, all at once.
template <int COUNT>
__device__ void warp_sums(float (&v)[COUNT]) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) {
        float other[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) other[k] = __shfl_xor_sync(~0u, v[k], lane);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) v[k] += other[k];
    }
}

// f(i), pairwise.
template <int FIRST, int COUNT, typename F>
__device__ float tree(const F& f) {
    if constexpr (COUNT == 1) return f(FIRST);
    else return tree<FIRST, COUNT / 2>(f) + tree<FIRST + COUNT / 2, COUNT - COUNT / 2>(f);
}

extern "C" __global__ void __launch_bounds__(THREADS)
row_decode(const char* x, const char* r, const char* w, const char* b, char* y, char* s,
           float* mean_out, float* rstd_out, i64 rows, i64 n, i64 x_stride, i64 r_stride,
           double eps) {
    __shared__ __align__(16) float parts[1 + CENTER][WARPS];
    const u32 copy = blockIdx.x % COPIES, row = blockIdx.x / COPIES;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto strip = [&](int i) {  // its own first
        return ((copy * OWN + i) % VECTORS) * THREADS + threadIdx.x;
    };
    x += row * x_stride * VALUE_BYTES;
    r += row * r_stride * VALUE_BYTES;
    Words<4> xs[VECTORS], rs[VECTORS];
    Weight ws[OWN], bs[OWN];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        xs[i] = load_vector(x + strip(i) * 16);
        if constexpr (HAS_RESIDUAL) rs[i] = load_vector(r + strip(i) * 16);
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if constexpr (HAS_WEIGHT) ws[i] = load_weight(w, strip(i));
        if constexpr (HAS_BIAS) bs[i] = load_weight(b, strip(i));
    }
    float v[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        v[i] = value<TYPE>(xs[i / VALUES], i % VALUES);
        if constexpr (HAS_RESIDUAL) v[i] += value<TYPE>(rs[i / VALUES], i % VALUES);
    }
    // Of the thread's elements, then of the warp's; the distances from the mean of thread 0 are at
    // most sqrt(31) deviations long, so that the plain formula loses 5 bits at worst.
    float sums[1 + CENTER], pivot = 0;
    if constexpr (CENTER) {
        const float own = tree<0, HELD>([&](int i) { return v[i]; }) * (1.f / HELD);
        const float moment = tree<0, HELD>([&](int i) { return (v[i] - own) * (v[i] - own); });
        pivot = __shfl_sync(~0u, own, 0);
        sums[0] = own - pivot;
        sums[CENTER] = moment + HELD * sums[0] * sums[0];
    } else {
        sums[0] = tree<0, HELD>([&](int i) { return v[i] * v[i]; });
    }
    warp_sums(sums);
    if (lane == 0) {
        if constexpr (CENTER) {
            parts[0][warp] = pivot + sums[0] * (1.f / 32);
            parts[CENTER][warp] = sums[CENTER] - sums[0] * sums[0] * (HELD / 32.f);
        } else {
            parts[0][warp] = sums[0];
        }
    }
    if constexpr (HAS_RESIDUAL) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            float part[VALUES];
#pragma unroll
            for (int j = 0; j < VALUES; ++j) part[j] = v[i * VALUES + j];
            store_values(s + row * n * VALUE_BYTES, strip(i), part);
        }
    }
    if constexpr (!CENTER && HAS_WEIGHT) {
#pragma unroll
        for (int i = 0; i < OWN * VALUES; ++i)
            v[i] *= value<WEIGHT_TYPE>(ws[i / VALUES], i % VALUES);
    }
    __syncthreads();
    float of[1 + CENTER][WARPS];
#pragma unroll
    for (int k = 0; k < 1 + CENTER; ++k)
#pragma unroll
        for (int i = 0; i < WARPS; i += LINE) {
            if constexpr (LINE == 4) {
                const float4 four = *(const float4*)&parts[k][i];
                of[k][i] = four.x, of[k][i + 1] = four.y, of[k][i + 2] = four.z, of[k][i + 3] = four.w;
            } else {
#pragma unroll
                for (int j = 0; j < LINE; ++j) of[k][i + j] = parts[k][i + j];
            }
        }
    float mean = 0, moment;
    if constexpr (CENTER) {
        const float first = of[0][0];
        const float off = tree<0, WARPS>([&](int i) { return of[0][i] - first; });
        moment = tree<0, WARPS>([&](int i) {
            return of[CENTER][i] + (32 * HELD) * (of[0][i] - first) * (of[0][i] - first);
        });
        mean = first + off * (1.f / WARPS);
        moment = fmaxf(moment - off * off * (32.f * HELD / WARPS), 0);
    } else {
        moment = tree<0, WARPS>([&](int i) { return of[0][i]; });
    }
    const float rstd = rsqrtf(moment * (1.f / COLUMNS) + (float)eps);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        float out[VALUES];
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            out[j] = (v[i * VALUES + j] - mean) * rstd;
            if constexpr (CENTER && HAS_WEIGHT) out[j] *= value<WEIGHT_TYPE>(ws[i], j);
            if constexpr (HAS_BIAS) out[j] += value<WEIGHT_TYPE>(bs[i], j);
        }
        store_values(y + row * n * VALUE_BYTES, strip(i), out);
    }
    if (copy == 0 && threadIdx.x == 0) {
        if (CENTER && mean_out) mean_out[row] = mean;
        if (rstd_out) rstd_out[row] = rstd;
    }
}
