// mhc_pre: with r = sqrt(mean(x^2)) + 1e-4 and H = x @ phi, for each row of x [batch, N * columns]
//   pre = sigmoid(alpha_pre H / r + b), h_post = alpha_post H / r + b, res = sinkhorn(alpha_res H / r + b)
//   x_res [batch, N * columns] = res @ x, x_layer [batch, columns] = pre @ x
// phi [N * columns, M] f32, M = N N + 2 N; x, x_res, x_layer of type T; b [M], h_post f32. f32 arithmetic.
//
// A cluster of CLUSTER CTAs serves ROWS rows of x; each CTA takes a range of the columns, in all N
// streams. It sends its partial sums to all others, so that every CTA can compute the gates itself and
// write its own columns, whose x has stayed in its shared memory: one launch, phi read once.
//
// Macros: T; N; ROWS; CLUSTER; THREADS; PHI_VECTOR, X_VECTOR: elements of phi, and of x and the
// outputs, that are loaded at once (1: any strides, else dense and aligned); UNROLL: rows of phi in
// flight a thread. A row's sums do not depend on ROWS.

constexpr int M = N * N + 2 * N;
constexpr int SUMS = M + 1;                      // of a row: H, then the sum of squares
constexpr int VECTORS = M / PHI_VECTOR;          // of a row of phi
constexpr int STEP = THREADS / VECTORS;          // rows of phi that the CTA loads at once
constexpr int PARTS = 4;                         // lanes that sum one column over the threads
constexpr int GATES = N * N + N;                 // res, then pre

using PhiVector = Vector<float, PHI_VECTOR>;
using XVector = Vector<T, X_VECTOR>;
constexpr int QUAD = X_VECTOR < 4 ? X_VECTOR : 4;  // floats of shared memory at once
using Quad = Vector<float, QUAD>;

struct Streams {  // this CTA's columns [begin, begin + width) of each stream; k counts all N * width
    i64 columns;
    int begin, width;
    float inverse_width;
    DEVICE int stream(int k) const { return static_cast<int>((k + 0.5f) * inverse_width); }
    DEVICE i64 index(int k) const { return stream(k) * (columns - width) + begin + k; }
};

DEVICE void load_phi(PhiVector (&w)[UNROLL], const float* phi, const Streams& s, int k, int q,
                     i64 stride_pk, i64 stride_pm) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u, k += STEP) {
        if (k < N * s.width) {
            const float* from = phi + s.index(k) * stride_pk;
            if (PHI_VECTOR > 1) w[u] = reinterpret_cast<const PhiVector*>(from)[q];
            else w[u].at[0] = from[q * stride_pm];
        }
    }
}

// x of this CTA's columns as f32: streams[row][k]; rows that do not exist are 0.
DEVICE void stage_x(float* streams, const T* x, const Streams& s, int rows, i64 stride_xb, i64 stride_xk) {
    const int units = N * s.width / X_VECTOR;
#pragma unroll 1
    for (int item = threadIdx.x; item < ROWS * units; item += THREADS) {
        const int row = item / units, k = item % units * X_VECTOR;
        XVector v = {};
        if (row < rows) {
            const T* from = x + row * stride_xb;
            if (X_VECTOR > 1) v = *reinterpret_cast<const XVector*>(from + s.index(k));
            else v.at[0] = from[s.index(k) * stride_xk];
        }
        Quad* to = reinterpret_cast<Quad*>(streams + row * N * s.width + k);
#pragma unroll
        for (int e = 0; e < X_VECTOR; e += QUAD) {
            Quad wide;
#pragma unroll
            for (int i = 0; i < QUAD; ++i) wide.at[i] = to_float(v.at[e + i]);
            to[e / QUAD] = wide;
        }
    }
}

// Sum each column over the CTA's threads and send it to every CTA: sums[sender][row][column].
DEVICE void share_sums(const float* products, const float* squares, float* sums, u32 rank) {
    const int part = threadIdx.x % PARTS;
    // Whole warps take part in the shuffles, also where there is no item left.
    for (int base = 0; base < ROWS * SUMS; base += THREADS / PARTS) {
        const int item = base + threadIdx.x / PARTS;
        const int row = item / SUMS, column = item % SUMS;
        const bool square = column == M;
        const float* from = square ? squares + row * STEP : products + row * STEP * M + column;
        float total = 0;
        if (item < ROWS * SUMS) {
            for (int i = part; i < STEP; i += PARTS) total += from[i * (square ? 1 : M)];
        }
        total += __shfl_xor_sync(ALL_LANES, total, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        if (item < ROWS * SUMS) {
            for (u32 to = part; to < CLUSTER; to += PARTS) {
                peer(sums, to)[rank * ROWS * SUMS + item] = total;
            }
        }
    }
}

// One row by one warp; lane i < N holds row i of the mixing matrix.
DEVICE void compute_gates(const float* h, const float* bias, float* gates, float* h_post, i64 columns,
                          float alpha_pre, float alpha_post, float alpha_res, int repeat, float eps) {
    const int lane = threadIdx.x % 32;
    const bool mine = lane < N;
    const int i = mine ? lane : 0;
    const float mean_square = h[M] / static_cast<float>(N * columns);
    const float inverse_rms = reciprocal(sqrtf(mean_square) + 1e-4f);
    float m[N];
    float most = -__int_as_float(0x7f800000);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const int at = 2 * N + i * N + j;
        m[j] = alpha_res * h[at] * inverse_rms + bias[at];
        most = fmaxf(most, m[j]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) m[j] = mine ? __expf(m[j] - most) : 0;
#pragma unroll 1
    for (int round = 0; round < repeat; ++round) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) sum += m[j];
        const float scale = reciprocal(sum + eps);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            m[j] = mine ? m[j] * scale : 0;
            float down = m[j];
#pragma unroll
            for (int distance = 1; distance < N; distance *= 2) {
                down += __shfl_xor_sync(ALL_LANES, down, distance);
            }
            m[j] *= reciprocal(down + eps);
        }
    }
    if (!mine) return;
