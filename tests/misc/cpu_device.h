// A CPU stands in for the GPU: every CUDA thread is a fiber (ucontext) of one operating-system thread,
// a barrier or warp collective hands over to the next fiber until all that it waits for are there.
// Same names as packages/misc/src/opkiln_misc/csrc/device.cuh and the CUDA built-ins that the kernels
// use. Include the kernel after this header, then call cpu::launch(grid, block, shared, cluster, f).

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE inline
#define NOT_INLINED inline
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __restrict__
#define __constant__ static const
#define ALL_LANES 0xffffffffu

namespace cpu {

struct Uint3 { u32 x, y, z; };

struct Barrier {  // of `size` fibers; those that have returned count as arrived
    int size = 0, arrived = 0, generation = 0;
    u64 sum = 0, result = 0;
};

struct Warp {
    u64 slot[32];
    int arrived = 0, size = 0, generation = 0, reading = 0;
};

struct Block {
    std::vector<unsigned char> shared;
    std::vector<Warp> warps;
    Barrier barrier;
    Uint3 index;
    u32 rank;
};

struct Fiber {
    ucontext_t context;
    Block* block;
    u32 thread;
    int cluster_generation = 0;
    bool done = false;
    std::unique_ptr<char[]> stack;
};

struct State {
    std::vector<Fiber> fibers;
    std::vector<Block> blocks;
    Barrier cluster;
    ucontext_t main;
    Fiber* self = nullptr;
    std::function<void()> kernel;
    Uint3 block_dim{1, 1, 1}, grid_dim{1, 1, 1};
};
inline State state;

inline void yield() { swapcontext(&state.self->context, &state.main); }

inline u64 wait(Barrier& b, u64 value = 0) {
    const int mine = b.generation;
    b.sum += value;
    if (++b.arrived == b.size) {
        b.result = b.sum;
        b.sum = b.arrived = 0;
        ++b.generation;
    }
    while (b.generation == mine) yield();
    return b.result;
}

// All lanes of the warp put a value; returns those of all, valid until the next collective.
inline void exchange(u64 value, u64 (&all)[32]) {
    Warp& w = state.self->block->warps[state.self->thread / 32];
    while (w.reading) yield();  // lanes that still read the last exchange
    w.slot[state.self->thread % 32] = value;
    const int mine = w.generation;
    if (++w.arrived == w.size) {
        w.arrived = 0;
        w.reading = w.size;
        ++w.generation;
    }
    while (w.generation == mine) yield();
    std::memcpy(all, w.slot, sizeof all);
    --w.reading;
}

inline void entry() {
    state.kernel();
    state.self->done = true;
    yield();
}

inline void run_cluster(u32 first, u32 count, u32 threads, size_t shared) {
    state.blocks = std::vector<Block>(count);
    state.fibers = std::vector<Fiber>(count * threads);
    state.cluster = Barrier{static_cast<int>(count * threads)};
    for (u32 c = 0; c < count; ++c) {
        Block& b = state.blocks[c];
        b.shared.assign(shared + 16, 0xff);  // NaN, so that memory never written shows
        b.warps.resize((threads + 31) / 32);
        for (u32 w = 0; w < b.warps.size(); ++w) b.warps[w].size = std::min(32u, threads - 32 * w);
        b.barrier.size = threads;
        const u32 at = first + c;
        const Uint3& g = state.grid_dim;
        b.index = {at % g.x, at / g.x % g.y, at / g.x / g.y};
        b.rank = c;
    }
    constexpr size_t STACK = 48 << 10;
    for (u32 i = 0; i < count * threads; ++i) {
        Fiber& f = state.fibers[i];
        f.block = &state.blocks[i / threads];
        f.thread = i % threads;
        f.stack.reset(new char[STACK]);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, entry, 0);
    }
    for (size_t left = state.fibers.size(), idle = 0; left;) {
        const size_t before = left;
        for (Fiber& f : state.fibers) {
            if (f.done) continue;
            state.self = &f;
            swapcontext(&state.main, &f.context);
            if (f.done) --left;
        }
        if (left == before && ++idle > 1000000) { std::fprintf(stderr, "deadlock\n"); std::abort(); }
        if (left != before) idle = 0;
    }
}

inline void launch(Uint3 grid, u32 threads, size_t shared, u32 cluster, std::function<void()> kernel) {
    state.kernel = std::move(kernel);
    state.block_dim = {threads, 1, 1};
    state.grid_dim = grid;
    for (u32 b = 0; b < grid.x * grid.y * grid.z; b += cluster) run_cluster(b, cluster, threads, shared);
}

template <typename T>
u64 bits(T value) {
    u64 b = 0;
    std::memcpy(&b, &value, sizeof value);
    return b;
}
template <typename T>
T value(u64 b) {
    T v;
    std::memcpy(&v, &b, sizeof v);
    return v;
}

}  // namespace cpu

#define threadIdx (cpu::Uint3{cpu::state.self->thread, 0, 0})
#define blockIdx (cpu::state.self->block->index)
#define blockDim (cpu::state.block_dim)
#define gridDim (cpu::state.grid_dim)

inline unsigned char* dynamic_shared() {
    auto at = reinterpret_cast<size_t>(cpu::state.self->block->shared.data());
    return reinterpret_cast<unsigned char*>((at + 15) / 16 * 16);
}
inline void __syncthreads() { cpu::wait(cpu::state.self->block->barrier); }
inline int __syncthreads_count(int p) { return cpu::wait(cpu::state.self->block->barrier, p != 0); }
inline int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
inline int __syncthreads_and(int p) { return __syncthreads_count(!p) == 0; }
inline void __syncwarp(u32 = ALL_LANES) { u64 all[32]; cpu::exchange(0, all); }

