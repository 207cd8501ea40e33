// Convolution of stride 1 and one group by wgmma: a patch of the input lies in shared memory as rows
// of channels, every tap is a shift of whole rows in it.
//
// pack   x [n, c, d, h, w] -> xp [n, block, row, BLOCK channels]; row = (d * PLANE_ROWS + h) * PITCH
//        + w of the padded input, of which neighbouring lines and planes share their zeros;
//        w [o, c, tap] -> wp [block, tap, tile of M outputs, M, BLOCK channels]
// shift  out[n, o, p] = bias[o] + sum over blocks, taps of wp . xp[row of p + shift of tap]
//
// Rows are packed as wgmma wants them in shared memory, so that plain bulk copies fetch them: a row's
// 16-byte pieces are exchanged by the row's number, the swizzle as wide as a row. Patterns start at
// multiples of 1024 bytes, so that any row is a start of an operand, with base offset 0.
//
// A tile is M outputs x WIDTH positions: rows of the padded grid, outputs or not (its padding columns
// are computed and dropped). Two warpgroups take the tiles in turn, so that one stores while the other
// multiplies; one warp fetches patches, one weights, X_STAGES and W_STAGES ahead (0: all weights,
// once). Taps of one group (GROUP 0: all, 1: of a depth, 2: of a line) share a patch; groups that lie
// in the padding for the whole tile are not visited.
//
// Macros: T, CHANNELS, OUTS, HAS_BIAS; of (depth, height, width) sizes ID IH IW, outputs OD OH OW,
// kernel KD KH KW, padding PD PH PW, dilation DD DH DW; BLOCK, MB, WIDTH, GROUP, X_STAGES, W_STAGES;
// PACK_SHARED, SHARED: bytes.

DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }
DEVICE constexpr int gcd_of(int a, int b) { return b ? gcd_of(b, a % b) : a; }

constexpr int TAPS = KD * KH * KW, BLOCKS = (CHANNELS + BLOCK - 1) / BLOCK, PIECES = BLOCK / 8;
constexpr int M = 64 * MB;
constexpr int PITCH = max_of(max_of(OW, PW + IW), OW + (KW - 1) * DW - PW);
constexpr int PLANE_ROWS = max_of(max_of(OH, PH + IH), OH + (KH - 1) * DH - PH);
constexpr int PLANE = PLANE_ROWS * PITCH, PIXELS = OD * OH * OW;
constexpr int POSITIONS = ((OD - 1) * PLANE_ROWS + OH - 1) * PITCH + OW;
constexpr int TILES_M = (OUTS + M - 1) / M, TILES_N = (POSITIONS + WIDTH - 1) / WIDTH;
constexpr int GROUPS = GROUP == 0 ? 1 : GROUP == 1 ? KD : KD * KH, GROUP_TAPS = TAPS / GROUPS;

// Rows from a position to the input under its tap.
DEVICE constexpr int shift_of(int tap) {
    return (tap / (KH * KW) * DD * PLANE_ROWS + tap / KW % KH * DH) * PITCH + tap % KW * DW;
}
// The first row of a group's patch: a multiple of 8, where swizzle patterns start.
DEVICE constexpr int base_of(int group) { return shift_of(group * GROUP_TAPS) / 8 * 8; }
DEVICE constexpr int longest_reach() {
    int reach = 0;
    for (int g = 0; g < GROUPS; ++g)
        reach = max_of(reach, shift_of((g + 1) * GROUP_TAPS - 1) - base_of(g));
    return reach;
}
constexpr int PATCH = (WIDTH + longest_reach() + 7) / 8 * 8;  // rows
constexpr int ROWS = (TILES_N - 1) * WIDTH + base_of(GROUPS - 1) + PATCH;

constexpr int ROW_BYTES = 2 * BLOCK, STEPS = BLOCK / 16;
constexpr int PATCH_BYTES = PATCH * ROW_BYTES, W_BYTES = M * ROW_BYTES;
constexpr int X_STAGE = (PATCH_BYTES + 1023) / 1024 * 1024;
constexpr bool RESIDENT = W_STAGES == 0;
constexpr int W_SLOTS = RESIDENT ? BLOCKS * TAPS : W_STAGES;
constexpr int PASS = gcd_of(WIDTH, 64);  // columns that are staged at once
constexpr int STAGED = PASS + 8;         // pitch: 8 rows lie in different banks
constexpr int STAGING = 8 * 16 * STAGED * 2;
constexpr int RINGS = X_STAGES * X_STAGE + W_SLOTS * W_BYTES;
constexpr int BARRIERS = 2 * X_STAGES + 2 * (RESIDENT ? 1 : W_STAGES);
static_assert(SHARED == 1024 + RINGS + STAGING + 8 * BARRIERS, "shift.py counts so");
static_assert(BLOCK == 16 || BLOCK == 32 || BLOCK == 64);
static_assert(WIDTH % 8 == 0 && WIDTH <= 256 && CHANNELS % 8 == 0 && GROUPS <= 32);
static_assert(!RESIDENT || TILES_M == 1);

