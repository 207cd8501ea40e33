// Maxima, with indices where INDEX, of KD x 3 x 3 windows, stride 2 (of depth too where KD is 3),
// padding 1, of 16-bit values whose rows are up to 16 vectors of 16 bytes.
//
// x [planes, SD, SH, SW], out and index [planes, OD, OH, OW]. 16 lanes compute a row of outputs, 4
// each, and hold of every row under it 8 columns each. Rows are reduced before columns are; the
// column before a lane's comes by a shuffle. A CTA's outputs lie together in memory and leave
// through shared memory, aligned.

constexpr int GROUPS = THREADS / 16;
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

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
rows_kernel(const char* __restrict__ x, char* __restrict__ out, char* __restrict__ index,
            i64 rows) {
    constexpr int ROOM = (GROUPS * OW + 2) / 2 * 2;
    __shared__ __align__(8) u16 values[ROOM];
    __shared__ __align__(8) u32 indices[INDEX ? ROOM : 1];
    u64 policy = keeping();
    u32 lane = threadIdx.x % 16;
    u32 first = blockIdx.x * GROUPS, end_row = min(first + GROUPS, (u32)rows);
    u32 begin = first * OW, end = end_row * OW;             // of the CTA's outputs
    u32 row = min(first + threadIdx.x / 16, end_row - 1);  // no group leaves its warp early
    u32 oh = row % OH, slab = row / OH, od = slab % OD, plane = slab / OD;
    int d0 = (int)od * STRIDE_D - PAD_D, h0 = (int)oh * 2 - 1;
    const char* p = x + ((i64)plane * (SD * SH * SW) + (i64)(d0 * SH + h0) * SW) * 2 + lane * 16;

    u32 best[4], at[4];
#pragma unroll
    for (int kd = 0; kd < KD; ++kd)
#pragma unroll
        for (int kh = 0; kh < 3; ++kh) {
            int d = d0 + kd, h = h0 + kh;
            Words<4> w = {LOWEST, LOWEST, LOWEST, LOWEST};
            if ((u32)d < SD && (u32)h < SH && lane < SW / 8)
                w = load<4>(p + (kd * SH + kh) * (SW * 2));
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                // Places count from the window's first row and the row's first column, for lane 0.
                u32 place = ((kd * SH + kh) * SW + 2 * c) * 0x10001u + 0x10000u;
                if (kd + kh == 0) {
                    best[c] = w.at[c];
                    at[c] = place;
                } else if (INDEX) {
                    follow_two(best[c], at[c], w.at[c], place);
                } else {
                    best[c] = larger(best[c], w.at[c]);
                }
            }
        }

    u32 odd = begin & 1, mine = row * OW - begin + odd;  // an even output lies at an even slot
    bool here = first + threadIdx.x / 16 < end_row;
    if constexpr (INDEX) {
        int key[9];
#pragma unroll
        for (int c = 0; c < 4; ++c)
            to_keys(best[c], at[c] + lane * 0x80008u, key[2 * c + 1], key[2 * c + 2]);
        key[0] = __shfl_up_sync(0xffffffffu, key[8], 1, 16);
        if (lane == 0) key[0] = 0x80000000;
        // Where places count from, and the lane's first element over the input.
        int corner = (d0 * SH + h0) * SW;
        int inside = (max(d0, 0) * SH + max(h0, 0)) * SW + (int)lane * 8;
#pragma unroll
        for (int v = 0; v < 4; v += 2) {
            u32 value, place, ow = lane * 4 + v, slot = mine + ow;
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
        u32 before = __shfl_up_sync(0xffffffffu, best[3], 1, 16);
        if (lane == 0) before = LOWEST;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            u32 a = c ? best[c - 1] : before, b = best[c];
            u32 most = larger(larger(b, b >> 16 | b << 16), __byte_perm(a, b, 0x3232));
            u32 ow = lane * 4 + c;
            if (here && ow < OW) values[mine + ow] = most;
        }
    }
    __syncthreads();

    // Two outputs a store; the first and the last may be without their neighbour.
    u32 even = begin - odd;
    for (u32 s = threadIdx.x * 2; even + s < end; s += THREADS * 2) {
        u32 f = even + s;
        if (f >= begin && f + 1 < end) {
            store<1>(out + (u64)f * 2, (const u32*)(values + s), policy);
            if constexpr (INDEX) {
                uint2 found = *(const uint2*)(indices + s);
                u32 two[4] = {found.x, 0, found.y, 0};
                store<4>(index + (u64)f * 8, two, policy);
            }
        } else {
            u32 g = f < begin ? 1 : 0;
            ((u16*)out)[f + g] = values[s + g];
            if constexpr (INDEX) ((i64*)index)[f + g] = indices[s + g];
        }
    }
}
