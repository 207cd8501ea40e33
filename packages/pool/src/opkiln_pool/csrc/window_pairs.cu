// Maxima and indices of windows that tile the input: KD x KH x 2, stride as large, no padding.
//
// x [planes, SD, SH, SW], out and index [planes, SD / KD, SH / KH, SW / 2]. An item is V neighbours
// of a row of outputs. A thread loads all of its ITEMS before it stores any.

constexpr u32 OW = SW / 2, OH = SH / KH, OD = SD / KD, CHUNKS = OW / V;
constexpr int WORDS = 2 * V * BYTES / 4 > 4 ? 4 : 2 * V * BYTES / 4;  // of a load
constexpr int LOADS = 2 * V * BYTES / 4 / WORDS;                      // of a row
constexpr int PER_WORD = 4 / BYTES;

extern "C" __global__ void __launch_bounds__(THREADS)
pairs_kernel(const char* __restrict__ x, char* __restrict__ out, char* __restrict__ index,
             i64 items) {
    u64 load_hint = policy<LOAD>(), store_hint = policy<STORE>();
    u32 first = blockIdx.x * (THREADS * ITEMS) + threadIdx.x;
    Words<WORDS> w[ITEMS][KD * KH][LOADS];
    u32 corner[ITEMS];  // of the window of the item's first output, in its plane
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        u32 item = first + i * THREADS;
        u32 chunk = item % CHUNKS, row = item / CHUNKS;
        u32 oh = row % OH, slab = row / OH, od = slab % OD, plane = slab / OD;
        corner[i] = (od * KD * SH + oh * KH) * SW + chunk * (2 * V);
        const char* p = x + ((u64)plane * (SD * SH * SW) + corner[i]) * BYTES;
        if (item < items)
#pragma unroll
            for (int k = 0; k < KD * KH; ++k)
#pragma unroll
                for (int l = 0; l < LOADS; ++l)
                    w[i][k][l] = load<WORDS>(
                        p + (k / KH * (SH * SW) + k % KH * SW) * BYTES + l * 16, load_hint);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        u32 item = first + i * THREADS;
        float best[V];
        u32 at[V];
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
            for (int k = 0; k < KD * KH; ++k)
#pragma unroll
                for (int kw = 0; kw < 2; ++kw) {
                    int e = 2 * v + kw, word = e / PER_WORD;
                    float value = widen(w[i][k][word / WORDS].at[word % WORDS], e % PER_WORD);
                    u32 tap = k / KH * (SH * SW) + k % KH * SW + kw;
                    if (k + kw == 0) {
                        best[v] = value;
                        at[v] = 0;
                    } else {
                        follow(best[v], at[v], value, tap);
                    }
                }
            at[v] += corner[i] + 2 * v;
        }
        if (item < items) {
            u32 value[V * BYTES / 4];
            if constexpr (BYTES == 4)
#pragma unroll
                for (int v = 0; v < V; ++v) value[v] = __float_as_uint(best[v]);
            else
#pragma unroll
                for (int v = 0; v < V / 2; ++v) value[v] = pack(best[2 * v], best[2 * v + 1]);
            store<V * BYTES / 4>(out + (u64)item * (V * BYTES), value, store_hint);
#pragma unroll
            for (int v = 0; v < V / 2; ++v) {
                u32 two[4] = {at[2 * v], 0, at[2 * v + 1], 0};
                store<4>(index + (u64)item * (V * 8) + v * 16, two, store_hint);
            }
        }
    }
}
