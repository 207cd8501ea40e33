// What SHIFT adds to row_cluster.cu and row_ring.cu; it stands between row.cuh and the kernel.
//
// SHIFT: rows follow each other without a gap and do not start at vectors of memory, so that their
// first and last vector have a part alone. A row is then read and written by the vectors of memory,
// `shift` elements before it; all rows of a CTA have one shift, so that w and b, which have to be
// moved by it, are moved once. Nothing outside the row is written. The row ends in the last strip.

// Elements low to high of a vector are the row's.
struct Part {
    int low, high;
    __device__ bool whole() const { return low == 0 && high == VALUES; }
    __device__ bool has(int j) const { return low <= j && j < high; }
};

template <int KIND>
struct Unsigned {
    using type = unsigned short;
};
template <>
struct Unsigned<F32> {
    using type = u32;
};
using Element = Unsigned<TYPE>::type;

__device__ Words<4> load_part(const char* p, Part part) {
    Words<4> w = {};
#pragma unroll
    for (int j = 0; j < VALUES; ++j)
        if (part.has(j)) {
            const u32 bits = ((const Element*)p)[j];
            w.at[j * VALUE_BYTES / 4] |= bits << j * VALUE_BYTES % 4 * 8;
        }
    return w;
}

__device__ void store_part(char* p, Part part, const float (&values)[VALUES]) {
    const Words<4> w = pack_values(values);
#pragma unroll
    for (int j = 0; j < VALUES; ++j)
        if (part.has(j))
            ((Element*)p)[j] = (Element)(w.at[j * VALUE_BYTES / 4] >> j * VALUE_BYTES % 4 * 8);
}

__device__ void keep_part(Words<4>& w, Part part) {  // 0 elsewhere
#pragma unroll
    for (int j = 0; j < VALUES; ++j)
        if (!part.has(j))
            w.at[j * VALUE_BYTES / 4] &= TYPE == F32 ? 0u : j % 2 ? 0xffffu : 0xffff0000u;
}

// 16 bytes of two vectors that follow each other, past the first `skip`, 1 to 16.
__device__ Words<4> join(const Words<4>& low, const Words<4>& high, u32 skip) {
    u32 all[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) all[i] = i < 4 ? low.at[i] : high.at[i - 4];
#pragma unroll
    for (int words = 4; words; words /= 2)
#pragma unroll
        for (int i = 0; i + words < 8; ++i)
            if (skip & 4 * words) all[i] = all[i + words];
    Words<4> w;
#pragma unroll
    for (int i = 0; i < 4; ++i) w.at[i] = skip & 2 ? all[i] >> 16 | all[i + 1] << 16 : all[i];
    return w;
}

#if SHIFT
// Vector v of a [n] weight that is moved by `shift` elements; its type is x's.
__device__ Weight load_moved(const char* w, i64 v, i64 n, int shift, Part part) {
    const char* p = w + v * 16;
    if (shift == 0 && part.whole()) return load_weight(w, v);
    if (part.whole() && (v + 1) * VALUES <= n)
        return join(load_weight(w, v - 1), load_weight(w, v), 16 - shift * VALUE_BYTES);
    return load_part(p - shift * VALUE_BYTES, part);
}
#endif