constexpr int PACK_ROWS = 128, PACK_OUTS = 8, PACK_THREADS = 256;
constexpr int W_PITCH = BLOCK * TAPS + 2;  // an odd count of words
static_assert(PACK_SHARED == max_of(PACK_ROWS * ROW_BYTES, PACK_OUTS * W_PITCH * 2));

// Which 16 bytes of its row a piece of channels is.
DEVICE int swizzled(int row, int piece) { return piece ^ (row * PIECES / 8 & (PIECES - 1)); }

DEVICE void put(u16* to, const u16 (&v)[8]) {
    Vector<u32, 4> words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.at[i] = v[2 * i] | static_cast<u32>(v[2 * i + 1]) << 16;
    *reinterpret_cast<Vector<u32, 4>*>(to) = words;
}

DEVICE void pack_x(const u16* x, u16* xp, u16* tile, int index) {
    constexpr int ROW_BLOCKS = (ROWS + PACK_ROWS - 1) / PACK_ROWS;
    const int first = index % ROW_BLOCKS * PACK_ROWS, block = index / ROW_BLOCKS % BLOCKS;
    const i64 image = index / ROW_BLOCKS / BLOCKS;
    x += (image * CHANNELS + block * BLOCK) * (i64)(ID * IH * IW);
    xp += (image * BLOCKS + block) * (i64)ROWS * BLOCK;
    constexpr int EVERY = PACK_THREADS / PACK_ROWS, COUNT = PIECES / EVERY;  // pieces of a thread
    const int local = threadIdx.x % PACK_ROWS, row = first + local;
    const int d = row / PLANE - PD, h = row % PLANE / PITCH - PH, w = row % PITCH - PW;
    const bool some = d >= 0 && d < ID && h >= 0 && h < IH && w >= 0 && w < IW;
    x += some ? (d * IH + h) * IW + w : 0;
    u16 v[COUNT][8];  // all loads are under way before the first is waited for
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const int channel = (threadIdx.x / PACK_ROWS + i * EVERY) * 8 + c;
            const bool known = CHANNELS % BLOCK == 0 || block * BLOCK + channel < CHANNELS;
            v[i][c] = some && known ? x[channel * (i64)(ID * IH * IW)] : 0;
        }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int piece = threadIdx.x / PACK_ROWS + i * EVERY;
        put(tile + local * BLOCK + swizzled(row, piece) * 8, v[i]);
    }
    __syncthreads();
    const int end = (ROWS - first < PACK_ROWS ? ROWS - first : PACK_ROWS) * PIECES;
    for (int i = threadIdx.x; i < end; i += PACK_THREADS)
        reinterpret_cast<Vector<u32, 4>*>(xp + (i64)first * BLOCK)[i] =
            reinterpret_cast<const Vector<u32, 4>*>(tile)[i];
}

DEVICE void pack_w(const u16* w, u16* wp, u16* tile, int index) {
    constexpr int EACH = BLOCK * TAPS / 8;
    const int block = index % BLOCKS, first = index / BLOCKS * PACK_OUTS;
#pragma unroll 4
    for (int i = threadIdx.x; i < PACK_OUTS * EACH; i += PACK_THREADS) {
        const int o = i / EACH, k = i % EACH * 8;
        Vector<u32, 4> v = {};
        if (first + o < OUTS && block * BLOCK * TAPS + k < CHANNELS * TAPS)
            v = *reinterpret_cast<const Vector<u32, 4>*>(
                w + ((i64)(first + o) * CHANNELS + block * BLOCK) * TAPS + k);
        u32* to = reinterpret_cast<u32*>(tile + o * W_PITCH + k);
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = v.at[j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TAPS * PACK_OUTS * PIECES; i += PACK_THREADS) {
        constexpr int EACH_TAP = PACK_OUTS * PIECES;
        const int o = i % EACH_TAP / PIECES, piece = i % PIECES, tap = i / EACH_TAP;
        u16 v[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] = tile[o * W_PITCH + (piece * 8 + c) * TAPS + tap];
        const int row = (first + o) % M;
        u16* to = wp + ((i64)(block * TAPS + tap) * TILES_M + (first + o) / M) * (M * BLOCK);
        put(to + row * BLOCK + swizzled(row, piece) * 8, v);
    }
}

// Grid: x_blocks, which is images * BLOCKS * row blocks, and BLOCKS * TILES_M * M / PACK_OUTS.
extern "C" __global__ void __launch_bounds__(PACK_THREADS)
pack(const u16* x, const u16* w, u16* xp, u16* wp, i64 x_blocks) {
    u16* tile = reinterpret_cast<u16*>(dynamic_shared());
    const int index = blockIdx.x;
    if (index < x_blocks) pack_x(x, xp, tile, index);
    else pack_w(w, wp, tile, index - x_blocks);
}
