// Convolution of contiguous tensors in one launch: a patch of the input in shared memory, every tap a
// shift in it. out[n, o, p] = bias[o] + sum over k = (c, tap) of w[o, k] * x[n, under tap k of p].
//
// A CTA computes BLOCK_M output channels x TILE_H rows of TILE_W pixels, of CHANNELS / SPLIT input
// channels; the SPLIT CTAs of a cluster add up. It goes through its channels by CHUNK: their patch,
// zeros where it lies in the padding, and their weights as they lie, [channel][tap], are copied
// while the chunk before is multiplied. WM x WN x WK warps share a chunk: MT * 16 channels x NT * 8
// pixels each, and every WK-th step of 16 products. Weights are the row operand (ldmatrix); pixels
// come as 2-byte loads from the patch at `pixel + product`, offsets that are tabled, one load for
// the MT products. Sums meet in shared memory, in the order of ranks and warps.
//
// Macros: T; CHANNELS, OUTS; of (depth, height, width) sizes ID IH IW, outputs OD OH OW, kernel KD KH
// KW, stride SD SH SW, padding PD PH PW, dilation DD DH DW; HAS_BIAS; TILE_H, TILE_W, CHUNK, SPLIT,
// WM, WN, WK, MT, NT; APART: rows of a patch are stored for each KH; V, VW, VO: elements of an access
// to x, w and the output; SHARED: bytes of shared memory.

constexpr int TAPS = KD * KH * KW, TERMS = CHUNK * TAPS, STEPS = (TERMS + 15) / 16;
constexpr int THREADS = 32 * WM * WN * WK, BLOCK_M = 16 * WM * MT, COLUMNS = 8 * WN * NT;
constexpr int LEFT = (PW + V - 1) / V * V;  // columns before the first pixel: PW, made whole vectors
constexpr int REACH = LEFT - PW + (TILE_W - 1) * SW + (KW - 1) * DW + 1;
constexpr int PITCH = (REACH + V - 1) / V * V, VECTORS = PITCH / V;
constexpr int ROWS = APART ? KH * TILE_H : (TILE_H - 1) * SH + (KH - 1) * DH + 1;
constexpr int ROW_STEP = APART ? 1 : SH, KH_STEP = APART ? TILE_H : DH;  // rows of the patch
constexpr int PATCH = (CHUNK * KD * ROWS * PITCH + 7) / 8 * 8;
constexpr int W_PITCH = STEPS * 16 + 8;  // an odd count of 16 bytes: ldmatrix without conflicts
constexpr int STAGE = PATCH + BLOCK_M * W_PITCH, CHUNKS = CHANNELS / SPLIT / CHUNK;
constexpr int BUFFERS = CHUNKS > 1 ? 2 : 1;
constexpr int SUM_PITCH = COLUMNS + (40 - COLUMNS % 32) % 32;  // 8 modulo 32 banks
constexpr int ROWS_OF_RANK = BLOCK_M / SPLIT, GROUPS = TILE_H * TILE_W / VO;
constexpr int OUT_ROWS = (OH + TILE_H - 1) / TILE_H, OUT_COLUMNS = (OW + TILE_W - 1) / TILE_W;
constexpr int OUT_BLOCKS = (OUTS + BLOCK_M - 1) / BLOCK_M;
// The whole of an image's chunk as it lies: then even odd planes are copied by vectors.
constexpr bool WHOLE = V == 1 && LEFT == 0 && PITCH == IW && KD == 1 && ID == 1 && PD == 0 && PH == 0 &&
                       !APART && ROWS == IH && OUT_ROWS * OUT_COLUMNS == 1 && CHUNK * IH * IW % 8 == 0 &&
                       CHANNELS * IH * IW % 8 == 0;
static_assert(GROUPS * VO <= COLUMNS && CHUNKS * CHUNK * SPLIT == CHANNELS && BLOCK_M % SPLIT == 0);
static_assert(TERMS % 16 == 0 || CHUNKS == 1);
constexpr int STAGES = BUFFERS * STAGE * 2 + STEPS * 32, SUMS = 4 * WK * BLOCK_M * SUM_PITCH;
static_assert(SHARED == (STAGES > SUMS ? STAGES : SUMS), "patch.py counts as this does");

struct Place { int channel, depth, row, column; i64 image; };  // of a tile: its first output

