// Convolution of contiguous tensors with few input channels, one launch: out[n, o, p] = bias[o] +
// sum over (channel, tap) of w[o, channel, tap] * x[n, channel, under the tap of p].
//
// A CTA computes BLOCK_M output channels x TILE_H rows of TILE_W pixels. It brings the input under
// them to shared memory as units: the same place of four channels, side by side, zeros where there
// is no channel or no input. So a unit of x (8 bytes) is what a lane of mma.m16n8k16 gives for one
// column and one tap: one 8-byte shared load, whatever the tap's shift. Weights are units too,
// [output][tap], and stay in registers: of a step of 16 products lane % 4 is the tap.
//
// WARPS / WM warps take blocks of 32 pixels in turn, WM warps MT * 16 channels each. A block is
// four vectors of 8 neighbouring pixels; the columns of its four products are dealt so that a lane
// ends up with one vector of each of its channels: the output leaves in 16-byte stores, without
// exchange. Blocks of rows of 32 pixels, with narrower stores, are dealt in runs of RUN pixels.
//
// Macros: T; GROUPS; CHANNELS, OUTS of a group; of (depth, height, width) sizes ID IH IW, outputs
// OD OH OW, kernel KD KH KW, stride SD SH SW, padding PD PH PW, dilation DD DH DW; HAS_BIAS;
// TILE_H, TILE_W (of 8 pixels), WARPS, WM, MT, RESIDENT CTAs of a multiprocessor; V, VO: elements
// of an access to x and the output; SHARED: bytes of shared memory.

constexpr int TAPS = KD * KH * KW, TERMS = CHANNELS * TAPS, QUARTETS = (CHANNELS + 3) / 4;
constexpr int UNITS = QUARTETS * TAPS, STEPS = (UNITS + 3) / 4;
constexpr int THREADS = 32 * WARPS, BLOCK_M = 16 * WM * MT;
constexpr int LEFT = (PW + 3) / 4 * 4;  // columns before the first pixel: PW, made whole vectors
constexpr int REACH = LEFT - PW + (TILE_W - 1) * SW + (KW - 1) * DW + 1, QUADS = (REACH + 3) / 4;
// Neighbouring pixels of a lane.
constexpr int RUN = TILE_W % 32 ? 8 : VO > 2 ? VO : 2;
// Rows of taps lie FAR units apart, modulo twice that: half a warp seldom meets a bank twice.
constexpr int FAR = RUN == 8 ? 4 : 8, PITCH = (QUADS * 4 + FAR - 1) / FAR / 2 * 2 * FAR + FAR;
constexpr int ROWS = (TILE_H - 1) * SH + (KH - 1) * DH + 1, PLANES = QUARTETS * KD;
// Of a row, with some past its end where that makes divisions shifts.
constexpr int POWER = QUADS > 16 ? 32 : QUADS > 8 ? 16 : 8;
constexpr int SLOTS = QUADS <= POWER && QUADS * 8 > POWER * 7 ? POWER : QUADS;
constexpr int PIECES = SLOTS * ROWS * PLANES;
constexpr int PLANE = ROWS * PITCH + (ROWS + KH) % 2 * FAR;
constexpr int W_PITCH = STEPS * 4 + (STEPS % 2 ? 0 : 4);
constexpr int VECTORS = TILE_H * (TILE_W / 8), BLOCKS = (VECTORS + 3) / 4;
constexpr int OUT_ROWS = (OH + TILE_H - 1) / TILE_H, OUT_COLUMNS = (OW + TILE_W - 1) / TILE_W;
constexpr int OUT_BLOCKS = (OUTS + BLOCK_M - 1) / BLOCK_M;
constexpr int BATCH = 6, W_BATCH = 8;  // pieces, and units of weights, that a thread has under way
static_assert(TILE_W % 8 == 0 && WARPS % WM == 0);
static_assert(STEPS * MT <= 32, "the weights stay in registers");
static_assert(SHARED == 8 * (PLANES * PLANE + BLOCK_M * W_PITCH), "stem.py counts as this does");

typedef Vector<u32, 2> Unit;
typedef Vector<u32, 4> Units;  // two

struct Place { int channel, group, depth, row, column; i64 image; };  // of a tile: its first output

DEVICE Place place_of(u32 tile) {
    Place p;
    p.channel = tile % OUT_BLOCKS * BLOCK_M;
    tile /= OUT_BLOCKS;
    p.group = tile % GROUPS;
    tile /= GROUPS;
    p.column = tile % OUT_COLUMNS * TILE_W;
    tile /= OUT_COLUMNS;
    p.row = tile % OUT_ROWS * TILE_H;
    tile /= OUT_ROWS;
    p.depth = tile % OD;
    p.image = tile / OD;
    return p;
}

struct Quad { Unit of[4]; };  // four columns of four channels

