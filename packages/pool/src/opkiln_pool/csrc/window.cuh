// What the CUDA kernels of maxima share: vectors, the argmax step.
//
// Macros. TYPE: 0 f16, 1 bf16, 2 f32. KEEP: whether L2 is to keep the lines of the outputs.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int BYTES = TYPE == 2 ? 4 : 2;

template <int WORDS>
struct Words {
    u32 at[WORDS];
};

template <int WORDS>
__device__ Words<WORDS> load(const char* p) {
    Words<WORDS> w;
    u32* r = w.at;
    if constexpr (WORDS == 1)
        asm("ld.global.nc.u32 %0, [%1];" : "=r"(r[0]) : "l"(p));
    else if constexpr (WORDS == 2)
        asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
    else
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
    return w;
}

__device__ u64 keeping() {
    u64 policy = 0;
    if constexpr (KEEP) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

template <int WORDS>
__device__ void store(char* p, const u32* r, u64 policy) {
    if constexpr (KEEP) {
        if constexpr (WORDS == 1)
            asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;"
                         :: "l"(p), "r"(r[0]), "l"(policy) : "memory");
        else if constexpr (WORDS == 2)
            asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;"
                         :: "l"(p), "r"(r[0]), "r"(r[1]), "l"(policy) : "memory");
        else
            asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                         :: "l"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(policy)
                         : "memory");
    } else {
        if constexpr (WORDS == 1)
            *(u32*)p = r[0];
        else if constexpr (WORDS == 2)
            *(uint2*)p = make_uint2(r[0], r[1]);
        else
            *(uint4*)p = make_uint4(r[0], r[1], r[2], r[3]);
    }
}

// Half of a word, or all of it, as f32.
__device__ float widen(u32 word, int odd) {
    if constexpr (TYPE == 2) return __uint_as_float(word);
    if constexpr (TYPE == 1) return __uint_as_float(odd ? word & 0xffff0000u : word << 16);
    float wide;
    u16 half = odd ? word >> 16 : word & 0xffff;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    return wide;
}

// Two values as one word; exact, as they came from 16 bits.
__device__ u32 pack(float low, float high) {
    u32 word;
    if constexpr (TYPE == 1)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The first of equal values wins, of several NaN the last.
__device__ void follow(float& best, u32& best_at, float value, u32 at) {
    bool wins = value > best || value != value;
    best = wins ? value : best;
    best_at = wins ? at : best_at;
}
