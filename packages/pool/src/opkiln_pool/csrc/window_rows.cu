// Maxima, with indices where INDEX, of KD x 3 x 3 windows, stride 2 (of depth too where KD is 3),
// padding 1, of 16-bit values whose rows are up to 16 vectors of 16 bytes.
//
// x [planes, SD, SH, SW], out and index [planes, OD, OH, OW]. 16 lanes hold a row of x, 8 columns
// each, and compute ROWS rows of outputs, 4 of each a lane: rows of x are loaded once for all of
// them, and the column before a lane's comes by a shuffle of the argmax over rows. A CTA's outputs
// lie together in memory and leave through shared memory, aligned.

constexpr int GROUPS = THREADS / 16;
constexpr u32 SETS = (OH + ROWS - 1) / ROWS;  // of rows of outputs in a slab
constexpr int PAD_D = KD / 2, STRIDE_D = KD == 3 ? 2 : 1;
constexpr u32 LOWEST = TYPE == 1 ? 0xff80ff80u : 0xfc00fc00u;
constexpr u32 INF = LOWEST & 0x7fff7fffu;

#if TYPE == 1
#define KIND "bf16x2"
#else
#define KIND "f16x2"
#endif

// Argmax of two columns: see reducers.FOLLOW_F16.
__device__ void follow_two(u32& best, u32& at, u32 value, u32 place) {
    asm("{ .reg .b32 least, wins;\n"
        "min." KIND " least, %0, %4;\n"
        "set.gtu.u32." KIND " wins, %2, least;\n"
        "max.NaN." KIND " %0, %0, %2;\n"
        "lop3.b32 %1, wins, %3, %1, 0xca; }"
        : "+r"(best), "+r"(at) : "r"(value), "r"(place), "r"(INF));
}

// See reducers.KEYS_F16.
__device__ void to_keys(u32 x, u32 place, int& low_key, int& high_key) {
    u32 order, low;
    constexpr u32 ONE = TYPE == 1 ? 0x3f803f80u : 0x3c003c00u;
    asm("{ .reg .b32 x, sign, nan;\n"
        "fma.rn." KIND " x, %2, %4, %5;\n"
        "prmt.b32 sign, x, 0, 0xbb99;\n"
        "lop3.b32 %0, x, sign, 0x7fff7fff, 0x78;\n"
        "set.nan.u32." KIND " nan, %2, %2;\n"
        "lop3.b32 %1, %3, nan, 0, 0xc3; }"
        : "=&r"(order), "=&r"(low) : "r"(x), "r"(place), "r"(ONE), "r"(0));
    low_key = __byte_perm(low, order, 0x5410);
    high_key = __byte_perm(low, order, 0x7632);
}