DEVICE Place place_of(u32 tile) {
    Place p;
    p.channel = tile % OUT_BLOCKS * BLOCK_M;
    tile /= OUT_BLOCKS;
    p.column = tile % OUT_COLUMNS * TILE_W;
    tile /= OUT_COLUMNS;
    p.row = tile % OUT_ROWS * TILE_H;
    tile /= OUT_ROWS;
    p.depth = tile % OD;
    p.image = tile / OD;
    return p;
}

template <int COUNT>
DEVICE void fetch(u16* to, const u16* from, bool some) {
    if constexpr (COUNT == 1) *to = some ? *from : 0;
    else copy_async<2 * COUNT>(to, from, some);
}

// Elements from the start of the patch to the input of product k of the pixel in its corner.
DEVICE int shift_of(int k) {
    const int c = k / TAPS, kd = k % TAPS / (KH * KW), kh = k / KW % KH, kw = k % KW;
    return ((c * KD + kd) * ROWS + kh * KH_STEP) * PITCH + kw * DW;
}

DEVICE void fetch_patch(u16* patch, const u16* x, const Place& at, int channel) {
    x += (at.image * CHANNELS + channel) * (i64)(ID * IH * IW);
    if constexpr (WHOLE) {
        for (int i = threadIdx.x; i < CHUNK * IH * IW / 8; i += THREADS)
            fetch<8>(patch + i * 8, x + i * 8, true);
    } else {
        for (int i = threadIdx.x; i < CHUNK * KD * ROWS * VECTORS; i += THREADS) {
            const int row = i / VECTORS, r = row % ROWS, kd = row / ROWS % KD, c = row / ROWS / KD;
            const int d = at.depth * SD - PD + kd * DD, w = at.column * SW - LEFT + i % VECTORS * V;
            const int h = at.row * SH - PH + (APART ? r % TILE_H * SH + r / TILE_H * DH : r);
            const bool some = d >= 0 && d < ID && h >= 0 && h < IH && w >= 0 && w < IW;
            fetch<V>(patch + i * V, x + (some ? ((i64)(c * ID + d) * IH + h) * IW + w : 0), some);
        }
    }
}

DEVICE void fetch_weights(u16* weights, const u16* w, const Place& at, int channel) {
    constexpr int EACH = STEPS * 16 / VW;
#pragma unroll 8
    for (int i = threadIdx.x; i < BLOCK_M * EACH; i += THREADS) {
        const int row = i / EACH, k = i % EACH * VW;
        const bool some = at.channel + row < OUTS && k < TERMS;
        const i64 from = (i64)(at.channel + row) * (CHANNELS * TAPS) + channel * TAPS + k;
        fetch<VW>(weights + row * W_PITCH + k, w + (some ? from : 0), some);
    }
}

// The rank's rows of the tile, summed over ranks and warps.
DEVICE void store_tile(float* sums, const T* bias, T* out, const Place& at, u32 rank) {
    constexpr int F = VO < 4 ? VO : 4, WORDS = VO > 1 ? VO / 2 : 1;
    const i64 plane = (i64)OH * OW;
    for (int i = threadIdx.x; i < ROWS_OF_RANK * GROUPS; i += THREADS) {
        const int m = rank * ROWS_OF_RANK + i / GROUPS, pixel = i % GROUPS * VO;
        const int row = at.row + pixel / TILE_W, column = at.column + pixel % TILE_W;
        const int channel = at.channel + m;
        if (channel >= OUTS || row >= OH || column >= OW) continue;
        const float b = HAS_BIAS ? to_float(bias[channel]) : 0;
        float sum[VO];
        for (int j = 0; j < VO; ++j) sum[j] = b;
#pragma unroll
        for (int r = 0; r < SPLIT; ++r) {
            const float* part = (SPLIT > 1 ? peer(sums, r) : sums) + m * SUM_PITCH + pixel;
#pragma unroll
            for (int k = 0; k < WK; ++k, part += BLOCK_M * SUM_PITCH)
#pragma unroll
                for (int j = 0; j < VO; j += F) {
                    const auto found = *reinterpret_cast<const Vector<float, F>*>(part + j);
                    for (int e = 0; e < F; ++e) sum[j + e] += found.at[e];
                }
        }
        Vector<T, VO> y;
        for (int j = 0; j < VO; ++j) round_to(y.at[j], sum[j]);
        const i64 to = ((at.image * OUTS + channel) * OD + at.depth) * plane + (i64)row * OW + column;
        if constexpr (VO == 1) out[to] = y.at[0];
        else {
            Vector<u32, WORDS> words;  // which one instruction stores
            for (int j = 0; j < WORDS; ++j)
                words.at[j] = bits_of(y.at[2 * j]) | bits_of(y.at[2 * j + 1]) << 16;
            *reinterpret_cast<Vector<u32, WORDS>*>(out + to) = words;
        }
    }
}

