// mhc_pre: with r = sqrt(mean(x^2)) + 1e-4 and H = x @ phi, for each row of x [batch, N * columns]
//   pre = sigmoid(alpha_pre H / r + b), h_post = alpha_post H / r + b, res = sinkhorn(alpha_res H / r + b)
//   x_res [batch, N * columns] = res @ x, x_layer [batch, columns] = pre @ x
// phi [N * columns, M] f32, M = N N + 2 N; x, x_res, x_layer of type T; b [M], h_post f32. f32 arithmetic.
//
// Two kernels. mhc_sums: a CTA takes SLAB rows of phi and ROWS rows of x, and leaves their products and
// squares, summed, in partials [batch, slabs, SUMS]: phi is read by the whole GPU at once. mhc_mix: a CTA
// adds a row's partials up, every warp computes the gates for itself, a thread mixes one vector of columns.
// mhc_mix may be launched to overlap mhc_sums: then it loads x and b while the sums are still computed.
//
// Macros: those of mhc_gates.cuh; T; MIX_THREADS.

constexpr int MIX_WARPS = MIX_THREADS / 32;
static_assert(MIX_THREADS >= M, "a thread loads at most one element of b");
constexpr int IN_FLIGHT = 32;  // partial sums a lane: all of 160 slabs over 5 warps

extern "C" __global__ void __launch_bounds__(THREADS) mhc_sums(
    const float* phi, const T* x, float* partials, i64 batch, i64 width, i64 slabs, i64 stride_pk, i64 stride_pm,
    i64 stride_xb, i64 stride_xk) {
    let_next_kernel_start();
    const i64 row = blockIdx.y * static_cast<i64>(ROWS);
    const int rows = static_cast<int>(min(batch - row, static_cast<i64>(ROWS)));
    const Operands from = {phi, x + row * stride_xb, rows, width, stride_pk, stride_pm, stride_xb, stride_xk};
    Loaded loaded;
    load_slab(loaded, from, blockIdx.x * static_cast<i64>(SLAB));
    Sums own = {};
    multiply(own, loaded);
    float* sums = reinterpret_cast<float*>(dynamic_shared());  // [WARPS][ROWS][SUMS]
    store_warp_sums(own, sums);
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < rows * SUMS; item += THREADS) {
        partials[((row + item / SUMS) * slabs + blockIdx.x) * SUMS + item % SUMS] = over_warps(sums, item);
    }
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
    if (column < columns) load_streams(v, x + row * stride_xb, columns, column, stride_xk);
    float* all = reinterpret_cast<float*>(dynamic_shared());  // [MIX_WARPS][SUMS]
    float* bias = all + MIX_WARPS * SUMS;
    float* h = bias + M + warp * (SUMS + GATES);  // the warp's own
    float* gates = h + SUMS;
    const float own_bias = threadIdx.x < M ? b[threadIdx.x * stride_b] : 0;
    wait_for_kernel_before();
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
    if (column < columns) mix_streams(v, gates, x_res + row * N * columns, x_layer + row * columns, columns, column);
}
