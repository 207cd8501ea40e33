// mhc_pre: with r = sqrt(mean(x^2)) + 1e-4 and H = x @ phi, for each row of x [batch, N * columns]
//   pre = sigmoid(alpha_pre H / r + b), h_post = alpha_post H / r + b, res = sinkhorn(alpha_res H / r + b)
//   x_res [batch, N * columns] = res @ x, x_layer [batch, columns] = pre @ x
// phi [N * columns, M] f32, M = N N + 2 N; x, x_res, x_layer of type T; b [M], h_post f32. f32 arithmetic.
//
// Two kernels. mhc_sums: a CTA takes SLAB rows of phi and ROWS rows of x, and leaves their products and
// squares, summed, in partials [batch, slabs, SUMS]: phi is read by the whole GPU at once. mhc_mix: a CTA
// adds a row's partials up, every warp computes the gates for itself, a thread mixes one vector of columns.
//
// Macros: T; N; ROWS; THREADS, UNROLL: of mhc_sums, its rows of phi in flight a thread; MIX_THREADS;
// PHI_VECTOR, X_VECTOR: elements of phi, and of x and the outputs, that are loaded at once (1: any
// strides, else dense and aligned). A row's sums do not depend on ROWS.

constexpr int M = N * N + 2 * N;
constexpr int SUMS = M + 1;              // of a row: H, then the sum of squares
constexpr int VECTORS = M / PHI_VECTOR;  // of a row of phi
constexpr DEVICE int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }
// Lanes that share a row of phi: one more than it has vectors, for the square.
constexpr int GROUP = VECTORS < 32 ? power_of_two(VECTORS + 1) : 32;
constexpr int CHUNKS = (VECTORS + GROUP) / GROUP;  // vectors a lane
constexpr int STEP = THREADS / GROUP;              // rows of phi that the CTA loads at once
constexpr int SLAB = STEP * UNROLL;
constexpr int WARPS = THREADS / 32, MIX_WARPS = MIX_THREADS / 32;
constexpr int IN_FLIGHT = 32;  // partial sums a lane: all of 160 slabs over 5 warps
static_assert(MIX_THREADS >= M, "a thread loads at most one element of b");

using PhiVector = Vector<float, PHI_VECTOR>;
using XVector = Vector<T, X_VECTOR>;

DEVICE float over_groups(float value) {
#pragma unroll
    for (int distance = GROUP; distance < 32; distance *= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

extern "C" __global__ void __launch_bounds__(THREADS) mhc_sums(
    const float* phi, const T* x, float* partials, i64 batch, i64 width, i64 slabs, i64 stride_pk, i64 stride_pm,
    i64 stride_xb, i64 stride_xk) {
    const int q = threadIdx.x % GROUP, lane = threadIdx.x % 32;
    const i64 first = blockIdx.x * static_cast<i64>(SLAB) + threadIdx.x / GROUP;
    const i64 row = blockIdx.y * static_cast<i64>(ROWS);
    PhiVector w[UNROLL][CHUNKS] = {};
    T values[UNROLL][ROWS] = {};
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const i64 k = first + u * STEP;
        if (k >= width) continue;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int column = (q + c * GROUP) * PHI_VECTOR;
            if (column >= M) continue;
            const float* from = phi + k * stride_pk;
            if (PHI_VECTOR > 1) w[u][c] = *reinterpret_cast<const PhiVector*>(from + column);
            else w[u][c].at[0] = from[column * stride_pm];
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (row + r < batch) values[u][r] = x[(row + r) * stride_xb + k * (X_VECTOR > 1 ? 1 : stride_xk)];
        }
    }
    float* sums = reinterpret_cast<float*>(dynamic_shared());  // [WARPS][ROWS][SUMS]
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float* to = sums + (threadIdx.x / 32 * ROWS + r) * SUMS;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int column = (q + c * GROUP) * PHI_VECTOR;
            const bool square = q + c * GROUP == VECTORS;
            float sum[PHI_VECTOR] = {};
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float value = to_float(values[u][r]);
                if (square) w[u][c].at[0] = value;
#pragma unroll
                for (int e = 0; e < PHI_VECTOR; ++e) sum[e] += value * w[u][c].at[e];
            }
