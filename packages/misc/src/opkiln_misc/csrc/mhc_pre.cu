// mhc_pre: with r = sqrt(mean(x^2)) + 1e-4 and H = x @ phi, for each row of x [batch, N * columns]
//   pre = sigmoid(alpha_pre H / r + b), h_post = alpha_post H / r + b, res = sinkhorn(alpha_res H / r + b)
//   x_res [batch, N * columns] = res @ x, x_layer [batch, columns] = pre @ x
// phi [N * columns, M] f32, M = N N + 2 N; x, x_res, x_layer of type T; b [M], h_post f32. f32 arithmetic.
//
// One kernel: a cluster of CTAs serves ROWS rows of x. Each CTA takes a `share` of the rows of phi, sends its
// sums to all others, so that every CTA can compute the gates itself, and mixes `own_columns` columns.
//
// Macros: those of mhc_gates.cuh; T; CLUSTER.

static_assert(THREADS >= M, "a thread loads at most one element of b");

// The CTA's sums, to every CTA of the cluster: all[sender][row][SUMS].
DEVICE void send_sums(const float* sums, float* all, int rank, int rows, u64* arrivals) {
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * SUMS; item += THREADS) {
        const float total = over_warps(sums, item);
#pragma unroll
        for (int to = 0; to < CLUSTER; ++to) store_async(all + rank * ROWS * SUMS + item, total, to, arrivals);
    }
}
// By one warp: h[c], the row's sum c over the CTAs.
DEVICE void over_cluster(const float* all, float* h) {
    for (int c = threadIdx.x % 32; c < SUMS; c += 32) {
        float total = 0;
#pragma unroll
        for (int from = 0; from < CLUSTER; ++from) total += all[from * ROWS * SUMS + c];
        h[c] = total;
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS) mhc_pre(
    const float* phi, const T* x, const float* b, T* x_res, T* x_layer, float* h_post, i64 batch, i64 columns,
    i64 share, i64 own_columns, i64 stride_pk, i64 stride_pm, i64 stride_xb, i64 stride_xk, i64 stride_b,
    double alpha_pre, double alpha_post, double alpha_res, i64 repeat, double eps, double inverse_width) {
    const i64 row = blockIdx.x / CLUSTER * static_cast<i64>(ROWS);
    const int rows = ROWS == 1 ? 1 : static_cast<int>(min(batch - row, static_cast<i64>(ROWS)));
    u64* arrivals = reinterpret_cast<u64*>(dynamic_shared());  // of 16 bytes
    expect_bytes(arrivals, CLUSTER * rows * SUMS * 4);
    cluster_arrive_relaxed();  // waited for below: no CTA writes to another before that one runs
    const int rank = cluster_rank();
    const i64 begin = rank * share, end = min(begin + share, N * columns);
    x += row * stride_xb;
    const Operands from = {phi, x, rows, end, stride_pk, stride_pm, stride_xb, stride_xk};
    Loaded loaded;
    load_slab(loaded, from, begin);
    float* sums = reinterpret_cast<float*>(arrivals + 2);      // [WARPS][ROWS][SUMS]
    float* all = sums + WARPS * ROWS * SUMS;                   // [CLUSTER][ROWS][SUMS]
    float* h = all + CLUSTER * ROWS * SUMS;                    // [ROWS][SUMS]
    float* gates = h + ROWS * SUMS;                            // [ROWS][GATES]
    float* bias = gates + ROWS * GATES;
    const float own_bias = threadIdx.x < M ? b[threadIdx.x * stride_b] : 0;
    // An item: a vector of columns of a row. The first one's x arrives while phi does.
    const int units = static_cast<int>(own_columns / X_VECTOR);
    int r = ROWS == 1 ? 0 : threadIdx.x / units;
    i64 column = rank * own_columns + (threadIdx.x - r * units) * X_VECTOR;
    XVector v[N] = {};
    if (threadIdx.x < rows * units && column < columns) load_streams(v, x + r * stride_xb, columns, column, stride_xk);
    Sums own = {};
    multiply(own, loaded);
#pragma unroll 1
    for (i64 slab = begin + SLAB; slab < end; slab += SLAB) {
        load_slab(loaded, from, slab);
        multiply(own, loaded);
    }
    store_warp_sums(own, sums);
    if (threadIdx.x < M) bias[threadIdx.x] = own_bias;
    __syncthreads();
    cluster_wait();
    send_sums(sums, all, rank, rows, arrivals);
    wait_for_bytes(arrivals);
    const Gates g = {static_cast<float>(alpha_pre), static_cast<float>(alpha_post), static_cast<float>(alpha_res),
                     static_cast<float>(eps), static_cast<float>(inverse_width), static_cast<int>(repeat)};
#pragma unroll 1
    for (int of = threadIdx.x / 32; of < rows; of += WARPS) {
        over_cluster(all + of * SUMS, h + of * SUMS);
        float* post = h_post != nullptr && rank == 0 ? h_post + (row + of) * N : nullptr;
        compute_gates(h + of * SUMS, bias, g, gates + of * GATES, post);
    }
    __syncthreads();
    x_res += row * N * columns;
    x_layer += row * columns;
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * units; item += THREADS) {
        r = ROWS == 1 ? 0 : item / units;
        column = rank * own_columns + (item - r * units) * X_VECTOR;
        if (column >= columns) continue;
        if (item >= THREADS) load_streams(v, x + r * stride_xb, columns, column, stride_xk);
        mix_streams(v, gates + r * GATES, x_res + r * N * columns, x_layer + r * columns, columns, column);
    }
}
