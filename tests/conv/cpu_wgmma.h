// What csrc/wgmma.cuh has, for a CPU. Include it after cpu_device.h and cpu_mma.h. Copies arrive when
// their barrier is looked at for the second time, products run when they are waited for: until then
// the places hold NaN, so that what is used too early or freed too early shows.

namespace cpu {

struct Copied { unsigned char* to; const unsigned char* from; u32 bytes; };
struct Mbarrier { u32 count, arrived, phase; i64 bytes; u32 looks; std::vector<Copied> copies; };
inline std::map<std::pair<Block*, u64*>, Mbarrier> mbarriers;
inline std::map<std::pair<Block*, u32>, std::deque<std::vector<std::function<void()>>>> products;

inline Mbarrier& mbarrier(u64* at) { return mbarriers.at({state.self->block, at}); }
inline void settle(Mbarrier& b) {
    if (b.arrived < b.count || b.bytes) return;
    b.arrived = 0;
    b.phase ^= 1;
}

}  // namespace cpu

constexpr u32 SHARED_START = 16;  // of dynamic shared memory, as an address
inline u32 shared_address(const void* p) {
    return static_cast<const unsigned char*>(p) - dynamic_shared() + SHARED_START;
}
inline unsigned char* pattern_shared() {
    unsigned char* memory = dynamic_shared();
    return memory + (1024 - shared_address(memory) % 1024) % 1024;
}
inline void init_barrier(u64* at, u32 count) {
    cpu::mbarriers[{cpu::state.self->block, at}] = {count, 0, 0, 0, 0, {}};
}
inline void publish_barriers() {}
inline void arrive(u64* at) {
    cpu::Mbarrier& b = cpu::mbarrier(at);
    ++b.arrived;
    cpu::settle(b);
}
inline void arrive_expecting(u64* at, u32 bytes) {
    cpu::Mbarrier& b = cpu::mbarrier(at);
    b.bytes += bytes;
    arrive(at);
}
inline bool phase_is_over(u64* at, u32 parity) {
    cpu::Mbarrier& b = cpu::mbarrier(at);
    if (!b.copies.empty() && ++b.looks > 1) {
        b.looks = 0;
        for (const cpu::Copied& c : b.copies) {
            std::memcpy(c.to, c.from, c.bytes);
            b.bytes -= c.bytes;
        }
        b.copies.clear();
        cpu::settle(b);
    }
    return b.phase != parity;
}
inline void wait_phase(u64* at, u32 parity) {
    while (!phase_is_over(at, parity)) cpu::yield();
}
inline void copy_bulk(void* to, const void* from, u32 bytes, u64* at) {
    if (reinterpret_cast<size_t>(from) % 16 || shared_address(to) % 16 || bytes % 16) std::abort();
    std::memset(to, 0xff, bytes);
    cpu::mbarrier(at).copies.push_back(
        {static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes});
}
inline cpu::Barrier& some(u32 number, u32 threads) {
    static std::map<std::pair<cpu::Block*, u32>, cpu::Barrier> barriers;
    cpu::Barrier& b = barriers[{cpu::state.self->block, number}];
    b.size = threads;
    return b;
}
inline void sync_some(u32 number, u32 threads) { cpu::wait(some(number, threads)); }
inline void arrive_some(u32 number, u32 threads) {
    cpu::Barrier& b = some(number, threads);
    if (++b.arrived == b.size) { b.arrived = 0; ++b.generation; }
}
template <int REGISTERS>
void take_registers() {}
template <int REGISTERS>
void give_registers() {}

inline std::deque<std::vector<std::function<void()>>>& own_products() {
    auto& groups = cpu::products[{cpu::state.self->block, threadIdx.x}];
    if (groups.empty()) groups.emplace_back();  // the last is not committed
    return groups;
}
inline void products_begin() { cpu::yield(); }
inline void products_commit() { own_products().emplace_back(); }
template <int LEFT>
void products_wait() {
    cpu::yield();
    auto& groups = own_products();
    for (; groups.size() > LEFT + 1; groups.pop_front())
        for (const auto& run : groups.front()) run();
}
inline void keep(float&) {}

// Element (row, k) of an operand that a descriptor names, K innermost: PTX's canonical layouts.
static float element(u64 descriptor, u32 row, u32 k) {
    const u32 start = (descriptor & 0x3fff) * 16;
    const u32 stride = (descriptor >> 32 & 0x3fff) * 16, layout = descriptor >> 62;
    if (descriptor >> 49 & 7) std::abort();  // a pattern starts elsewhere: not modelled
    if (layout == 0) std::abort();  // without a swizzle: not used
    const u32 pieces = layout == 1 ? 8 : layout == 2 ? 4 : 2;  // 16 bytes each, of a row
    u32 at = start + row / 8 * stride + row % 8 * pieces * 16 + k * 2;
    at ^= (at >> 7 & (pieces - 1)) << 4;
    const u32 base = shared_address(dynamic_shared());
    u16 bits;
    std::memcpy(&bits, dynamic_shared() + (at - base), 2);
    static std::vector<float> values;
    if (values.empty())
        for (u32 i = 0; i < 65536; ++i) values.push_back(to_float(cpu::value<T>(i)));
    return values[bits];
}
template <int COUNT>
void product(float (&c)[COUNT], u64 a, u64 b) {
    const u32 thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    own_products().back().push_back([&c, a, b, row, thread] {
        for (int i = 0; i < COUNT; ++i) {
            const u32 m = row + i % 4 / 2 * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
            for (u32 k = 0; k < 16; ++k) c[i] += element(a, m, k) * element(b, n, k);
        }
    });
}
