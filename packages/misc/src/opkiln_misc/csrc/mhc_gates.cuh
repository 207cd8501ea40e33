// What mhc_pre is made of: the products with phi, the gates of a row, the mixing of its streams.
//
// Macros: N; ROWS: of x that share a load of phi; THREADS; UNROLL: rows of phi in flight a thread; PHI_VECTOR,
// X_VECTOR: elements of phi, and of x and the outputs, that are loaded at once (1: any strides, else dense and
// aligned); PHI_DENSE: so are its rows: few instructions before the first load. A row's sums do not depend on ROWS.

constexpr int M = N * N + 2 * N;
constexpr int SUMS = M + 1;              // of a row: H, then the sum of squares
constexpr int GATES = N * N + N;         // of a row: res, then pre
constexpr int VECTORS = M / PHI_VECTOR;  // of a row of phi
constexpr DEVICE int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
// Lanes that share a row of phi: one more than it has vectors, for the square.
constexpr int GROUP = VECTORS < 32 ? power_of_two(VECTORS + 1) : 32;
constexpr int CHUNKS = (VECTORS + GROUP) / GROUP;  // vectors a lane
constexpr int STEP = THREADS / GROUP;              // rows of phi that the CTA loads at once
constexpr int SLAB = STEP * UNROLL;
constexpr int WARPS = THREADS / 32;

using PhiVector = Vector<float, PHI_VECTOR>;
using XVector = Vector<T, X_VECTOR>;

struct Operands {  // x: of the first row
    const float* phi;
    const T* x;
    int rows;
    i64 end, stride_pk, stride_pm, stride_xb, stride_xk;
};
struct Loaded {
    PhiVector w[UNROLL][CHUNKS];
    T values[UNROLL][ROWS];
};
struct Sums { float of[ROWS][CHUNKS][PHI_VECTOR]; };

// Rows k, k + STEP, ... of phi and what they are multiplied by. FULL: all UNROLL exist, else zeros from `end` on.
template <bool FULL>
DEVICE void load(Loaded& to, const Operands& from, i64 k) {
    const int q = threadIdx.x % GROUP;
    const i64 stride_pk = PHI_DENSE ? M : from.stride_pk, stride_xk = X_VECTOR > 1 ? 1 : from.stride_xk;
    const float* phi = from.phi + k * stride_pk;
    const T* x = from.x + k * stride_xk;
    to = {};
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        if (!FULL && k + u * STEP >= from.end) continue;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int column = (q + c * GROUP) * PHI_VECTOR;
            if (column >= M) continue;
            const float* at = phi + u * STEP * stride_pk;
            if (PHI_VECTOR > 1) to.w[u][c] = *reinterpret_cast<const PhiVector*>(at + column);
            else to.w[u][c].at[0] = at[column * from.stride_pm];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (ROWS == 1 || r < from.rows) to.values[u][r] = x[r * from.stride_xb + u * STEP * stride_xk];
        }
    }
}
// The thread's rows of the slab from `first` on.
DEVICE void load_slab(Loaded& to, const Operands& from, i64 first) {
    if (first + SLAB <= from.end) load<true>(to, from, first + threadIdx.x / GROUP);
    else load<false>(to, from, first + threadIdx.x / GROUP);
}

DEVICE void multiply(Sums& sums, Loaded& l) {
    const int q = threadIdx.x % GROUP;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const float value = to_float(l.values[u][r]);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if (q + c * GROUP == VECTORS) l.w[u][c].at[0] = value;
#pragma unroll
                for (int e = 0; e < PHI_VECTOR; ++e) sums.of[r][c][e] += value * l.w[u][c].at[e];
            }
        }
    }
}

// Over the warp's rows of phi; to[warp][row][SUMS].
DEVICE void store_warp_sums(const Sums& sums, float* to) {
    const int q = threadIdx.x % GROUP, lane = threadIdx.x % 32;
    to += threadIdx.x / 32 * ROWS * SUMS;
#pragma unroll
    for (int r = 0; r < ROWS; ++r, to += SUMS) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int column = (q + c * GROUP) * PHI_VECTOR;
            const bool square = q + c * GROUP == VECTORS;
#pragma unroll
            for (int e = 0; e < PHI_VECTOR; ++e) {
                float sum = sums.of[r][c][e];
#pragma unroll
                for (int distance = GROUP; distance < 32; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
                if (lane < GROUP && (column < M || (square && e == 0))) to[column + e] = sum;
            }
        }
    }
}
DEVICE float over_warps(const float* sums, int item) {
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += sums[warp * ROWS * SUMS + item];
    return total;
}

struct Gates { float alpha_pre, alpha_post, alpha_res, eps, inverse_width; int repeat; };

// By one warp; lane i < N holds row i of the mixing matrix. gates: res, then pre.
DEVICE void compute_gates(const float* h, const float* bias, const Gates& g, float* gates, float* h_post) {
    const int lane = threadIdx.x % 32;
    const bool mine = lane < N;
    const int i = mine ? lane : 0;
    const float inverse_rms = reciprocal(square_root(h[M] * g.inverse_width) + 1e-4f);
    float m[N];
    float most = -__int_as_float(0x7f800000);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int at = 2 * N + i * N + j;
        m[j] = g.alpha_res * h[at] * inverse_rms + bias[at];
        most = fmaxf(most, m[j]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) m[j] = mine ? __expf(m[j] - most) : 0;
#pragma unroll 1
    for (int round = 0; round < g.repeat; ++round) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) sum += m[j];
        const float scale = reciprocal(sum + g.eps);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            m[j] = mine ? m[j] * scale : 0;
            float down = m[j];
#pragma unroll
            for (int distance = 1; distance < N; distance *= 2) down += __shfl_xor_sync(ALL_LANES, down, distance);
            m[j] *= reciprocal(down + g.eps);
        }
    }
    if (!mine) return;
#pragma unroll
    for (int j = 0; j < N; ++j) gates[i * N + j] = m[j];
    gates[N * N + i] = reciprocal(1 + __expf(-(g.alpha_pre * h[i] * inverse_rms + bias[i])));
    if (h_post != nullptr) h_post[i] = g.alpha_post * h[N + i] * inverse_rms + bias[N + i];
}

// As words: a vector of halves is stored one by one otherwise. A template, so that a vector below a word
// discards the first branch: there are no vectors of 0 words.
template <typename V>
DEVICE void store(T* to, const V& v) {
    if constexpr (sizeof v % 4 == 0) {
        using Words = Vector<u32, sizeof v / 4>;
        Words words;
        memcpy(&words, &v, sizeof v);
        *reinterpret_cast<Words*>(to) = words;
    } else {
        *to = v.at[0];
    }
}

// A vector of columns of all streams of a row, from `column` on.
DEVICE void load_streams(XVector (&v)[N], const T* row, i64 columns, i64 column, i64 stride_xk) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        if (X_VECTOR > 1) v[j] = *reinterpret_cast<const XVector*>(row + j * columns + column);
        else v[j].at[0] = row[(j * columns + column) * stride_xk];
    }
}
// x_res, x_layer: of the row.
DEVICE void mix_streams(const XVector (&v)[N], const float* gates, T* x_res, T* x_layer, i64 columns, i64 column) {
#pragma unroll
    for (int i = 0; i <= N; ++i) {
        XVector y;
#pragma unroll
        for (int e = 0; e < X_VECTOR; ++e) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < N; ++j) sum += gates[i * N + j] * to_float(v[j].at[e]);
            round_to(y.at[e], sum);
        }
        store(i < N ? x_res + i * columns + column : x_layer + column, y);
    }
}
