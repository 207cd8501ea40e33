// What csrc/device.cuh has beyond tests/misc/cpu_device.h, for a CPU. Include it after that header.

typedef unsigned short u16;

template <typename T>
u32 bits_of(T x) { return static_cast<u32>(cpu::bits(x)); }
template <typename T>
u32 pair_of(float low, float high, T) {
    T a, b;
    round_to(a, low);
    round_to(b, high);
    return bits_of(a) | bits_of(b) << 16;
}

inline void store_8(void* to, u32 low, u32 high) {
    const u32 y[2] = {low, high};
    if (reinterpret_cast<size_t>(to) % 8) std::abort();
    std::memcpy(to, y, 8);
}
inline void store_16(void* to, const u32 (&y)[4]) {
    if (reinterpret_cast<size_t>(to) % 16) std::abort();
    std::memcpy(to, y, 16);
}

template <int BYTES>
void copy_async(u16* to, const u16* from, bool some) {
    if (reinterpret_cast<size_t>(to) % BYTES || reinterpret_cast<size_t>(from) % BYTES) std::abort();
    if (some) std::memcpy(to, from, BYTES);
    else std::memset(to, 0, BYTES);
}
inline void close_group() {}
template <int LEFT>
void wait_groups() {}

inline void load_matrices(u32 (&a)[4], const u16* row) {
    u64 rows[32];
    cpu::exchange(reinterpret_cast<u64>(row), rows);
    const u32 lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        if (rows[i * 8 + lane / 4] % 16) std::abort();
        a[i] = reinterpret_cast<const u32*>(rows[i * 8 + lane / 4])[lane % 4];
    }
}

template <typename T>
float half_of(u32 pair, int i) { return to_float(cpu::value<T>(pair >> 16 * i & 0xffff)); }

// Fragments of mma.m16n8k16 as PTX lays them out, gathered from all lanes.
template <typename T>
void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, T) {
    u64 low[32], high[32], b[32];
    cpu::exchange(a[0] | static_cast<u64>(a[1]) << 32, low);
    cpu::exchange(a[2] | static_cast<u64>(a[3]) << 32, high);
    cpu::exchange(b0 | static_cast<u64>(b1) << 32, b);
    const u32 lane = threadIdx.x % 32;
    for (int e = 0; e < 4; ++e) {
        const u32 row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (u32 k = 0; k < 16; ++k) {
            const u64* half = k < 8 ? low : high;  // registers 0, 1: columns 0-7 of rows 0-7, 8-15
            const u32 from = row % 8 * 4 + k % 8 / 2;
            const u32 pair_a = static_cast<u32>(half[from] >> row / 8 * 32);
            const u32 pair_b = static_cast<u32>(b[column * 4 + k % 8 / 2] >> k / 8 * 32);
            c[e] += half_of<T>(pair_a, k % 2) * half_of<T>(pair_b, k % 2);
        }
    }
}