// Four neighbouring inputs of each channel of a quartet.
DEVICE void load_quad(Quad& to, const u16* __restrict__ x, const Place& at, int i) {
    const int r = i / SLOTS % ROWS, plane = i / SLOTS / ROWS;
    const int kd = plane % KD, first = plane / KD * 4;
    const int d = at.depth * SD - PD + kd * DD, h = at.row * SH - PH + r;
    const int w = at.column * SW - LEFT + i % SLOTS * 4;
    const bool row = i < PIECES && d >= 0 && d < ID && h >= 0 && h < IH;
    const i64 channel = (at.image * GROUPS + at.group) * CHANNELS + first;
    const u16* from = x + channel * (ID * IH * IW) + (d * IH + h) * IW + w;
#pragma unroll
    for (int c = 0; c < 4; ++c, from += ID * IH * IW) {
        to.of[c] = {0, 0};
        if (c >= CHANNELS) continue;
        const bool some = row && first + c < CHANNELS;
#pragma unroll
        for (int e = 0; e < 4; e += V) {
            const bool inside = some && w + e >= 0 && w + e < IW;
            if constexpr (V == 4) {
                if (inside) to.of[c] = *reinterpret_cast<const Unit*>(from);
            } else if constexpr (V == 2) {
                if (inside) to.of[c].at[e / 2] = *reinterpret_cast<const u32*>(from + e);
            } else if (inside) {
                to.of[c].at[e / 2] |= static_cast<u32>(from[e]) << e % 2 * 16;
            }
        }
    }
}

// Units from the corner of a pixel's window to a unit of it.
DEVICE int shift_of(int unit) {
    if (unit >= UNITS) return 0;
    const int tap = unit % TAPS, plane = unit / TAPS * KD + tap / (KH * KW);
    return plane * PLANE + tap / KW % KH * DH * PITCH + tap % KW * DW + LEFT - PW;
}

DEVICE u32 lower(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
DEVICE u32 upper(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }

DEVICE void store_quad(Unit* patch, const Quad& q, int i) {
    if (i >= PIECES || i % SLOTS >= QUADS) return;
    const int row = i / SLOTS;
    Unit* to = patch + row / ROWS * PLANE + row % ROWS * PITCH + i % SLOTS * 4;
    Units half[2];
#pragma unroll
    for (int e = 0; e < 2; ++e)
        half[e] = {lower(q.of[0].at[e], q.of[1].at[e]), lower(q.of[2].at[e], q.of[3].at[e]),
                   upper(q.of[0].at[e], q.of[1].at[e]), upper(q.of[2].at[e], q.of[3].at[e])};
    // In turns, so that eight lanes meet all banks.
    const int turn = i / 4 % 2;
    Units* pairs = reinterpret_cast<Units*>(to);
    pairs[turn] = turn ? half[1] : half[0];
    pairs[1 - turn] = turn ? half[0] : half[1];
}

DEVICE void fetch_weights(Unit* weights, const u16* __restrict__ w, const Place& at) {
    w += (i64)(at.group * OUTS + at.channel) * TERMS;
    const int rows = OUTS - at.channel;  // of the group, from here on
    constexpr int COUNT = BLOCK_M * STEPS * 4;
    for (int begin = threadIdx.x; begin < COUNT; begin += W_BATCH * THREADS) {
        u32 found[W_BATCH][4];
#pragma unroll
        for (int b = 0; b < W_BATCH; ++b) {
            const int i = begin + b * THREADS, row = i / (STEPS * 4), unit = i % (STEPS * 4);
            const int channel = unit / TAPS * 4;
            const u16* from = w + row * TERMS + channel * TAPS + unit % TAPS;
            const bool some = i < COUNT && row < rows;
#pragma unroll
            for (int c = 0; c < 4; ++c)
                found[b][c] = some && c < CHANNELS && channel + c < CHANNELS ? from[c * TAPS] : 0;
        }
#pragma unroll
        for (int b = 0; b < W_BATCH; ++b) {
            const int i = begin + b * THREADS, row = i / (STEPS * 4), unit = i % (STEPS * 4);
            const u32 (&of)[4] = found[b];
            if (i < COUNT)
                weights[row * W_PITCH + unit] = {of[0] | of[1] << 16, of[2] | of[3] << 16};
        }
    }
}

// The weights and the patch, whose first pieces are under way meanwhile.
DEVICE void fetch(Unit* patch, Unit* weights, const u16* __restrict__ x,
                  const u16* __restrict__ w, const Place& at) {
    Quad quads[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) load_quad(quads[b], x, at, threadIdx.x + b * THREADS);
    fetch_weights(weights, w, at);
    for (int i = threadIdx.x; i < PIECES; i += BATCH * THREADS) {
        if (i >= BATCH * THREADS)
#pragma unroll
            for (int b = 0; b < BATCH; ++b) load_quad(quads[b], x, at, i + b * THREADS);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) store_quad(patch, quads[b], i + b * THREADS);
    }
}

