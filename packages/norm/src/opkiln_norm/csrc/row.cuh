// What the row norm kernels in CUDA C++ share: packed values, 16-byte accesses, sums over a
// cluster. It stands before one of row_*.cu in one translation unit.
//
// Macros of all. TYPE, WEIGHT_TYPE: 0 f16, 1 bf16, 2 f32, of x, r, y, s and of w, b. CLUSTER: CTAs
// a row. THREADS: a CTA's. VECTORS: 16-byte vectors of x a thread. RESIDENT: CTAs an SM, for the
// register limit. EVEN: the vectors cover the row exactly. CENTER: subtract the mean. HAS_RESIDUAL,
// HAS_WEIGHT, HAS_BIAS. WEIGHT_AT: 0 read after the reduction, 1 before it into registers, 2 once
// into shared memory. STREAM: y is stored as data not read again.
//
// One CTA's slice of a row is contiguous: VECTORS strips of THREADS vectors.

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int F32 = 2;
constexpr int WARPS = THREADS / 32;
constexpr int PARTIALS = WARPS * CLUSTER;
constexpr int VALUES = TYPE == F32 ? 4 : 8;                                   // in a vector of x
constexpr int WEIGHT_WORDS = VALUES / (WEIGHT_TYPE == F32 ? 1 : 2);           // 32-bit, beside it
constexpr int VALUE_BYTES = TYPE == F32 ? 4 : 2;
constexpr int WEIGHT_BYTES = WEIGHT_TYPE == F32 ? 4 : 2;

template <int WORDS>
struct Words {
    u32 at[WORDS];
};

// Element i of packed words, as f32.
template <int KIND, int WORDS>
__device__ float value(const Words<WORDS>& words, int i) {
    if constexpr (KIND == F32) return __uint_as_float(words.at[i]);
    const u32 word = words.at[i / 2];
    if constexpr (KIND == 1) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)(i % 2 ? word >> 16 : word)));
    return wide;
}

__device__ u32 pack(float low, float high) {
    u32 word;
    if constexpr (TYPE == 1)
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

__device__ Words<4> load_shared(u32 address) {
    Words<4> w;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.at[0]), "=r"(w.at[1]), "=r"(w.at[2]), "=r"(w.at[3])
                 : "r"(address) : "memory");
    return w;
}

__device__ void store_vector(char* p, const Words<4>& w) {
    if constexpr (STREAM)
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]), "r"(w.at[3]));
    else
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(p), "r"(w.at[0]), "r"(w.at[1]), "r"(w.at[2]), "r"(w.at[3]));
}

using Weight = Words<WEIGHT_WORDS>;

__device__ Weight load_weight(const char* base, i64 vector) {
    const char* p = base + vector * VALUES * WEIGHT_BYTES;
    Weight w;
    if constexpr (WEIGHT_WORDS == 2) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w.at[0]), "=r"(w.at[1]) : "l"(p));
    } else {
#pragma unroll
        for (int i = 0; i < WEIGHT_WORDS; i += 4)
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w.at[i]), "=r"(w.at[i + 1]), "=r"(w.at[i + 2]), "=r"(w.at[i + 3])
                         : "l"(p + 4 * i));
    }
    return w;
}

__device__ Words<4> pack_values(const float (&values)[VALUES]) {
    Words<4> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (TYPE == F32) out.at[i] = __float_as_uint(values[i]);
        else out.at[i] = pack(values[2 * i], values[2 * i + 1]);
    }
    return out;
}

__device__ void store_values(char* base, i64 vector, const float (&values)[VALUES]) {
    store_vector(base + vector * 16, pack_values(values));
}

// The compiler may not remember what it converted the words to: they stay packed.
template <int WORDS>
__device__ void forget(Words<WORDS>& words) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) asm volatile("" : "+r"(words.at[i]));
}

__device__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ u32 address_in(u32 shared, u32 rank) {  // the same variable of another CTA of the cluster
    u32 theirs;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared), "r"(rank));
    return theirs;
}

__device__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ void init_barrier(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
}

// After init_barrier, before the other threads, CTAs or the copy engine use what it made.
__device__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Opens a phase of the barrier, which ends when so many bytes have arrived.
__device__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ void wait_phase(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

__device__ float warp_sum(float v) {
#pragma unroll
    for (int lane = 16; lane; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
    return v;
}

// Partial sums of every warp of the cluster, for two sums in turn.
struct Exchange {
    float slots[2][PARTIALS];
    u64 arrived[2];
};

__device__ void init(Exchange& e) {
    if constexpr (CLUSTER > 1) {
        init_barrier(shared_address(&e.arrived[0]));
        init_barrier(shared_address(&e.arrived[1]));
    }
}

// Sum over the cluster, the same bits in every thread: partials go from every warp to every CTA,
// then each warp adds all of them in one order. `use` counts the sums. When one is complete, all
// warps have read the slots of the one before, which the next overwrites. Not by the cluster's
// barrier: its release would wait until the stores of y are done.
__device__ float cluster_sum(float v, Exchange& e, u32& use) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, turn = use % 2;
    float* slots = e.slots[turn];
    v = warp_sum(v);
    if constexpr (CLUSTER == 1) {
        if (lane == 0) slots[warp] = v;
        __syncthreads();
    } else {
        const u32 arrived = shared_address(&e.arrived[turn]);
        if (threadIdx.x == 0) expect(arrived, PARTIALS * 4);
        if (lane < CLUSTER)
            asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                         :: "r"(address_in(
                                shared_address(slots + cluster_rank() * WARPS + warp), lane)),
                         "r"(__float_as_uint(v)), "r"(address_in(arrived, lane)) : "memory");
        wait_phase(arrived, use / 2 % 2);
    }
    ++use;
    float total = 0;
#pragma unroll
    for (int i = 0; i < PARTIALS; i += 32)
        if (PARTIALS % 32 == 0 || i + lane < PARTIALS) total += slots[i + lane];
    return warp_sum(total);
}

// Vector `i` of a thread's outputs: (x - mean) * rstd * w + b.
template <typename Input>
__device__ void normalize(float (&out)[VALUES], const Input& x, float mean, float rstd,
                          const Weight& w, const Weight& b) {
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        out[j] = (x(j) - mean) * rstd;
        if constexpr (HAS_WEIGHT) out[j] *= value<WEIGHT_TYPE>(w, j);
        if constexpr (HAS_BIAS) out[j] += value<WEIGHT_TYPE>(b, j);
    }
}