#pragma unroll
            for (int e = 0; e < PHI_VECTOR; ++e) {
                sum[e] = over_groups(sum[e]);
                if (lane < GROUP && (column < M || (square && e == 0))) to[column + e] = sum[e];
            }
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < ROWS * SUMS; item += THREADS) {
        const int r = item / SUMS;
        float total = 0;
#pragma unroll
        for (int from = 0; from < WARPS; ++from) total += sums[from * ROWS * SUMS + item];
        if (row + r < batch) partials[((row + r) * slabs + blockIdx.x) * SUMS + item % SUMS] = total;
    }
}

struct Gates { float alpha_pre, alpha_post, alpha_res, eps, inverse_width; int repeat; };

// By one warp; lane i < N holds row i of the mixing matrix. gates: res, then pre.
DEVICE void compute_gates(const float* h, const float* bias, const Gates& g, float* gates, float* h_post) {
    const int lane = threadIdx.x % 32;
    const bool mine = lane < N;
    const int i = mine ? lane : 0;
    const float inverse_rms = reciprocal(sqrtf(h[M] * g.inverse_width) + 1e-4f);
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

// Sum `column` of a row's partials over the slabs from the warp's on; the warps' sums: all[warp][column].
DEVICE void add_slabs(const float* partials, int slabs, float* all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int column = lane; column < SUMS; column += 32) {
        float total = 0;
#pragma unroll 1
        for (int slab = warp; slab < slabs; slab += IN_FLIGHT * MIX_WARPS) {
            float part[IN_FLIGHT] = {};
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) {
                if (slab + i * MIX_WARPS < slabs) part[i] = partials[(slab + i * MIX_WARPS) * SUMS + column];
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; ++i) total += part[i];
        }
        all[warp * SUMS + column] = total;
    }
}

extern "C" __global__ void __launch_bounds__(MIX_THREADS) mhc_mix(
    const float* partials, const T* x, const float* b, T* x_res, T* x_layer, float* h_post, i64 columns, i64 slabs,
    i64 stride_xb, i64 stride_xk, i64 stride_b, double alpha_pre, double alpha_post, double alpha_res, i64 repeat,
    double eps, double inverse_width) {
    const i64 row = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 column = (blockIdx.x * static_cast<i64>(MIX_THREADS) + threadIdx.x) * X_VECTOR;
    XVector v[N] = {};
    if (column < columns) {
        const T* from = x + row * stride_xb;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (X_VECTOR > 1) v[j] = *reinterpret_cast<const XVector*>(from + j * columns + column);
            else v[j].at[0] = from[(j * columns + column) * stride_xk];
        }
    }
    float* all = reinterpret_cast<float*>(dynamic_shared());  // [MIX_WARPS][SUMS]
    float* bias = all + MIX_WARPS * SUMS;
    float* h = bias + M + warp * (SUMS + N * N + N);  // the warp's own
    float* gates = h + SUMS;
    const float own_bias = threadIdx.x < M ? b[threadIdx.x * stride_b] : 0;
    add_slabs(partials + row * slabs * SUMS, static_cast<int>(slabs), all);
    if (threadIdx.x < M) bias[threadIdx.x] = own_bias;
    __syncthreads();
    for (int c = lane; c < SUMS; c += 32) {
        float total = 0;
#pragma unroll
        for (int from = 0; from < MIX_WARPS; ++from) total += all[from * SUMS + c];
        h[c] = total;
    }
    __syncwarp();
    const Gates g = {static_cast<float>(alpha_pre), static_cast<float>(alpha_post), static_cast<float>(alpha_res),
                     static_cast<float>(eps), static_cast<float>(inverse_width), static_cast<int>(repeat)};
    float* post = h_post != nullptr && blockIdx.x == 0 && warp == 0 ? h_post + row * N : nullptr;
    compute_gates(h, bias, g, gates, post);
    __syncwarp();
    if (column >= columns) return;
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
        T* to = i < N ? x_res + (row * N + i) * columns : x_layer + row * columns;
        *reinterpret_cast<XVector*>(to + column) = y;
    }
}