__device__ u32 larger(u32 a, u32 b) {
    u32 c;
    asm("max.NaN." KIND " %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Values and places of two keys: see reducers.from_pair_keys.
__device__ void from_keys(int low_key, int high_key, u32& value, u32& place) {
    u32 order = __byte_perm(low_key, high_key, 0x7632);
    u32 low = __byte_perm(low_key, high_key, 0x5410);
    asm("{ .reg .b32 sign, nan;\n"
        "prmt.b32 sign, %2, 0, 0xbb99;\n"
        "lop3.b32 %0, %2, sign, 0x7fff7fff, 0x78;\n"
        "set.nan.u32." KIND " nan, %0, %0;\n"
        "lop3.b32 %1, %3, nan, 0, 0xc3; }"
        : "=&r"(value), "=&r"(place) : "r"(order), "r"(low));
}

// The first output of a set, flat.
__device__ u32 begin_of(u32 set) {
    return (set / SETS * OH + set % SETS * ROWS) * OW;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
rows_kernel(const char* __restrict__ x, char* __restrict__ out, char* __restrict__ index,
            i64 sets) {
    constexpr int ROOM = (GROUPS * ROWS * OW + 2) / 2 * 2;
    __shared__ __align__(8) u16 values[ROOM];
    __shared__ __align__(8) u32 indices[INDEX ? ROOM : 1];
    u64 load_hint = policy<LOAD>(), store_hint = policy<STORE>();
    u32 lane = threadIdx.x % 16;
    u32 first = blockIdx.x * GROUPS, end_set = min(first + GROUPS, (u32)sets);
    u32 begin = begin_of(first), end = begin_of(end_set);
    u32 set = min(first + threadIdx.x / 16, end_set - 1);  // no group leaves its warp early
    u32 oh = set % SETS * ROWS, slab = set / SETS, od = slab % OD, plane = slab / OD;
    int d0 = (int)od * STRIDE_D - PAD_D, h0 = (int)oh * 2 - 1;
    const char* p = x + ((i64)plane * (SD * SH * SW) + (i64)(d0 * SH + h0) * SW) * 2 + lane * 16;

    u32 best[ROWS][4], at[ROWS][4];
#pragma unroll
    for (int kd = 0; kd < KD; ++kd)
#pragma unroll
        for (int r = 0; r < 2 * ROWS + 1; ++r) {
            int d = d0 + kd, h = h0 + r;
            Words<4> w = {LOWEST, LOWEST, LOWEST, LOWEST};
            if ((u32)d < SD && (u32)h < SH && lane < SW / 8)
                w = load<4>(p + (kd * SH + r) * (SW * 2), load_hint);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                int kh = r - 2 * i;
                if (kh < 0 || kh > 2) continue;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    u32 place = ((kd * SH + kh) * SW + 2 * c) * 0x10001u + 0x10000u;
                    if (kd + kh == 0) {
                        best[i][c] = w.at[c];
                        at[i][c] = place;
                    } else if (INDEX) {
                        follow_two(best[i][c], at[i][c], w.at[c], place);
                    } else {
                        best[i][c] = larger(best[i][c], w.at[c]);
                    }
                }
            }
        }

    u32 odd = begin & 1, mine = begin_of(set) - begin + odd;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        bool here = oh + i < OH && first + threadIdx.x / 16 < end_set;
        if constexpr (INDEX) {
            int key[9];
#pragma unroll
            for (int c = 0; c < 4; ++c)
                to_keys(best[i][c], at[i][c] + lane * 0x80008u, key[2 * c + 1], key[2 * c + 2]);
            key[0] = __shfl_up_sync(0xffffffffu, key[8], 1, 16);
            if (lane == 0) key[0] = 0x80000000;
            // Where the window's places count from, and its first element over the input.
            int corner = (d0 * SH + h0 + 2 * i) * SW;
            int inside = (max(d0, 0) * SH + max(h0 + 2 * i, 0)) * SW + (int)lane * 8;
#pragma unroll
            for (int v = 0; v < 4; v += 2) {
                u32 value, place, ow = lane * 4 + v, slot = mine + i * OW + ow;
                from_keys(max(max(key[2 * v], key[2 * v + 1]), key[2 * v + 2]),
                          max(max(key[2 * v + 2], key[2 * v + 3]), key[2 * v + 4]), value, place);
                int low = corner + (int)(place & 0xffff), high = corner + (int)(place >> 16);
                // Of a window of nothing but -inf the padding may have won.
                if ((value & 0xffff) == (LOWEST & 0xffff)) low = inside + max(2 * v - 1, -(int)lane);
                if (value >> 16 == LOWEST >> 16) high = inside + 2 * v + 1;
                if (here && ow < OW) {
                    values[slot] = value;
                    indices[slot] = low;
                }
                if (here && ow + 1 < OW) {
                    values[slot + 1] = value >> 16;
                    indices[slot + 1] = high;
                }
            }
        } else {
            u32 before = __shfl_up_sync(0xffffffffu, best[i][3], 1, 16);
            if (lane == 0) before = LOWEST;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                u32 a = c ? best[i][c - 1] : before, b = best[i][c];
                u32 m = larger(larger(b, b >> 16 | b << 16), __byte_perm(a, b, 0x3232));
                u32 ow = lane * 4 + c;
                if (here && ow < OW) values[mine + i * OW + ow] = m;
            }
        }
    }
    __syncthreads();

    // Two outputs a store; the first and the last may be without their neighbour.
    u32 even = begin - odd;
    for (u32 s = threadIdx.x * 2; even + s < end; s += THREADS * 2) {
        u32 f = even + s;
        if (f >= begin && f + 1 < end) {
            store<1>(out + (u64)f * 2, (const u32*)(values + s), store_hint);
            if constexpr (INDEX) {
                uint2 found = *(const uint2*)(indices + s);
                u32 two[4] = {found.x, 0, found.y, 0};
                store<4>(index + (u64)f * 8, two, store_hint);
            }
        } else {
            u32 g = f < begin ? 1 : 0;
            ((u16*)out)[f + g] = values[s + g];
            if constexpr (INDEX) ((i64*)index)[f + g] = indices[s + g];
        }
    }
}
