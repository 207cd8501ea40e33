// What the CUDA kernels of maxima share: loads and stores with hints, the argmax step.
//
// Macros. TYPE: 0 f16, 1 bf16, 2 f32. LOAD, STORE: what L2 is told about lines of x, and of the
// outputs: 0 nothing, 1 evict_first, 2 evict_last.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int BYTES = TYPE == 2 ? 4 : 2;

template <int HINT>
__device__ u64 policy() {
    u64 p = 0;
    if constexpr (HINT == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    if constexpr (HINT == 2) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    return p;
}

template <int WORDS>
struct Words {
    u32 at[WORDS];
};

template <int WORDS>
__device__ Words<WORDS> load(const char* p, u64 hint) {
    Words<WORDS> w;
    u32* r = w.at;
    if constexpr (LOAD == 0) {
        if constexpr (WORDS == 1)
            asm("ld.global.nc.u32 %0, [%1];" : "=r"(r[0]) : "l"(p));
        else if constexpr (WORDS == 2)
            asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(p));
        else
            asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p));
    } else {
        if constexpr (WORDS == 1)
            asm("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(r[0]) : "l"(p), "l"(hint));
        else if constexpr (WORDS == 2)
            asm("ld.global.nc.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                : "=r"(r[0]), "=r"(r[1]) : "l"(p), "l"(hint));
        else
            asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p), "l"(hint));
    }
    return w;
}

template <int WORDS>
__device__ void store(char* p, const u32* r, u64 hint) {
    if constexpr (STORE == 0) {
        if constexpr (WORDS == 1)
            *(u32*)p = r[0];
        else if constexpr (WORDS == 2)
            *(uint2*)p = make_uint2(r[0], r[1]);
        else
            *(uint4*)p = make_uint4(r[0], r[1], r[2], r[3]);
    } else {
        if constexpr (WORDS == 1)
            asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;"
                         :: "l"(p), "r"(r[0]), "l"(hint) : "memory");
        else if constexpr (WORDS == 2)
            asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;"
                         :: "l"(p), "r"(r[0]), "r"(r[1]), "l"(hint) : "memory");
        else
            asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                         :: "l"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(hint)
                         : "memory");
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
