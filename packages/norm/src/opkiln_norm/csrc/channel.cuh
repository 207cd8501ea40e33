// What the CUDA kernels of the channel norms share: vectors, conversions, shuffles, exchanges.
//
// Macros. TYPE, WEIGHT_TYPE, RUNNING_TYPE: 0 f16, 1 bf16, 2 f32, of x and y (and grad_out), of
// weight and bias, of the running statistics. HAS_WEIGHT, HAS_BIAS, HAS_RUNNING. STREAM: results
// are stored as data not read again.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int F32 = 2;
constexpr int VALUE_BYTES = TYPE == F32 ? 4 : 2;

template <int WORDS>
struct Words {
    u32 at[WORDS];
};

// Mean and sum of squared distances to it, of n values.
struct Moments {
    float n, mean, m2;
};

__device__ float widen(u16 half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
    return wide;
}

template <int KIND>
__device__ u32 pack(float low, float high) {
    u32 word;
    if constexpr (KIND == 1)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Volatile: loads and stores stay in the order written here.
template <int WORDS>
__device__ Words<WORDS> load_words(const char* p) {
    Words<WORDS> w;
    if constexpr (WORDS == 1)
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(w.at[0]) : "l"(p));
    else if constexpr (WORDS == 2)
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(w.at[0]), "=r"(w.at[1]) : "l"(p));
    else
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3]) : "l"(p));
    return w;
}

template <int WORDS>
__device__ void store_words(char* p, const Words<WORDS>& w) {
    if constexpr (WORDS == 1)
        asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(w.at[0]));
    else if constexpr (WORDS == 2)
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(w.at[0]), "r"(w.at[1]));
    else if constexpr (STREAM)
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]), "r"(w.at[3]));
    else
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]), "r"(w.at[3]));
}

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// To a CTA of the cluster: `value` into its copy of the shared variable at `slot`.
__device__ void send(const float* slot, u32 rank, float value) {
    u32 theirs;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(theirs) : "r"(shared_address(slot)), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(theirs), "f"(value) : "memory");
}

__device__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes from global to shared memory, past the registers; done after copies_done.
__device__ void copy_vector(u32 shared, const char* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(shared), "l"(global) : "memory");
}

__device__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ Words<4> load_shared(u32 address) {
    Words<4> w;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3])
                 : "r"(address) : "memory");
    return w;
}

// A value with its round's number, in one 64-bit word: who sees the number sees the value.
__device__ void post(u64* slot, float value, u32 tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;"
                 :: "l"(slot), "l"((u64)tag << 32 | __float_as_uint(value)) : "memory");
}

__device__ u64 look(const u64* slot) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(slot) : "memory");
    return word;
}

// Past here: no assembly.

// Element i of packed words, as f32.
template <int KIND, int WORDS>
__device__ float value(const Words<WORDS>& words, int i) {
    if constexpr (KIND == F32) return __uint_as_float(words.at[i]);
    const u32 word = words.at[i / 2];
    if constexpr (KIND == 1) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    return widen((u16)(i % 2 ? word >> 16 : word));
}

template <int WORDS>
using Values = float[WORDS * 4 / VALUE_BYTES];

template <int WORDS>
__device__ void store_values(char* p, const Values<WORDS>& values) {
    Words<WORDS> out;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        if constexpr (TYPE == F32) out.at[i] = __float_as_uint(values[i]);
        else out.at[i] = pack<TYPE>(values[2 * i], values[2 * i + 1]);
    }
    store_words(p, out);
}

template <int KIND>
__device__ float load_one(const void* p, i64 i) {
    if constexpr (KIND == F32) return ((const float*)p)[i];
    const u16 half = ((const u16*)p)[i];
    return KIND == 1 ? __uint_as_float((u32)half << 16) : widen(half);
}

template <int KIND>
__device__ void store_one(void* p, i64 i, float v) {
    if constexpr (KIND == F32) ((float*)p)[i] = v;
    else ((u16*)p)[i] = (u16)pack<KIND>(v, 0.0f);
}

__device__ float warp_sum(float v) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
    return v;
}

// A channel's affine and running statistics, loaded together.
struct Channel {
    float weight = 1, bias = 0, mean = 0, var = 0;
};

__device__ Channel load_channel(const void* w, const void* b, const void* rm, const void* rv,
                                i64 c) {
    Channel found;
    if constexpr (HAS_WEIGHT) found.weight = load_one<WEIGHT_TYPE>(w, c);
    if constexpr (HAS_BIAS) found.bias = load_one<WEIGHT_TYPE>(b, c);
    if constexpr (HAS_RUNNING) {
        found.mean = load_one<RUNNING_TYPE>(rm, c);
        found.var = load_one<RUNNING_TYPE>(rv, c);
    }
    return found;
}

__device__ void move_running(void* rm, void* rv, i64 c, const Channel& old, float mean, float var,
                             float momentum) {
    store_one<RUNNING_TYPE>(rm, c, (1 - momentum) * old.mean + momentum * mean);
    store_one<RUNNING_TYPE>(rv, c, (1 - momentum) * old.var + momentum * var);
}
