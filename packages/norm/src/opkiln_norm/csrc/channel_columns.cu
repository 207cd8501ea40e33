// Batch norm of few rows with the channels side by side: x [N, CHANNELS], contiguous.
//
// A lane holds one 32-bit word (two channels of 16 bits, one of 32) of some rows. The lanes of a
// warp are LANES words by 32 / LANES rows, which meet in shuffles; warps, if several, meet in
// shared memory, at one barrier. Everything is loaded before anything is used.
//
// Macros, beside those of channel.cuh. CHANNELS: a multiple of a word's. LANES: words of a CTA, 4
// to 32. WARPS: a CTA's. ROWS: a lane's, at most.

constexpr int VALUES = 4 / VALUE_BYTES;
constexpr u32 ROW_WORDS = CHANNELS / VALUES;
constexpr u32 STEP = 32 / LANES * WARPS;  // rows of a CTA at once
constexpr bool FULL = ROW_WORDS % LANES == 0;

struct Column {
    u32 lane, first, word, rows;  // lane: among LANES; first: row

    __device__ Column(u32 n) {
        lane = threadIdx.x % LANES;
        first = threadIdx.x / LANES;
        word = blockIdx.x * LANES + lane;
        rows = FULL || word < ROW_WORDS ? n : 0;
    }
    __device__ bool inside(int i) const { return i * STEP + first < rows; }
    __device__ i64 offset(int i) const {
        return (i64)(first * ROW_WORDS + word) * 4 + (i64)i * (STEP * ROW_WORDS * 4);
    }
    __device__ u32 channel() const { return (FULL || rows ? word : 0) * VALUES; }
    __device__ bool leader() const { return (FULL || rows) && first == 0; }
};

__device__ void load_rows(const Column& at, const char* x, Words<1> (&xs)[ROWS]) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        xs[i] = {};
        if (at.inside(i)) xs[i] = load_in_order<1>(x + at.offset(i));
    }
}

// A column's part in a warp to all warps, which find the WARPS parts from what is returned on.
__device__ const float4* exchange(const Column& at, const float4 (&mine)[VALUES]) {
    __shared__ float4 slots[VALUES][WARPS][LANES];
    if (threadIdx.x % 32 < LANES) {
#pragma unroll
        for (int j = 0; j < VALUES; ++j) slots[j][threadIdx.x / 32][at.lane] = mine[j];
    }
    __syncthreads();
    return &slots[0][0][at.lane];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
channel_columns_forward(const char* x, void* rm, void* rv, const void* w, const void* b, char* y,
                        float* mean_out, float* rstd_out, i64 n, float inverse_count,
                        float unbiased, float eps, float momentum) {
    const Column at(n);
    Words<1> xs[ROWS];
    const Channels<VALUES> own(w, b, rm, rv, at.channel());
    load_rows(at, x, xs);

    float count = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) count += at.inside(i);
    const float inverse = reciprocal(fmaxf(count, 1.0f));
    const LaneMerge<LANES, false> merge(count);
    float4 mine[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        float values[ROWS], squares[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) values[i] = value<TYPE>(xs[i], j);
        const float center = add_up(values) * inverse;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float distance = at.inside(i) ? values[i] - center : 0;
            squares[i] = distance * distance;
        }
        const Moments warp = merge(center, add_up(squares));
        mine[j] = {warp.n, warp.mean, warp.m2, 0};
    }
    const float4* parts = WARPS > 1 ? exchange(at, mine) : nullptr;
    float mean[VALUES], var[VALUES], rstd[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        Moments whole = {mine[j].x, mine[j].y, mine[j].z};
        if constexpr (WARPS > 1)
            whole = merge_parts<WARPS>(parts + j * WARPS * LANES, LANES, inverse_count);
        mean[j] = whole.mean;
        var[j] = whole.m2 * unbiased;
        rstd[j] = rsqrtf(whole.m2 * inverse_count + eps);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        Values<1> out;
#pragma unroll
        for (int j = 0; j < VALUES; ++j)
            out[j] = (value<TYPE>(xs[i], j) - mean[j]) * (rstd[j] * own.at[j].weight) +
                     own.at[j].bias;
        if (at.inside(i)) store_values<1>(y + at.offset(i), out);
    }
    if (!at.leader()) return;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        const u32 channel = at.channel() + j;
        if (mean_out) mean_out[channel] = mean[j];
        if (rstd_out) rstd_out[channel] = rstd[j];
        if constexpr (HAS_RUNNING)
            move_running(rm, rv, channel, own.at[j], mean[j], var[j], momentum);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
channel_columns_backward(const char* g, const char* x, const void* w, const float* means,
                         const float* rstds, char* d, void* gw, void* gb, i64 n,
                         float inverse_count) {
    const Column at(n);
    Words<1> gs[ROWS], xs[ROWS];
    float mean[VALUES], rstd[VALUES], weight[VALUES];
    load_many<F32>(means, at.channel(), mean);
    load_many<F32>(rstds, at.channel(), rstd);
#pragma unroll
    for (int j = 0; j < VALUES; ++j) weight[j] = 1;
    if constexpr (HAS_WEIGHT) load_many<WEIGHT_TYPE>(w, at.channel(), weight);
    load_rows(at, x, xs);
    load_rows(at, g, gs);

    float4 mine[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        float of_g[ROWS], of_gx[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            of_g[i] = value<TYPE>(gs[i], j);
            of_gx[i] = of_g[i] * (value<TYPE>(xs[i], j) - mean[j]);
        }
        mine[j] = {lane_sum<LANES>(add_up(of_g)), lane_sum<LANES>(add_up(of_gx)), 0, 0};
    }
    const float4* parts = WARPS > 1 ? exchange(at, mine) : nullptr;
    float scale[VALUES], shift[VALUES], slope[VALUES];
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        float2 sums = {mine[j].x, mine[j].y};
        if constexpr (WARPS > 1) {
            sums = {};
#pragma unroll
            for (int p = 0; p < WARPS; ++p) {
                const float4 part = parts[(j * WARPS + p) * LANES];
                sums.x += part.x;
                sums.y += part.y;
            }
        }
        mine[j].x = sums.x;
        mine[j].y = sums.y * rstd[j];
        scale[j] = rstd[j] * weight[j];
        shift[j] = sums.x * inverse_count;
        slope[j] = mine[j].y * rstd[j] * inverse_count;
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
    if (!at.leader()) return;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) {
        if (gw) store_one<WEIGHT_TYPE>(gw, at.channel() + j, mine[j].y);
        if (gb) store_one<WEIGHT_TYPE>(gb, at.channel() + j, mine[j].x);
    }
}
