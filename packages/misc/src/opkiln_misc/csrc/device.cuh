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
