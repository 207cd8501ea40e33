// What the convolution kernels ask of the device beyond plain CUDA C++, without any header of the
// toolkit. tests/conv/cpu_mma.h has the same names for a CPU, so that the very sources run there.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE __device__ __forceinline__

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector { T at[COUNT]; };

DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
DEVICE void round_to(f16& y, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
DEVICE void round_to(bf16& y, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

// Two values, rounded, the first in the lower half.
DEVICE u32 pair_of(float low, float high, f16) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE u32 pair_of(float low, float high, bf16) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// 8 and 16 bytes to global memory in one instruction.
DEVICE void store_8(void* to, u32 low, u32 high) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" :: "l"(to), "r"(low), "r"(high) : "memory");
}
DEVICE void store_16(void* to, const u32 (&y)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(y[0]), "r"(y[1]), "r"(y[2]), "r"(y[3]) : "memory");
}

template <typename T>
DEVICE u32 bits_of(T x) { return x.bits; }

DEVICE unsigned char* dynamic_shared() {
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}
DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

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

// Copies that run on: BYTES from global memory, or zeros.
template <int BYTES>
DEVICE void copy_async(u16* to, const u16* from, bool some) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared_address(to)), "l"(from), "r"(some ? 16 : 0) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(some ? BYTES : 0)
                     : "memory");
}
DEVICE void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>  // groups that may still be under way
DEVICE void wait_groups() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

// Four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&a)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(shared_address(row)) : "memory");
}

// c += a b: 16x16 by 16x8.
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