inline u32 cluster_rank() { return cpu::state.self->block->rank; }
inline void cluster_arrive() {
    cpu::Barrier& b = cpu::state.cluster;
    cpu::state.self->cluster_generation = b.generation;
    if (++b.arrived == b.size) { b.arrived = 0; ++b.generation; }
}
inline void cluster_wait() {
    while (cpu::state.cluster.generation == cpu::state.self->cluster_generation) cpu::yield();
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void expect_bytes(u64* arrivals, u32 bytes) {
    if (threadIdx.x == 0) *arrivals = bytes;
}
inline void wait_for_bytes(u64* arrivals) {
    while (*arrivals) cpu::yield();
}
template <typename T>
T* peer(T* pointer, u32 rank) {
    const size_t offset = reinterpret_cast<unsigned char*>(pointer) - dynamic_shared();
    auto at = reinterpret_cast<size_t>(cpu::state.blocks[rank].shared.data());
    return reinterpret_cast<T*>((at + 15) / 16 * 16 + offset);
}

template <typename T>
void store_async(T* to, const T& value, u32 rank, u64* arrivals) {
    *peer(to, rank) = value;
    *peer(arrivals, rank) -= sizeof value;
}

// Copies of a thread, by group. Bytes arrive when they are waited for: until then the place holds NaN.
struct Copy { void* to; const void* from; };
inline std::map<std::pair<cpu::Block*, u32>, std::deque<std::vector<Copy>>> copies;  // of a thread, by group

inline std::deque<std::vector<Copy>>& own_copies() {
    auto& groups = copies[{cpu::state.self->block, threadIdx.x}];
    if (groups.empty()) groups.emplace_back();  // the last is not committed
    return groups;
}
inline void copy_async(void* to, const void* from) {
    std::memset(to, 0xff, 16);
    own_copies().back().push_back({to, from});
}
inline void copies_commit() { own_copies().emplace_back(); }
template <int OPEN>
void copies_wait() {
    auto& groups = own_copies();
    for (; groups.size() > OPEN + 1; groups.pop_front()) {
        for (const Copy& c : groups.front()) std::memcpy(c.to, c.from, 16);
    }
}

template <typename T>
T __shfl_sync(u32, T v, int lane) { u64 a[32]; cpu::exchange(cpu::bits(v), a); return cpu::value<T>(a[lane & 31]); }
template <typename T>
T __shfl_xor_sync(u32 m, T v, int d) { return __shfl_sync(m, v, (threadIdx.x % 32) ^ d); }
template <typename T>
T __shfl_up_sync(u32 m, T v, int d) { const int l = threadIdx.x % 32; return __shfl_sync(m, v, l < d ? l : l - d); }
template <typename T>
T __shfl_down_sync(u32 m, T v, int d) { const int l = threadIdx.x % 32; return __shfl_sync(m, v, l + d > 31 ? l : l + d); }
inline u32 __ballot_sync(u32, int p) {
    u64 a[32];
    cpu::exchange(p != 0, a);
    u32 mask = 0;
    for (u32 i = 0; i < 32; ++i) mask |= static_cast<u32>(a[i] & 1) << i;
    return mask;
}
template <typename T, typename F>
T reduce(T v, F combine) {
    u64 a[32];
    cpu::exchange(cpu::bits(v), a);
    const int lanes = cpu::state.self->block->warps[threadIdx.x / 32].size;
    for (int i = 0; i < lanes; ++i) v = i ? combine(v, cpu::value<T>(a[i])) : cpu::value<T>(a[0]);
    return v;
}
inline u32 __reduce_add_sync(u32, u32 v) { return reduce(v, [](u32 a, u32 b) { return a + b; }); }
inline u32 __reduce_max_sync(u32, u32 v) { return reduce(v, [](u32 a, u32 b) { return std::max(a, b); }); }
struct alignas(16) float4 { float x, y, z, w; };
template <typename T>
T __ldcs(const T* at) { return *at; }
inline int __any_sync(u32 m, int p) { return __ballot_sync(m, p) != 0; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline u32 __brev(u32 x) { u32 y = 0; for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i); return y; }
template <typename T>
T atomicAdd(T* at, T v) { T old = *at; *at += v; return old; }
template <typename T>
T atomicMax(T* at, T v) { T old = *at; *at = std::max(old, v); return old; }
template <typename T>
T atomicMin(T* at, T v) { T old = *at; *at = std::min(old, v); return old; }
inline float __uint_as_float(u32 x) { return cpu::value<float>(x); }
inline float __int_as_float(int x) { return cpu::value<float>(static_cast<u32>(x)); }
inline u32 __float_as_uint(float x) { return static_cast<u32>(cpu::bits(x)); }
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __expf(float x) { return std::exp(x); }
inline float square_root(float x) { return std::sqrt(x); }
inline float reciprocal(float x) { return 1 / x; }
using std::min;
using std::max;
inline void sincospif(float x, float* s, float* c) { const double p = 3.14159265358979323846 * x; *s = std::sin(p); *c = std::cos(p); }
inline void sincospi(double x, double* s, double* c) { const long double p = 3.14159265358979323846264338327950288L * x; *s = std::sin(p); *c = std::cos(p); }

struct f16 { _Float16 v; };
struct bf16 { unsigned short bits; };
typedef float f32;
inline float to_float(f16 x) { return x.v; }
inline float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
inline float to_float(float x) { return x; }
inline void round_to(f16& y, float x) { y.v = static_cast<_Float16>(x); }
inline void round_to(bf16& y, float x) {
    u32 b = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline void round_to(float& y, float x) { y = x; }
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector { T at[COUNT]; };
