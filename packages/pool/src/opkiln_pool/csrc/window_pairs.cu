// Maxima and indices of windows that tile the input: KD x KH x 2, stride as large, no padding.
//
// x [planes, SD, SH, SW], out and index [planes, SD / KD, SH / KH, SW / 2], SW / 2 even. A thread
// computes two neighbours of a row of outputs: an aligned load of four elements from each row under
// them, a store of both values, and one of both indices, 16 bytes.

constexpr u32 OH = SH / KH, OD = SD / KD, PAIRS = SW / 4;  // of a row
constexpr int WORDS = BYTES, PER_WORD = 4 / BYTES;

extern "C" __global__ void __launch_bounds__(THREADS)
pairs_kernel(const char* __restrict__ x, char* __restrict__ out, char* __restrict__ index,
             i64 items) {
    u64 policy = keeping();
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    u32 pair = item % PAIRS, row = item / PAIRS;
    u32 oh = row % OH, slab = row / OH, od = slab % OD, plane = slab / OD;
    u32 corner = (od * KD * SH + oh * KH) * SW + pair * 4;  // of the first window, in its plane
    const char* p = x + ((u64)plane * (SD * SH * SW) + corner) * BYTES;
    Words<WORDS> w[KD * KH];
    if (item < items)
#pragma unroll
        for (int k = 0; k < KD * KH; ++k)
            w[k] = load<WORDS>(p + (k / KH * (SH * SW) + k % KH * SW) * BYTES);
    float best[2];
    u32 at[2] = {0, 0};
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
        for (int k = 0; k < KD * KH; ++k)
#pragma unroll
            for (int kw = 0; kw < 2; ++kw) {
                int e = 2 * v + kw;
                float value = widen(w[k].at[e / PER_WORD], e % PER_WORD);
                if (k + kw == 0)
                    best[v] = value;
                else
                    follow(best[v], at[v], value, k / KH * (SH * SW) + k % KH * SW + kw);
            }
        at[v] += corner + 2 * v;
    }
    if (item >= items) return;
    u32 value[2] = {__float_as_uint(best[0]), __float_as_uint(best[1])};
    if constexpr (BYTES == 2) value[0] = pack(best[0], best[1]);
    u32 two[4] = {at[0], 0, at[1], 0};
    store<BYTES / 2>(out + (u64)item * (2 * BYTES), value, policy);
    store<4>(index + (u64)item * 16, two, policy);
}
