// Batch norm of few rows with the channels side by side: x [N, CHANNELS], contiguous.
//
// A lane holds one 32-bit word (two channels of 16 bits, one of 32) of every WARPS-th row; warps
// merge through shared memory, with one barrier. Everything is loaded before anything is used.
//
// Macros, beside those of channel.cuh. CHANNELS: a multiple of a word's. WARPS: a CTA's. ROWS: a
// warp's, at most.

constexpr int VALUES = 4 / VALUE_BYTES;
constexpr int ROW_WORDS = CHANNELS / VALUES;

struct Column {
    u32 lane, warp, word;
    u32 rows;

    __device__ Column(i64 n) {
        lane = threadIdx.x % 32;
        warp = threadIdx.x / 32;
        word = blockIdx.x * 32 + lane;
        rows = word < ROW_WORDS ? n : 0;
    }
    __device__ bool inside(int i) const { return i * WARPS + warp < rows; }
    __device__ i64 offset(int i) const { return ((i64)(i * WARPS + warp) * ROW_WORDS + word) * 4; }
    __device__ i64 channel(int j) const { return rows ? word * VALUES + j : j; }
    __device__ bool leader() const { return rows && warp == 0; }
};

__device__ void load_rows(const Column& at, const char* x, Words<1> (&xs)[ROWS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        xs[i] = {};
        if (at.inside(i)) xs[i] = load_words<1>(x + at.offset(i));
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
channel_columns_forward(const char* x, void* rm, void* rv, const void* w, const void* b, char* y,
                        float* mean_out, float* rstd_out, i64 n, float inverse_count,
                        float unbiased, float eps, float momentum) {
    __shared__ float slots[WARPS][2][VALUES][32];
    const Column at(n);
    Words<1> xs[ROWS];
    load_rows(at, x, xs);
    Channel own[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) own[j] = load_channel(w, b, rm, rv, at.channel(j));

    // Of the rows of warp v; those of its own, the barrier aside, before x has come.
    const auto counted = [&](int v) { return v < n ? (float)((n - v + WARPS - 1) / WARPS) : 0; };
    const float inverse = at.warp < n ? 1 / counted(at.warp) : 0;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        float mean = 0, m2 = 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) mean += value<TYPE>(xs[i], j);
        mean *= inverse;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float distance = at.inside(i) ? value<TYPE>(xs[i], j) - mean : 0;
            m2 += distance * distance;
        }
        slots[at.warp][0][j][at.lane] = mean;
        slots[at.warp][1][j][at.lane] = m2;
    }
    __syncthreads();
    float mean[VALUES], scale[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        float m2 = 0;
        mean[j] = 0;
#pragma unroll
        for (int v = 0; v < WARPS; ++v) mean[j] += counted(v) * slots[v][0][j][at.lane];
        mean[j] *= inverse_count;
#pragma unroll
        for (int v = 0; v < WARPS; ++v) {
            const float distance = slots[v][0][j][at.lane] - mean[j];
            m2 += slots[v][1][j][at.lane] + counted(v) * distance * distance;
        }
        const float rstd = rsqrtf(m2 * inverse_count + eps);
        scale[j] = rstd * own[j].weight;
        if (at.leader()) {
            if (mean_out) mean_out[at.channel(j)] = mean[j];
            if (rstd_out) rstd_out[at.channel(j)] = rstd;
            if constexpr (HAS_RUNNING)
                move_running(rm, rv, at.channel(j), own[j], mean[j], m2 * unbiased, momentum);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        Values<1> out;
#pragma unroll
        for (int j = 0; j < VALUES; ++j)
            out[j] = (value<TYPE>(xs[i], j) - mean[j]) * scale[j] + own[j].bias;
        if (at.inside(i)) store_values<1>(y + at.offset(i), out);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
channel_columns_backward(const char* g, const char* x, const void* w, const float* means,
                         const float* rstds, char* d, void* gw, void* gb, i64 n,
                         float inverse_count) {
    __shared__ float slots[WARPS][2][VALUES][32];
    const Column at(n);
    Words<1> gs[ROWS], xs[ROWS];
    load_rows(at, g, gs);
    load_rows(at, x, xs);
    float mean[VALUES], rstd[VALUES], weight[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        mean[j] = means[at.channel(j)];
        rstd[j] = rstds[at.channel(j)];
        weight[j] = HAS_WEIGHT ? load_one<WEIGHT_TYPE>(w, at.channel(j)) : 1;
    }
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        float sum_g = 0, sum_gx = 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            sum_g += value<TYPE>(gs[i], j);
            sum_gx += value<TYPE>(gs[i], j) * (value<TYPE>(xs[i], j) - mean[j]);
        }
        slots[at.warp][0][j][at.lane] = sum_g;
        slots[at.warp][1][j][at.lane] = sum_gx;
    }
    __syncthreads();
    float scale[VALUES], shift[VALUES], slope[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        float sum_g = 0, sum_gx = 0;
#pragma unroll
        for (int v = 0; v < WARPS; ++v) {
            sum_g += slots[v][0][j][at.lane];
            sum_gx += slots[v][1][j][at.lane];
        }
        scale[j] = rstd[j] * weight[j];
        shift[j] = sum_g * inverse_count;
        slope[j] = sum_gx * rstd[j] * rstd[j] * inverse_count;
        if (at.leader()) {
            if (gw) store_one<WEIGHT_TYPE>(gw, at.channel(j), sum_gx * rstd[j]);
            if (gb) store_one<WEIGHT_TYPE>(gb, at.channel(j), sum_g);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        Values<1> out;
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            const float distance = value<TYPE>(xs[i], j) - mean[j];
            out[j] = scale[j] * (value<TYPE>(gs[i], j) - shift[j] - slope[j] * distance);
        }
        if (at.inside(i)) store_values<1>(d + at.offset(i), out);
    }
}
