// Maxima and indices of windows of 3 at stride 3, of 16-bit values.
//
// x [rows, SW], out and index [rows, OW], SW a multiple of 8 and not of 3, rows * OW even. A thread
// computes two outputs that lie together in memory, maybe of two rows: rows of an odd number of
// outputs are stored by aligned words and 16 bytes of indices too. Their windows lie in four
// aligned words, which a row with an odd number is shifted in by half a word.

__device__ u32 start_of(u32 output) { return output / OW * SW + output % OW * 3; }

extern "C" __global__ void __launch_bounds__(THREADS)
flat_kernel(const char* __restrict__ x, char* __restrict__ out, char* __restrict__ index,
            i64 items) {
    u64 policy = keeping();
    u32 item = blockIdx.x * THREADS + threadIdx.x;
    if (item >= items) return;
    u32 start = start_of(item * 2), ow = item * 2 % OW, shift = start % 2 * 16;
    u32 word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) word[j] = load<1>(x + (u64)(start / 2 + j) * 4).at[0];
    u32 e01 = __funnelshift_r(word[0], word[1], shift);
    u32 e23 = __funnelshift_r(word[1], word[2], shift);
    u32 e45 = __funnelshift_r(word[2], word[3], shift);
    u32 e67 = word[3] >> shift;
    float best[2];
    u32 at[2] = {0, 0};
    best[0] = widen(e01, 0);
    follow(best[0], at[0], widen(e01, 1), 1);
    follow(best[0], at[0], widen(e23, 0), 2);
    // The next row begins after one column that no window holds.
    bool crosses = ow == OW - 1;
    u32 s01 = crosses ? e45 : __funnelshift_r(e23, e45, 16);
    u32 s2 = crosses ? e67 : e45 >> 16;
    best[1] = widen(s01, 0);
    follow(best[1], at[1], widen(s01, 1), 1);
    follow(best[1], at[1], widen(s2, 0), 2);
    u32 value = pack(best[0], best[1]);
    u32 two[4] = {at[0] + ow * 3, 0, at[1] + (crosses ? 0 : ow * 3 + 3), 0};
    store<1>(out + (u64)item * 4, &value, policy);
    store<4>(index + (u64)item * 16, two, policy);
}
