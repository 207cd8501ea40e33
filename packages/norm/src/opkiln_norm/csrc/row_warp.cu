// Short row norms, a warp for ROWS rows at a time: y[m, n] = (x[m, n] - mean[m]) * rstd[m] * w[n]
// + b[n]. All loads of the rows are under way before the first sum, and no barrier is met. A grid
// of fewer warps than rows / ROWS is persistent; w and b stay in registers.
//
// Macros: those of row.cuh, and ROWS. VECTORS is a lane's of one row. CLUSTER is 1, HAS_RESIDUAL 0,
// WEIGHT_AT 1. FIRST: x leaves L2 first.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
row_warp(const char* x, const char*, const char* w, const char* b, char* y, char*, float* mean_out,
         float* rstd_out, i64 rows, i64 n, i64 x_stride, i64, double eps) {
    const int lane = threadIdx.x % 32;
    const i64 row_vectors = n / VALUES;
    const i64 step = (i64)gridDim.x * WARPS * ROWS;
    const u64 policy = first_policy();
    const auto inside = [&](int i) { return EVEN || lane + 32 * i < row_vectors; };
    Words<4> xs[ROWS][VECTORS];
    const auto load_row = [&](i64 row, int r) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            xs[r][i] = {};
            if (row < rows && inside(i))
                xs[r][i] = load_vector(x + row * x_stride * VALUE_BYTES + (lane + 32 * i) * 16,
                                       policy);
        }
    };
    i64 row = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) load_row(row + r, r);
    Weight ws[VECTORS], bs[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (HAS_WEIGHT && inside(i)) ws[i] = load_weight(w, lane + 32 * i);
        if (HAS_BIAS && inside(i)) bs[i] = load_weight(b, lane + 32 * i);
    }
    for (; row < rows; row += step) {
        float mean[ROWS] = {}, rstd[ROWS];
        if constexpr (CENTER) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
#pragma unroll
                for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                    for (int j = 0; j < VALUES; ++j) mean[r] += value<TYPE>(xs[r][i], j);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) mean[r] = warp_sum(mean[r]) / n;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            rstd[r] = 0;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i) {
                if (CENTER && !inside(i)) continue;
#pragma unroll
                for (int j = 0; j < VALUES; ++j) {
                    const float v = value<TYPE>(xs[r][i], j) - mean[r];
                    rstd[r] += v * v;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rstd[r] = rsqrtf(warp_sum(rstd[r]) / n + (float)eps);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (row + r < rows) {
                if (lane == 0) {
                    if (mean_out) mean_out[row + r] = mean[r];
                    if (rstd_out) rstd_out[row + r] = rstd[r];
                }
#pragma unroll
                for (int i = 0; i < VECTORS; ++i) {
                    if (!inside(i)) continue;
                    float out[VALUES];
                    const auto input = [&](int j) { return value<TYPE>(xs[r][i], j); };
                    normalize(out, input, mean[r], rstd[r], ws[i], bs[i]);
                    store_values(y + (row + r) * n * VALUE_BYTES, lane + 32 * i, out);
                }
            }
            load_row(row + step + r, r);
        }
    }
}
