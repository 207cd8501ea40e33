// What the CUDA kernels of maxima share: loads and stores with hints, the argmax step.
//
// Macros. TYPE: 0 f16, 1 bf16, 2 f32. LOAD, STORE: hints, 0 none, see below.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int BYTES = TYPE == 2 ? 4 : 2;

__device__ u64 policy(int kind) {
    u64 p = 0;
    if (kind == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    if (kind == 2) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    if (kind == 3) asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(p));
    return p;
}

template <int WORDS>
struct Words {
    u32 at[WORDS];
};

// LOAD: 0 plain, 1 to 3 a policy of L2, 4 not kept in L1, 5 to 7 both.
template <int WORDS>
__device__ Words<WORDS> load(const char* p, u64 hint) {
    Words<WORDS> w;
    u32* r = w.at;
#define TO2 "=r"(r[0]), "=r"(r[1])
#define TO4 TO2, "=r"(r[2]), "=r"(r[3])
    if constexpr (WORDS == 1) {
        if constexpr (LOAD == 0)
            asm("ld.global.nc.u32 %0, [%1];" : "=r"(r[0]) : "l"(p));
        else
            asm("ld.global.nc.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(r[0]) : "l"(p), "l"(hint));
    } else if constexpr (WORDS == 2) {
        if constexpr (LOAD == 0)
            asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : TO2 : "l"(p));
        else if constexpr (LOAD < 4)
            asm("ld.global.nc.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                : TO2 : "l"(p), "l"(hint));
        else if constexpr (LOAD == 4)
            asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : TO2 : "l"(p));
        else
            asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                : TO2 : "l"(p), "l"(hint));
    } else {
        if constexpr (LOAD == 0)
            asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : TO4 : "l"(p));
        else if constexpr (LOAD < 4)
            asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                : TO4 : "l"(p), "l"(hint));
        else if constexpr (LOAD == 4)
            asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : TO4 : "l"(p));
        else
            asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                : TO4 : "l"(p), "l"(hint));
    }
    return w;
}

// STORE: 0 plain, 1 to 3 a policy of L2, 4 .cs.
template <int WORDS>
__device__ void store(char* p, const u32* r, u64 hint) {
    if constexpr (WORDS == 1) {
        if constexpr (STORE == 0)
            asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(r[0]) : "memory");
        else if constexpr (STORE == 4)
            asm volatile("st.global.cs.u32 [%0], %1;" :: "l"(p), "r"(r[0]) : "memory");
        else
            asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;"
                         :: "l"(p), "r"(r[0]), "l"(hint) : "memory");
    } else if constexpr (WORDS == 2) {
        if constexpr (STORE == 0)
            asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                         :: "l"(p), "r"(r[0]), "r"(r[1]) : "memory");
        else if constexpr (STORE == 4)
            asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};"
                         :: "l"(p), "r"(r[0]), "r"(r[1]) : "memory");
        else
            asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;"
                         :: "l"(p), "r"(r[0]), "r"(r[1]), "l"(hint) : "memory");
    } else {
        if constexpr (STORE == 0)
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                         :: "l"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
        else if constexpr (STORE == 4)
            asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                         :: "l"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
        else
            asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                         :: "l"(p), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(hint)
                         : "memory");
    }
}

// Element I of a row of words, as f32.
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
