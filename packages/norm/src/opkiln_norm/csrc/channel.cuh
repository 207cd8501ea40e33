// What the CUDA kernels of the channel norms share: vectors, conversions, shuffles, exchanges.
//
// Macros. TYPE, WEIGHT_TYPE, RUNNING_TYPE: 0 f16, 1 bf16, 2 f32, of x and y (and grad_out), of
// weight and bias, of the running statistics. HAS_WEIGHT, HAS_BIAS, HAS_RUNNING. STREAM: results
// are stored as data not read again. THROUGH_L1: a channel's parameters are loaded through L1.

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
__device__ Words<4> load_vector(const char* p) {
    Words<4> w;
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

// Loads that stay in the order written here, as ordinary ones do not: in code without branches
// ptxas moves those that are needed last, a channel's parameters, below the first use of x, and
// their latency adds to x's. So parameters come first, by these, and x after them, by these too.
template <int WORDS>
__device__ Words<WORDS> load_in_order(const char* p) {
    Words<WORDS> w;
    if constexpr (WORDS == 1)
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(w.at[0]) : "l"(p));
    else if constexpr (WORDS == 2)
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
                     : "=r"(w.at[0]), "=r"(w.at[1]) : "l"(p));
    else
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3]) : "l"(p));
    return w;
}

// One value, as f32. THROUGH_L1: the CTAs of an SM that ask for one line ask L2 for it once.
template <int KIND>
__device__ float load_one(const void* p, u32 i) {
    if constexpr (KIND == F32) {
        const float* at = (const float*)p + i;
        float found;
        if constexpr (THROUGH_L1)
            asm volatile("ld.relaxed.cta.global.f32 %0, [%1];" : "=f"(found) : "l"(at));
        else
            asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(found) : "l"(at));
        return found;
    } else {
        const u16* at = (const u16*)p + i;
        u16 half;
        if constexpr (THROUGH_L1)
            asm volatile("ld.relaxed.cta.global.u16 %0, [%1];" : "=h"(half) : "l"(at));
        else
            asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(half) : "l"(at));
        return KIND == 1 ? __uint_as_float((u32)half << 16) : widen(half);
    }
}

// To a few units in the last place, in one instruction.
__device__ float reciprocal(float v) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
    return inverse;
}

// Of some warps of a CTA; id: 1 to 15, for each set of warps its own.
__device__ void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
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
__device__ void store_one(void* p, i64 i, float v) {
    if constexpr (KIND == F32) ((float*)p)[i] = v;
    else ((u16*)p)[i] = (u16)pack<KIND>(v, 0.0f);
}

// Over the lanes that differ in the bits from LOWEST up.
template <int LOWEST>
__device__ float lane_sum(float v) {
#pragma unroll
    for (int lane = 16; lane >= LOWEST; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
    return v;
}

// Neighbouring values, in one load where they fill a word.
template <int KIND, int N>
__device__ void load_many(const void* p, u32 i, float (&found)[N]) {
    constexpr int BYTES = KIND == F32 ? 4 : 2;
    if constexpr (N == 1) {
        found[0] = load_one<KIND>(p, i);
    } else {
        const auto words = load_in_order<N * BYTES / 4>((const char*)p + (i64)i * BYTES);
#pragma unroll
        for (int j = 0; j < N; ++j) found[j] = value<KIND>(words, j);
    }
}

// A channel's affine and running statistics.
struct Channel {
    float weight = 1, bias = 0, mean = 0, var = 0;
};

// Of N neighbouring channels.
template <int N>
struct Channels {
    Channel at[N];

    __device__ Channels(const void* w, const void* b, const void* rm, const void* rv, u32 c) {
        if constexpr (HAS_RUNNING) take<RUNNING_TYPE>(&Channel::mean, rm, c);
        if constexpr (HAS_RUNNING) take<RUNNING_TYPE>(&Channel::var, rv, c);
        if constexpr (HAS_WEIGHT) take<WEIGHT_TYPE>(&Channel::weight, w, c);
        if constexpr (HAS_BIAS) take<WEIGHT_TYPE>(&Channel::bias, b, c);
    }
    template <int KIND>
    __device__ void take(float Channel::*field, const void* p, u32 c) {
        float found[N];
        load_many<KIND>(p, c, found);
#pragma unroll
        for (int j = 0; j < N; ++j) at[j].*field = found[j];
    }
};

__device__ Channel load_channel(const void* w, const void* b, const void* rm, const void* rv,
                                u32 c) {
    return Channels<1>(w, b, rm, rv, c).at[0];
}

__device__ void move_running(void* rm, void* rv, i64 c, const Channel& old, float mean, float var,
                             float momentum) {
    store_one<RUNNING_TYPE>(rm, c, (1 - momentum) * old.mean + momentum * mean);
    store_one<RUNNING_TYPE>(rv, c, (1 - momentum) * old.var + momentum * var);
}

// Chan's merge of the lanes' moments, over the lane bits from LOWEST up. Its weights need only the
// counts, so they are known before the values come. EQUAL: all lanes count alike.
template <int LOWEST, bool EQUAL>
struct LaneMerge {
    float n, share[5], cross[5];

    __device__ explicit LaneMerge(float own) {
        n = own;
#pragma unroll
        for (int k = 0; 16 >> k >= LOWEST; ++k) {
            const float other = EQUAL ? n : __shfl_xor_sync(~0u, n, 16 >> k);
            share[k] = EQUAL ? 0.5f : other * reciprocal(fmaxf(n + other, 1.0f));
            cross[k] = n * share[k];
            n += other;
        }
    }
    __device__ Moments operator()(float mean, float m2) const {
#pragma unroll
        for (int k = 0; 16 >> k >= LOWEST; ++k) {
            const float distance = __shfl_xor_sync(~0u, mean, 16 >> k) - mean;
            m2 += __shfl_xor_sync(~0u, m2, 16 >> k);
            mean += distance * share[k];
            m2 += distance * distance * cross[k];
        }
        return {n, mean, m2};
    }
};

// The whole of so many parts, `stride` apart in shared memory; w of a part is not used.
template <int PARTS>
__device__ Moments merge_parts(const float4* parts, int stride, float inverse_count) {
    Moments whole = {};
    float between = 0;
#pragma unroll 8  // 16 and more, all in registers, spill
    for (int p = 0; p < PARTS; ++p) {
        const float4 part = parts[p * stride];
        whole.mean += part.x * part.y;
        whole.m2 += part.z;
    }
    whole.mean *= inverse_count;
#pragma unroll 8
    for (int p = 0; p < PARTS; ++p) {
        const float4 part = parts[p * stride];
        const float distance = part.y - whole.mean;
        between += part.x * (distance * distance);
    }
    whole.m2 += between;
    return whole;
}

template <int N>
__device__ float add_up(const float (&parts)[N]) {
    if constexpr (N == 1) {
        return parts[0];
    } else {
        constexpr int HALF = (N + 1) / 2;
        float halves[HALF];
#pragma unroll
        for (int i = 0; i < HALF; ++i)
            halves[i] = i + HALF < N ? parts[i] + parts[i + HALF] : parts[i];
        return add_up(halves);
    }
}