DEVICE void load_weights(u32 (&a)[MT][4], const Unit* row) {
#pragma unroll
    for (int m = 0; m < MT; ++m, row += 16 * W_PITCH) {
        const Unit low = row[0], high = row[8 * W_PITCH];
        a[m][0] = low.at[0], a[m][1] = high.at[0], a[m][2] = low.at[1], a[m][3] = high.at[1];
    }
}

// Where a lane's pixels of product n start, in the block or, in runs of 8, the vector.
DEVICE constexpr int pixel_of(int n) { return n * 2 / RUN * 4 * RUN + n * 2 % RUN; }

// A lane's eight pixels of one output channel. left: pixels up to the end of the row.
DEVICE void store_vector(T* to, const u32 (&y)[4], int left) {
    if constexpr (VO == 8) {
        if (left > 0) store_16(to, y);
    } else {
        u16* halves = reinterpret_cast<u16*>(to);
#pragma unroll
        for (int e = 0; e < 8; e += VO) {
            const int pixel = pixel_of(e / 2) + e % 2;
            if (pixel >= left) continue;
            if constexpr (VO == 4) store_8(halves + pixel, y[e / 2], y[e / 2 + 1]);
            else if constexpr (VO == 2) *reinterpret_cast<u32*>(halves + pixel) = y[e / 2];
            else halves[pixel] = static_cast<u16>(y[e / 2] >> e % 2 * 16);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
stem(const u16* __restrict__ x, const u16* __restrict__ w, const T* __restrict__ bias, T* out) {
    Unit* patch = reinterpret_cast<Unit*>(dynamic_shared());
    Unit* weights = patch + PLANES * PLANE;
    const Place at = place_of(blockIdx.x);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp % WM, q = lane % 4;
    fetch(patch, weights, x, w, at);
    int shift[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) shift[s] = shift_of(s * 4 + q);
    const int channel = at.channel + wm * MT * 16 + lane / 4;  // and 8 farther, for each of MT
    float add[MT][2];
#pragma unroll
    for (int m = 0; m < 2 * MT; ++m) {
        const bool some = HAS_BIAS && channel + m * 8 < OUTS;
        add[m / 2][m % 2] = some ? to_float(bias[at.group * OUTS + channel + m * 8]) : 0;
    }
    __syncthreads();
    const Unit* const rows = weights + (wm * MT * 16 + lane / 4) * W_PITCH + q;
    u32 a[STEPS][MT][4];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) load_weights(a[s], rows + s * 4);
    const u32 keep = UNITS % 4 == 0 || q < UNITS % 4 ? 0xffffffffu : 0;  // of the last step
    constexpr i64 OF_CHANNEL = (i64)OD * OH * OW;
    T* const image = out + ((at.image * GROUPS + at.group) * OUTS + channel) * OF_CHANNEL +
                     (i64)at.depth * (OH * OW);
#pragma unroll 1
    for (int block = warp / WM; block < BLOCKS; block += WARPS / WM) {
        const int pair = lane / 8, mine = RUN == 8 ? block * 4 + pair : block * 4;
        const int v = mine < VECTORS ? mine : 0;  // the pixel of column 0 of the first product
        const Unit* corner = patch + v / (TILE_W / 8) * (SH * PITCH) + v % (TILE_W / 8) * (8 * SW) +
                             ((RUN == 8 ? 0 : pair * RUN) + lane / 4 % 2) * SW;
        float acc[MT][4][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 16; ++e) acc[m][e / 4][e % 4] = add[m][e % 4 / 2];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            Unit b[4];
            const Unit* from = corner + shift[s];
#pragma unroll
            for (int n = 0; n < 4; ++n) b[n] = from[pixel_of(n) * SW];
            if (UNITS % 4 != 0 && s == STEPS - 1)
#pragma unroll
                for (int n = 0; n < 4; ++n) b[n].at[0] &= keep, b[n].at[1] &= keep;
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int m = 0; m < MT; ++m)
                    multiply(acc[m][n], a[s][m], b[n].at[0], b[n].at[1], T());
        }
        const int own = RUN == 8 ? block * 4 + q : block * 4, row = at.row + own / (TILE_W / 8);
        const int column = at.column + own % (TILE_W / 8) * 8 + (RUN == 8 ? 0 : q * RUN);
        const int left = own < VECTORS && row < OH ? OW - column : 0;
        T* to = image + row * OW + column;
#pragma unroll
        for (int m = 0; m < 2 * MT; ++m) {
            u32 y[4];
#pragma unroll
            for (int n = 0; n < 4; ++n)
                y[n] = pair_of(acc[m / 2][n][m % 2 * 2], acc[m / 2][n][m % 2 * 2 + 1], T());
            if (channel + m * 8 < OUTS) store_vector(to + m * 8 * OF_CHANNEL, y, left);
        }
    }
}
