// Maxima and indices of windows of 3 at stride 3 along rows whose outputs are odd in number, 16 bits.
//
// x [rows, SW], out and index [rows, OW], SW a multiple of 8, rows * OW even. An item is two
// outputs that lie together in memory, maybe of two rows. STAGED: a CTA's input through shared
// memory by 16-byte copies, else a thread loads four words itself.

constexpr u32 PAIRS = THREADS * ITEMS;
constexpr u32 ROOM = (6 * PAIRS + (SW - 3 * OW) * (2 * PAIRS / OW + 2) + 24) / 8 * 8;

__device__ u32 start_of(u32 output) { return output / OW * SW + output % OW * 3; }

extern "C" __global__ void __launch_bounds__(THREADS)
flat_kernel(const char* __restrict__ x, char* __restrict__ out, char* __restrict__ index,
            i64 items) {
    u64 load_hint = policy<LOAD>(), store_hint = policy<STORE>();
    u32 first = blockIdx.x * PAIRS;
#if STAGED
    __shared__ __align__(16) u32 room[ROOM / 2];
    u32 last = min((u32)items, first + PAIRS) * 2 - 1;
    u32 from = start_of(first * 2) / 8, to = (start_of(last) + 2) / 8;
    for (u32 i = from + threadIdx.x; i <= to; i += THREADS) {
        u32 there = (u32)__cvta_generic_to_shared(room + (i - from) * 4);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(there), "l"(x + (u64)i * 16) : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
#endif
    u32 word[ITEMS][4];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        u32 item = first + threadIdx.x + i * THREADS;
        if (item < items) {
            u32 start = start_of(item * 2);
#pragma unroll
            for (int j = 0; j < 4; ++j)
#if STAGED
                word[i][j] = room[start / 2 + j - from * 4];
#else
                word[i][j] = load<1>(x + (u64)(start / 2 + j) * 4, load_hint).at[0];
#endif
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        u32 item = first + threadIdx.x + i * THREADS;
        if (item >= items) continue;
        u32 f = item * 2, row = f / OW, ow = f % OW;
        bool crosses = ow == OW - 1;
        u32 shift = (row * SW + ow * 3) % 2 * 16;
        u32 e01 = __funnelshift_r(word[i][0], word[i][1], shift);
        u32 e23 = __funnelshift_r(word[i][1], word[i][2], shift);
        u32 e45 = __funnelshift_r(word[i][2], word[i][3], shift);
        u32 e67 = word[i][3] >> shift;
        float best[2];
        u32 at[2] = {0, 0};
        best[0] = widen(e01, 0);
        follow(best[0], at[0], widen(e01, 1), 1);
        follow(best[0], at[0], widen(e23, 0), 2);
        u32 s01 = crosses ? e45 : __funnelshift_r(e23, e45, 16);
        u32 s2 = crosses ? e67 : e45 >> 16;
        best[1] = widen(s01, 0);
        follow(best[1], at[1], widen(s01, 1), 1);
        follow(best[1], at[1], widen(s2, 0), 2);
        u32 value = pack(best[0], best[1]);
        u32 two[4] = {at[0] + ow * 3, 0, at[1] + (crosses ? 0 : ow * 3 + 3), 0};
        store<1>(out + (u64)item * 4, &value, store_hint);
        store<4>(index + (u64)item * 16, two, store_hint);
    }
}
