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

// Clusters: barrier.cluster orders the shared memory of all its CTAs.
DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The same place in the shared memory of another CTA of the cluster.
template <typename T>
DEVICE T* peer(T* pointer, u32 rank) {
    u64 mapped;
    asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(pointer), "r"(rank));
    return reinterpret_cast<T*>(mapped);
}

// Copies from global to shared memory that go on while the thread computes. Shared addresses of 32 bits.
DEVICE u32 shared_address(const void* at) { return static_cast<u32>(__cvta_generic_to_shared(at)); }
// 16 bytes; seen by this thread after copies_wait.
DEVICE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last OPEN groups that this thread committed have arrived.
template <int OPEN>
DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory"); }
// One copy of a multiple of 16 bytes; seen by all who wait for its barrier, one copy a phase.
DEVICE void barrier_init(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier) {
    const u32 at = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(bytes), "r"(at) : "memory");
}
DEVICE void barrier_wait(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
    } while (!done);
}

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

DEVICE float reciprocal(float x) { return __fdividef(1, x); }  // within 1 unit in the last place