// This warp's share of a chunk. corner: offsets of its pixels in the patch.
DEVICE void multiply_chunk(float (&acc)[MT][NT][4], const u16* patch, const u16* weights,
                           const u32* shifts, const int (&corner)[NT], int wm, int wk) {
    const int lane = threadIdx.x % 32, q = lane % 4;
    const u16* rows = weights + (wm * MT * 16 + lane % 16) * W_PITCH + lane / 16 * 8;
#pragma unroll 2
    for (int s = wk; s < STEPS; s += WK) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) load_matrices(a[m], rows + m * 16 * W_PITCH + s * 16);
        const u32 low = shifts[s * 8 + q], high = shifts[s * 8 + q + 4];
        u32 keep_low = 0xffffffffu, keep_high = 0xffffffffu;
        if constexpr (TERMS % 16 != 0) {  // products past the last: 0, whatever the input holds
            const int k = s * 16 + 2 * q;
            keep_low = (k < TERMS ? 0xffffu : 0) | (k + 1 < TERMS ? 0xffff0000u : 0);
            keep_high = (k + 8 < TERMS ? 0xffffu : 0) | (k + 9 < TERMS ? 0xffff0000u : 0);
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const u16* at = patch + corner[n];
            const u32 b0 = at[low & 0xffff] | static_cast<u32>(at[low >> 16]) << 16;
            const u32 b1 = at[high & 0xffff] | static_cast<u32>(at[high >> 16]) << 16;
#pragma unroll
            for (int m = 0; m < MT; ++m)
                multiply(acc[m][n], a[m], b0 & keep_low, b1 & keep_high, T());
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
patch(const u16* x, const u16* w, const T* bias, T* out) {
    u16* stages = reinterpret_cast<u16*>(dynamic_shared());
    u32* shifts = reinterpret_cast<u32*>(stages + BUFFERS * STAGE);  // of two neighbouring products
    float* sums = reinterpret_cast<float*>(stages);                 // once all is multiplied
    const u32 rank = SPLIT > 1 ? cluster_rank() : 0;
    const Place at = place_of(blockIdx.x / SPLIT);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wm = warp % WM, wn = warp / WM % WN, wk = warp / WM / WN;
    const int begin = rank * CHUNKS * CHUNK;
    fetch_weights(stages + PATCH, w, at, begin);
    fetch_patch(stages, x, at, begin);
    close_group();
    for (int i = threadIdx.x; i < STEPS * 8; i += THREADS)
        shifts[i] = (2 * i < TERMS ? shift_of(2 * i) : 0) |
                    (2 * i + 1 < TERMS ? shift_of(2 * i + 1) : 0) << 16;
    int corner[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int pixel = (wn * NT + n) * 8 + lane / 4, h = pixel / TILE_W;
        corner[n] = h < TILE_H ? h * ROW_STEP * PITCH + pixel % TILE_W * SW + LEFT - PW : 0;
    }
    float acc[MT][NT][4] = {};
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const u16* now = stages + chunk % BUFFERS * STAGE;
        wait_groups<0>();
        __syncthreads();
        if (chunk + 1 < CHUNKS) {
            u16* next = stages + (chunk + 1) % BUFFERS * STAGE;
            fetch_weights(next + PATCH, w, at, begin + (chunk + 1) * CHUNK);
            fetch_patch(next, x, at, begin + (chunk + 1) * CHUNK);
            close_group();
        }
        multiply_chunk(acc, now, now + PATCH, shifts, corner, wm, wk);
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int row = wk * BLOCK_M + (wm * MT + m) * 16 + lane / 4;
            float* to = sums + row * SUM_PITCH + (wn * NT + n) * 8 + lane % 4 * 2;
            const float* c = acc[m][n];
            *reinterpret_cast<Vector<float, 2>*>(to) = {c[0], c[1]};
            *reinterpret_cast<Vector<float, 2>*>(to + 8 * SUM_PITCH) = {c[2], c[3]};
        }
    if constexpr (SPLIT > 1) { cluster_arrive(); cluster_wait(); }
    else __syncthreads();
    store_tile(sums, bias, out, at, rank);
    if constexpr (SPLIT > 1) { cluster_arrive(); cluster_wait(); }  // others may still read the sums
}
