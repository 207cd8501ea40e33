// mhc_post: x_out[b, i, :] = h_post[b, i] * x_layer_out[b, :] + x_res[b, i, :] for each stream i < N.
// x_layer_out [B, columns], x_res [B, N * columns] of type T, h_post [B, N] f32; x_out contiguous.
// f32 arithmetic. A thread takes one vector of columns of PER streams; grid (B, N / PER, column blocks).
//
// Macros: T; N; PER: streams a thread, divides N; VECTOR: elements loaded at once; DENSE: the last dim of
// all three has stride 1 (else VECTOR is 1); THREADS.

using TVector = Vector<T, VECTOR>;

extern "C" __global__ void __launch_bounds__(THREADS) mhc_post(
    const T* layer, const float* h, const T* res, T* out, i64 columns, i64 stride_lb, i64 stride_lc, i64 stride_hb,
    i64 stride_hn, i64 stride_rb, i64 stride_rc) {
    const i64 row = blockIdx.x;
    const int first = blockIdx.y * PER;
    const int column = (blockIdx.z * THREADS + threadIdx.x) * VECTOR;
    if (column >= columns) return;
    // All loads first: their latency is the kernel's time.
    TVector a[PER], l;
    float by[PER];
#pragma unroll
    for (int s = 0; s < PER; ++s) {
        const i64 at = (first + s) * columns + column;
        a[s] = *reinterpret_cast<const TVector*>(res + row * stride_rb + (DENSE ? at : at * stride_rc));
    }
    l = *reinterpret_cast<const TVector*>(layer + row * stride_lb + (DENSE ? column : column * stride_lc));
#pragma unroll
    for (int s = 0; s < PER; ++s) by[s] = h[row * stride_hb + (first + s) * (DENSE ? 1 : stride_hn)];
#pragma unroll
    for (int s = 0; s < PER; ++s) {
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) round_to(a[s].at[e], by[s] * to_float(l.at[e]) + to_float(a[s].at[e]));
        *reinterpret_cast<TVector*>(out + (row * N + first + s) * columns + column) = a[s];
    }
}
