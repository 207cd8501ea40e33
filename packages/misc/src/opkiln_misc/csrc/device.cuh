// What this family's kernels ask of the device beyond plain CUDA C++, without any header of the
// toolkit. tests/misc/cpu_device.h has the same names for a CPU, so that the very sources run there.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE __device__ __forceinline__
#define NOT_INLINED __device__ __noinline__  // a rare path, kept out of the registers of the usual one
#define ALL_LANES 0xffffffffu

DEVICE unsigned char* dynamic_shared() {
    extern __shared__ __align__(16) unsigned char memory[];
    return memory;
}

// Clusters: barrier.cluster orders the shared memory of all its CTAs, unless it is _relaxed.
DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The same place in the shared memory of another CTA of the cluster.
template <typename T>
DEVICE T* peer(T* pointer, u32 rank) {
    u64 mapped;
    asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(pointer), "r"(rank));
    return reinterpret_cast<T*>(mapped);
}

// Arrivals, of 8 bytes in shared memory: counts what others store here with store_async, once. It spares
// them the release of a cluster's barrier, a fence of the whole GPU.
DEVICE u32 in_shared(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }
DEVICE u32 in_shared_of(const void* pointer, u32 rank) {
    u32 mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(in_shared(pointer)), "r"(rank));
    return mapped;
}
// By all threads, before they arrive at the cluster's barrier; others store here once they have passed that.
DEVICE void expect_bytes(u64* arrivals, u32 bytes) {
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(arrivals)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();  // racecheck takes the two for accesses of different lanes
    if (threadIdx.x == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(arrivals)), "r"(bytes)
                     : "memory");
    __syncwarp();
}
// *to = value in CTA `rank`; T has 4, 8 or 16 bytes.
template <typename T>
DEVICE void store_async(T* to, const T& value, u32 rank, u64* arrivals) {
    const u32 at = in_shared_of(to, rank), count = in_shared_of(arrivals, rank);
    if constexpr (sizeof(T) == 4) {
        const u32 w = *reinterpret_cast<const u32*>(&value);
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at), "r"(w),
                     "r"(count) : "memory");
    } else if constexpr (sizeof(T) == 8) {
        const u64 w = *reinterpret_cast<const u64*>(&value);
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(at), "l"(w),
                     "r"(count) : "memory");
    } else {
        const u64* w = reinterpret_cast<const u64*>(&value);
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(at),
                     "l"(w[0]), "l"(w[1]), "r"(count) : "memory");
    }
}
DEVICE void wait_for_bytes(u64* arrivals) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(in_shared(arrivals)) : "memory");
    } while (!done);
}

// 16 bytes from global to shared memory, while the thread goes on; seen by it after copies_wait.
DEVICE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(in_shared(to)), "l"(from) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last OPEN groups that this thread committed have arrived.
template <int OPEN>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory"); }

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
typedef float f32;

DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
DEVICE float to_float(float x) { return x; }
DEVICE void round_to(f16& y, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
DEVICE void round_to(bf16& y, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
DEVICE void round_to(float& y, float x) { y = x; }

// COUNT elements that one instruction loads or stores.
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector { T at[COUNT]; };

DEVICE float square_root(float x) {  // within 1 unit in the last place
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal(float x) { return __fdividef(1, x); }  // within 1 unit in the last place