#pragma unroll
    for (int j = 0; j < N; ++j) gates[i * N + j] = m[j];
    gates[N * N + i] = reciprocal(1 + __expf(-(alpha_pre * h[i] * inverse_rms + bias[i])));
    if (h_post != nullptr) h_post[i] = alpha_post * h[N + i] * inverse_rms + bias[N + i];
}

DEVICE void mix_streams(const float* streams, const float* gates, T* x_res, T* x_layer, const Streams& s,
                        int rows) {
    const int units = s.width / X_VECTOR;
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * (N + 1) * units; item += THREADS) {
        const int out = item / units, column = item % units * X_VECTOR;
        const int row = out / (N + 1), i = out % (N + 1);
        float sum[X_VECTOR] = {};
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float gate = gates[row * GATES + i * N + j];
            const Quad* from = reinterpret_cast<const Quad*>(streams + (row * N + j) * s.width + column);
#pragma unroll
            for (int e = 0; e < X_VECTOR; e += QUAD) {
                const Quad wide = from[e / QUAD];
#pragma unroll
                for (int i = 0; i < QUAD; ++i) sum[e + i] += gate * wide.at[i];
            }
        }
        XVector v;
#pragma unroll
        for (int e = 0; e < X_VECTOR; ++e) round_to(v.at[e], sum[e]);
        T* to = i < N ? x_res + (row * N + i) * s.columns : x_layer + row * s.columns;
        *reinterpret_cast<XVector*>(to + s.begin + column) = v;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) mhc_pre(
    const float* phi, const T* x, const float* b, T* x_res, T* x_layer, float* h_post, i64 batch,
    i64 columns, i64 most_width, i64 stride_pk, i64 stride_pm, i64 stride_xb, i64 stride_xk, i64 stride_b,
    double alpha_pre, double alpha_post, double alpha_res, i64 repeat, double eps) {
    cluster_arrive();  // waited for below: no CTA writes to another before that one runs
    const u32 rank = cluster_rank();
    const i64 units = columns / X_VECTOR;
    Streams s;
    s.columns = columns;
    s.begin = static_cast<int>(units * rank / CLUSTER * X_VECTOR);
    s.width = static_cast<int>(units * (rank + 1) / CLUSTER * X_VECTOR) - s.begin;
    s.inverse_width = 1.0f / s.width;
    const int q = threadIdx.x % VECTORS, step = threadIdx.x / VECTORS;
    const int first = step < STEP ? step : N * s.width;  // threads left over have no row
    const i64 row = blockIdx.x / CLUSTER * static_cast<i64>(ROWS);
    const int rows = static_cast<int>(batch - row < ROWS ? batch - row : ROWS);
    float* streams = reinterpret_cast<float*>(dynamic_shared());
    float* sums = streams + ROWS * N * most_width;
    float* h = sums + CLUSTER * ROWS * SUMS;
    float* bias = h + ROWS * SUMS;
    float* gates = bias + M;
    float* squares = gates + ROWS * GATES;
    float* products = squares + ROWS * STEP;
    const float own_bias = threadIdx.x < M ? b[threadIdx.x * stride_b] : 0;
    float sum[ROWS][PHI_VECTOR] = {};
    float square[ROWS] = {};
#pragma unroll 1
    for (int base = 0; base < N * s.width; base += UNROLL * STEP) {
        PhiVector w[UNROLL];
        load_phi(w, phi, s, base + first, q, stride_pk, stride_pm);
        if (base == 0) {  // while the first rows of phi are on their way
            stage_x(streams, x + row * stride_xb, s, rows, stride_xb, stride_xk);
            __syncthreads();
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int k = base + first + u * STEP;
            if (k < N * s.width) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const float value = streams[r * N * s.width + k];
                    square[r] += value * value;
#pragma unroll
                    for (int e = 0; e < PHI_VECTOR; ++e) sum[r][e] += value * w[u].at[e];
                }
            }
        }
    }
    if (threadIdx.x < M) bias[threadIdx.x] = own_bias;
    if (step < STEP) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (q == 0) squares[r * STEP + step] = square[r];
#pragma unroll
            for (int e = 0; e < PHI_VECTOR; ++e) {
                products[(r * STEP + step) * M + q * PHI_VECTOR + e] = sum[r][e];
            }
        }
    }
    __syncthreads();
    cluster_wait();
    share_sums(products, squares, sums, rank);
    cluster_arrive();
    cluster_wait();

    for (int item = threadIdx.x; item < ROWS * SUMS; item += THREADS) {
        float total = 0;
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from) total += sums[from * ROWS * SUMS + item];
        h[item] = total;
    }
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x / 32; r < rows; r += THREADS / 32) {
        float* post = h_post != nullptr && rank == 0 ? h_post + (row + r) * N : nullptr;
        compute_gates(h + r * SUMS, bias, gates + r * GATES, post, columns, static_cast<float>(alpha_pre),
                      static_cast<float>(alpha_post), static_cast<float>(alpha_res),
                      static_cast<int>(repeat), static_cast<float>(eps));
    }
    __syncthreads();
    mix_streams(streams, gates, x_res + row * N * columns, x_layer + row * columns, s, rows);
}
