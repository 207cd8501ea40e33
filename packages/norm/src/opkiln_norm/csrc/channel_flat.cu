// Channel norms by given statistics: an elementwise kernel, a vector a thread.
//
// x and y are contiguous [N, CHANNELS, COLS]; a set is a plane. Macros, beside those of channel.cuh:
// CHANNELS; COLS; VECTOR_BYTES, 16, of which COLS is a multiple; THREADS.
//
// As short as can be, since nothing of it is in a cache at first: 4 x 256 x 28 x 28 in f16 takes 2.42 us
// on an H200, 2.64 by teams of warps (80679ba, 2026-12-01).

constexpr int WORDS = VECTOR_BYTES / 4;
constexpr int VALUES = VECTOR_BYTES / VALUE_BYTES;
constexpr u32 PLANE_VECTORS = COLS / VALUES;

extern "C" __global__ void __launch_bounds__(THREADS)
channel_flat_forward(const char* x, const void* rm, const void* rv, const void* w, const void* b,
                     char* y, float* mean_out, float* rstd_out, i64 sets, i64 samples, i64 saved,
                     float inverse_count, float unbiased, float eps, float momentum) {
    const u32 vector = blockIdx.x * THREADS + threadIdx.x, set = vector / PLANE_VECTORS;
    if (set >= (u32)sets) return;
    const i64 at = (i64)vector * VECTOR_BYTES;
    const Words<WORDS> xs = load_in_order<WORDS>(x + at);
    const Channel own = load_channel(w, b, rm, rv, set % CHANNELS);
    const float rstd = rsqrtf(own.var + eps), scale = rstd * own.weight;
    Values<WORDS> out;
#pragma unroll
    for (int j = 0; j < VALUES; ++j) out[j] = (value<TYPE>(xs, j) - own.mean) * scale + own.bias;
    store_values<WORDS>(y + at, out);
    if (set < (u32)saved && vector % PLANE_VECTORS == 0) {
        if (mean_out) mean_out[set] = own.mean;
        if (rstd_out) rstd_out[set] = rstd;
    }
}
