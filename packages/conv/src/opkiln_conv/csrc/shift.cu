// Convolution of stride 1 and one group by wgmma: a patch of the input lies in shared memory as rows
// of channels, every tap is a shift of whole rows in it.
//
// pack   x [n, c, d, h, w] -> xp [n, block, row, BLOCK channels]; row = (d * PLANE_ROWS + h) * PITCH + w
//        of the padded input, of which neighbouring lines and planes share their zeros;
//        w [o, c, tap] -> wp [block, tap, tile of M outputs, M, BLOCK channels]
// shift  out[n, o, p] = bias[o] + sum over blocks, taps of wp . xp[row of p + shift of tap]
//
// Rows are packed in the order in which wgmma wants them in shared memory, so that plain bulk copies
// fetch them. SWIZZLE 1: a row's 16-byte pieces are exchanged by the row's number (the swizzle as
// wide as a row); 0: [piece][row][8 channels]. In both a row is as good a start of an operand as any.
//
// A tile is M outputs x N positions: rows of the padded grid, outputs or not (its padding columns are
// computed and dropped). Two warpgroups multiply, WM of them along the outputs, each MB x NB products
// of 64 x WIDTH; one warp fetches patches, one weights, X_STAGES and W_STAGES ahead (0: all weights,
// once). ALTERNATE: each takes every second tile alone, so that one
// stores while the other multiplies. Taps of one group (GROUP 0: all, 1: of a depth, 2: of a line) share a patch; groups that lie
// in the padding for the whole tile are not visited. The SPLIT CTAs of a cluster share a tile's blocks
// and groups, and add up. MATES 2: CTAs of two neighbouring tiles fetch each other's weights.
//
// Macros: T, CHANNELS, OUTS, HAS_BIAS; of (depth, height, width) sizes ID IH IW, outputs OD OH OW,
// kernel KD KH KW, padding PD PH PW, dilation DD DH DW; BLOCK, WM, MB, NB, WIDTH, GROUP, X_STAGES,
// W_STAGES, SPLIT, MATES, ALTERNATE, SWIZZLE; PACK_SHARED, SHARED: bytes.

DEVICE constexpr int max_of(int a, int b) { return a > b ? a : b; }
DEVICE constexpr int gcd_of(int a, int b) { return b ? gcd_of(b, a % b) : a; }

constexpr int TAPS = KD * KH * KW, BLOCKS = (CHANNELS + BLOCK - 1) / BLOCK, PIECES = BLOCK / 8;
constexpr int WN = (ALTERNATE ? 1 : 2) / WM, M = 64 * MB * WM, N = WIDTH * NB * WN;
constexpr int TILE_WARPS = ALTERNATE ? 4 : 8;  // that multiply for a tile
constexpr int PITCH = max_of(max_of(OW, PW + IW), OW + (KW - 1) * DW - PW);
constexpr int PLANE_ROWS = max_of(max_of(OH, PH + IH), OH + (KH - 1) * DH - PH);
constexpr int PLANE = PLANE_ROWS * PITCH, PIXELS = OD * OH * OW;
constexpr int POSITIONS = ((OD - 1) * PLANE_ROWS + OH - 1) * PITCH + OW;
constexpr int FLAT_TILES = (POSITIONS + N - 1) / N, OF_PLANE = ((OH - 1) * PITCH + OW + N - 1) / N;
// Tiles start anew with each plane where that spares some.
constexpr bool BY_PLANE = !SWIZZLE && OD * OF_PLANE < FLAT_TILES && OF_PLANE * N <= PLANE;
constexpr int TILES_M = (OUTS + M - 1) / M;
constexpr int TILES_N = ((BY_PLANE ? OD * OF_PLANE : FLAT_TILES) + MATES - 1) / MATES * MATES;
DEVICE constexpr int first_of(int tile) {
    return BY_PLANE ? tile / OF_PLANE * PLANE + tile % OF_PLANE * N : tile * N;
}
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
constexpr int PATCH = (N + longest_reach() + 7) / 8 * 8;  // rows
constexpr int ROWS = first_of(TILES_N - 1) + base_of(GROUPS - 1) + PATCH;

constexpr int ROW_BYTES = 2 * BLOCK, STEPS = BLOCK / 16;
constexpr int PATCH_BYTES = PATCH * ROW_BYTES, W_BYTES = M * ROW_BYTES;
constexpr int X_STAGE = (PATCH_BYTES + 1023) / 1024 * 1024;
constexpr bool RESIDENT = W_STAGES == 0;
constexpr int W_SLOTS = RESIDENT ? BLOCKS * TAPS : W_STAGES;
constexpr int PASS = gcd_of(WIDTH, 64);  // columns that are staged at once
constexpr int STAGED = PASS + 8;                         // pitch: 8 rows lie in different banks
constexpr int STAGING = SPLIT > 1 ? 0 : 8 * 16 * STAGED * 2;
constexpr int RINGS = X_STAGES * X_STAGE + W_SLOTS * W_BYTES;
constexpr int SUM_PITCH = N + (40 - N % 32) % 32;  // of partial sums: 8 modulo 32 banks
static_assert(SPLIT == 1 || M * SUM_PITCH * 4 <= RINGS);
constexpr int BARRIERS = 2 * X_STAGES + 2 * (RESIDENT ? 1 : W_STAGES);
static_assert(SHARED == 1024 + RINGS + STAGING + 8 * BARRIERS, "shift.py counts so");
static_assert(BLOCK == 16 || BLOCK == 32 || BLOCK == 64);
static_assert(WIDTH % 8 == 0 && WIDTH <= 256 && CHANNELS % 8 == 0 && GROUPS <= 32);
static_assert(!RESIDENT || (TILES_M == 1 && SPLIT == 1 && MATES == 1));
static_assert(MATES == 1 || (MATES == 2 && SPLIT == 1));
static_assert(!ALTERNATE || (WM == 1 && SPLIT == 1));

// ------------------------------------------------------------------------------------------- pack

constexpr int PACK_ROWS = 128, PACK_OUTS = 8, PACK_THREADS = 256;
constexpr int W_PITCH = BLOCK * TAPS + 2;  // an odd count of words
static_assert(PACK_SHARED == max_of(PACK_ROWS * ROW_BYTES, PACK_OUTS * W_PITCH * 2));

// Which 16 bytes of its row a piece of channels is.
DEVICE int swizzled(int row, int piece) { return piece ^ (row * PIECES / 8 & (PIECES - 1)); }

struct Piece { u32 words[4]; };

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
        if (SWIZZLE) put(tile + local * BLOCK + swizzled(row, piece) * 8, v[i]);
        else if (row < ROWS) put(xp + ((i64)piece * ROWS + row) * 8, v[i]);
    }
    if (!SWIZZLE) return;
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
        const int fast = SWIZZLE ? PIECES : PACK_OUTS, slow = PACK_OUTS * PIECES;
        const int o = SWIZZLE ? i % slow / fast : i % fast;
        const int piece = SWIZZLE ? i % fast : i % slow / fast, tap = i / slow;
        u16 v[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] = tile[o * W_PITCH + (piece * 8 + c) * TAPS + tap];
        const int row = (first + o) % M;
        u16* to = wp + ((i64)(block * TAPS + tap) * TILES_M + (first + o) / M) * (M * BLOCK);
        put(to + (SWIZZLE ? row * BLOCK + swizzled(row, piece) * 8 : (piece * M + row) * 8), v);
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

// ------------------------------------------------------------------------------------------ shift

struct Tile {
    int m, first, part;  // tile of outputs; first position; part of SPLIT
    i64 image;
    u32 live;            // groups of which some tap lies over the input
};

DEVICE bool over(int first, int last, int shift, int size) {
    return last + shift >= 0 && first + shift < size;
}

DEVICE u32 live_groups(int first) {
    if (GROUP == 0) return 1;
    const int last = (first + N < POSITIONS ? first + N : POSITIONS) - 1;
    const int d0 = first / PLANE, d1 = last / PLANE;
    const int h0 = d0 == d1 ? first % PLANE / PITCH : 0, h1 = d0 == d1 ? last % PLANE / PITCH : OH - 1;
    u32 live = 0;
    for (int g = 0; g < GROUPS; ++g) {
        const int kd = GROUP == 1 ? g : g / KH, kh = GROUP == 1 ? 0 : g % KH;
        const bool line = GROUP == 1 || over(h0, h1, kh * DH - PH, IH);
        if (line && over(d0, d1, kd * DD - PD, ID)) live |= 1u << g;
    }
    return live;
}

DEVICE Tile tile_of(i64 work) {
    Tile t;
    t.part = work % SPLIT;
    work /= SPLIT;
    const int mate = work % MATES;
    work /= MATES;
    t.m = work % TILES_M;
    work /= TILES_M;
    const int n = work % (TILES_N / MATES) * MATES;
    t.first = first_of(n + mate);
    t.image = work / (TILES_N / MATES);
    t.live = live_groups(first_of(n)) | (MATES == 2 ? live_groups(first_of(n + 1)) : 0);
    return t;
}

// visit(block, group) for the tile's share of what is live, in one order for all roles.
template <typename F>
DEVICE void each_item(const Tile& t, F visit) {
    const int items = BLOCKS * __popc(t.live);
    const int begin = items * t.part / SPLIT, end = items * (t.part + 1) / SPLIT;
    int item = 0;
    for (int block = 0; block < BLOCKS; ++block)
        for (int group = 0; group < GROUPS; ++group) {
            if (!(t.live >> group & 1)) continue;
            if (item >= begin && item < end) visit(block, group);
            ++item;
        }
}

struct Pipes {
    unsigned char *patches, *weights, *staging;
    u64 *x_full, *x_empty, *w_full, *w_empty;
};

DEVICE Pipes pipes_of(unsigned char* memory) {
    Pipes p;
    p.patches = memory;
    p.weights = memory + X_STAGES * X_STAGE;
    p.staging = memory + RINGS;
    p.x_full = reinterpret_cast<u64*>(memory + RINGS + STAGING);
    p.x_empty = p.x_full + X_STAGES;
    p.w_full = p.x_empty + X_STAGES;
    p.w_empty = p.w_full + (RESIDENT ? 1 : W_STAGES);
    return p;
}

DEVICE void fetch_patches(const Pipes& p, const u16* xp, i64 work) {
    constexpr int AT_ONCE = 16384;
    u32 use = 0;
    for (i64 i = blockIdx.x; i < work; i += gridDim.x) {
        const Tile t = tile_of(i);
        each_item(t, [&](int block, int group) {
            const int slot = use % X_STAGES, row = t.first + base_of(group);
            if (use >= X_STAGES) wait_phase(p.x_empty + slot, use / X_STAGES - 1 & 1);
            ++use;
            u64* full = p.x_full + slot;
            unsigned char* to = p.patches + slot * X_STAGE;
            const u16* from = xp + (t.image * BLOCKS + block) * (i64)ROWS * BLOCK;
            arrive_expecting(full, PATCH_BYTES);
            if (SWIZZLE) {
                from += (i64)row * BLOCK;
                for (int b = 0; b < PATCH_BYTES; b += AT_ONCE)
                    copy_bulk(to + b, from + b / 2, min(PATCH_BYTES - b, AT_ONCE), full);
            } else {
                for (int piece = 0; piece < PIECES; ++piece)
                    copy_bulk(to + piece * PATCH * 16, from + ((i64)piece * ROWS + row) * 8,
                              PATCH * 16, full);
            }
        });
    }
}

DEVICE void fetch_weights(const Pipes& p, const u16* wp, i64 work) {
    if (RESIDENT) {
        arrive_expecting(p.w_full, W_SLOTS * W_BYTES);
        for (int i = 0; i < W_SLOTS; ++i)
            copy_bulk(p.weights + i * W_BYTES, wp + i * (W_BYTES / 2), W_BYTES, p.w_full);
        return;
    }
    u32 use = 0;
    for (i64 i = blockIdx.x; i < work; i += gridDim.x) {
        const Tile t = tile_of(i);
        each_item(t, [&](int block, int group) {
            for (int tap = group * GROUP_TAPS; tap < (group + 1) * GROUP_TAPS; ++tap, ++use) {
                const int slot = use % W_SLOTS;
                if (use >= W_SLOTS) wait_phase(p.w_empty + slot, use / W_SLOTS - 1 & 1);
                arrive_expecting(p.w_full + slot, W_BYTES);
                const u16* from = wp + ((i64)(block * TAPS + tap) * TILES_M + t.m) * (M * BLOCK);
                unsigned char* to = p.weights + slot * W_BYTES;
                if constexpr (MATES == 1) copy_bulk(to, from, W_BYTES, p.w_full + slot);
                else {  // half of them, to both
                    const u32 at = cluster_rank() * (W_BYTES / 2);
                    copy_bulk_to_both(to + at, from + at / 2, W_BYTES / 2, p.w_full + slot);
                }
            }
        });
    }
}

// Of an operand of `rows` rows in shared memory that starts at `row`, from product 16 * step on.
template <int OPERAND_ROWS>
DEVICE u64 operand(u32 memory, int row, int step) {
    constexpr u64 LAYOUT = SWIZZLE == 0 ? 0 : BLOCK == 64 ? 1 : BLOCK == 32 ? 2 : 3;
    constexpr u64 BETWEEN_8 = SWIZZLE ? 8 * ROW_BYTES : 128, BETWEEN_PIECES = SWIZZLE ? 16 : OPERAND_ROWS * 16;
    constexpr u64 FIXED = LAYOUT << 62 | BETWEEN_8 / 16 << 32 | BETWEEN_PIECES / 16 << 16;
    const u32 start = memory + (SWIZZLE ? row * ROW_BYTES + step * 32 : (2 * step * OPERAND_ROWS + row) * 16);
    return FIXED | (start & 0x3ffff) / 16;  // base offset 0: patterns start at multiples of 1024
}

typedef float Sums[MB][NB][WIDTH / 2];

// Among those that share a tile.
DEVICE int warpgroup() { return ALTERNATE ? 0 : threadIdx.x / 128; }

// A warp is done with these weights: lane 0 tells its CTA, lane 1 the other one.
DEVICE void free_weights(u64* empty) {
    if constexpr (MATES == 1) {
        if (threadIdx.x % 32 == 0) arrive(empty);
    } else {
        if (threadIdx.x % 32 < 2) arrive_at(empty, threadIdx.x % 32);
    }
}

// Reads of the sums stay behind this.
DEVICE void keep_in_place(Sums& acc) {
#pragma unroll
    for (int m = 0; m < MB; ++m)
#pragma unroll
        for (int n = 0; n < NB; ++n)
#pragma unroll
            for (int i = 0; i < WIDTH / 2; ++i) keep(acc[m][n][i]);
}

// The products of one tile. x_use, w_use: patches and weights that this CTA has used before it.
// issued() is called once all are under way.
template <typename F>
DEVICE void multiply_tile(Sums& acc, const Pipes& p, const Tile& t, u32& x_use, u32& w_use, F issued) {
    const int group_m = warpgroup() % WM, group_n = warpgroup() / WM;
    const bool leads = threadIdx.x % 32 == 0;
    const u32 patches = shared_address(p.patches), weights = shared_address(p.weights);
    bool first = true;
    each_item(t, [&](int block, int group) {
        const u32 patch = patches + x_use % X_STAGES * X_STAGE;
        wait_phase(p.x_full + x_use % X_STAGES, x_use / X_STAGES & 1);
        for (int j = 0; j < GROUP_TAPS; ++j) {
            const int tap = group * GROUP_TAPS + j;
            const u32 slot = RESIDENT ? block * TAPS + tap : w_use % W_SLOTS;
            if (!RESIDENT) wait_phase(p.w_full + slot, w_use / W_SLOTS & 1);
            const u32 w = weights + slot * W_BYTES;
            const int row = shift_of(tap) - base_of(group) + group_n * NB * WIDTH;
            products_begin();
#pragma unroll
            for (int k = 0; k < STEPS; ++k)
#pragma unroll
                for (int m = 0; m < MB; ++m)
#pragma unroll
                    for (int n = 0; n < NB; ++n)
                        product(acc[m][n], operand<M>(w, (group_m * MB + m) * 64, k),
                                operand<PATCH>(patch, row + n * WIDTH, k));
            products_commit();
            products_wait<1>();  // all but this tap's are done: what they used is free
            if (!first) {
                if (!RESIDENT) free_weights(p.w_empty + (w_use - 1) % W_SLOTS);
                if (j == 0 && leads) arrive(p.x_empty + (x_use - 1) % X_STAGES);
            }
            first = false;
            ++w_use;
        }
        ++x_use;
    });
    issued();
    products_wait<0>();
    keep_in_place(acc);
    if (!first) {
        if (!RESIDENT) free_weights(p.w_empty + (w_use - 1) % W_SLOTS);
        if (leads) arrive(p.x_empty + (x_use - 1) % X_STAGES);
    }
}

// All warps of a cluster's CTAs that are still there.
DEVICE void meet_cluster() {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
}

// A position's coordinates, and the number of its output if it is one.
struct Cursor { int d, h, w, out; };
DEVICE Cursor cursor_at(int position) {
    const int d = position / PLANE, h = position % PLANE / PITCH, w = position % PITCH;
    return {d, h, w, (d * OH + h) * OW + w};
}
DEVICE bool is_output(const Cursor& c) { return c.w < OW && c.h < OH && c.d < OD; }
// A warp's 16 rows of PASS columns of a product: through shared memory, so that lanes lie along the
// pixels, by 2 bytes each, since outputs lie closer than positions and at any alignment.
DEVICE void store_pass(const float* acc, T* staging, T* out, int position, int channel, float bias_low,
                       float bias_high) {
    const int lane = threadIdx.x % 32;
    u32* to = reinterpret_cast<u32*>(staging + lane / 4 * STAGED) + lane % 4;
#pragma unroll
    for (int j = 0; j < PASS / 8; ++j) {
        to[j * 4] = rounded(acc[j * 4] + bias_low, acc[j * 4 + 1] + bias_low, T());
        to[j * 4 + 4 * STAGED] = rounded(acc[j * 4 + 2] + bias_high, acc[j * 4 + 3] + bias_high, T());
    }
    __syncwarp();
#pragma unroll
    for (int column = lane; column < PASS; column += 32) {
        const Cursor c = cursor_at(position + column);
        if (!is_output(c)) continue;
#pragma unroll
        for (int r = 0; r < 16; ++r)
            if (OUTS % M == 0 || channel + r < OUTS)
                out[r * (i64)PIXELS + c.out] = staging[r * STAGED + column];
    }
    __syncwarp();
}

DEVICE void store_tile(const Sums& acc, const Pipes& p, const Tile& t, const T* bias, T* out) {
    const int group_m = warpgroup() % WM, group_n = warpgroup() / WM;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T* staging = reinterpret_cast<T*>(p.staging) + warp * 16 * STAGED;
#pragma unroll
    for (int m = 0; m < MB; ++m) {
        const int channel = t.m * M + (group_m * MB + m) * 64 + warp % 4 * 16, low = channel + lane / 4;
        const float bias_low = HAS_BIAS && low < OUTS ? to_float(bias[low]) : 0;
        const float bias_high = HAS_BIAS && low + 8 < OUTS ? to_float(bias[low + 8]) : 0;
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            const int position = t.first + (group_n * NB + n) * WIDTH;
#pragma unroll
            for (int i = 0; i < WIDTH / PASS; ++i)
                store_pass(acc[m][n] + i * (PASS / 2), staging,
                           out + (t.image * OUTS + channel) * (i64)PIXELS, position + i * PASS,
                           channel, bias_low, bias_high);
        }
    }
}

// A CTA's sums [M, SUM_PITCH], for its cluster to add.
DEVICE void leave_sums(const Sums& acc, float* sums) {
    const int group_m = warpgroup() % WM, group_n = warpgroup() / WM;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MB; ++m)
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            const int row = (group_m * MB + m) * 64 + warp % 4 * 16 + lane / 4;
            float* to = sums + row * SUM_PITCH + (group_n * NB + n) * WIDTH + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < WIDTH / 8; ++j) {
                const float* c = acc[m][n] + j * 4;
                *reinterpret_cast<Vector<float, 2>*>(to + j * 8) = {c[0], c[1]};
                *reinterpret_cast<Vector<float, 2>*>(to + j * 8 + 8 * SUM_PITCH) = {c[2], c[3]};
            }
        }
}

// Every SPLIT-th row of the tile, over the CTAs of the cluster in the order of their ranks.
DEVICE void add_sums(float* sums, const Tile& t, const T* bias, T* out) {
    constexpr int V = gcd_of(4, gcd_of(OW, PITCH)), EACH = N / V;
    constexpr int WORDS = V > 1 ? V / 2 : 1;
    for (int i = threadIdx.x; i < (M + SPLIT - 1) / SPLIT * EACH; i += 256) {
        const int row = i / EACH * SPLIT + t.part, channel = t.m * M + row;
        const Cursor c = cursor_at(t.first + i % EACH * V);
        if (row >= M || channel >= OUTS || !is_output(c)) continue;
        float total[V];
        for (int e = 0; e < V; ++e) total[e] = HAS_BIAS ? to_float(bias[channel]) : 0;
#pragma unroll
        for (int rank = 0; rank < SPLIT; ++rank) {
            const auto found = *reinterpret_cast<const Vector<float, V>*>(
                peer(sums, rank) + row * SUM_PITCH + i % EACH * V);
            for (int e = 0; e < V; ++e) total[e] += found.at[e];
        }
        Vector<T, V> y;
        for (int e = 0; e < V; ++e) round_to(y.at[e], total[e]);
        const i64 at = (t.image * OUTS + channel) * (i64)PIXELS + c.out;
        if constexpr (V == 1) out[at] = y.at[0];
        else {
            Vector<u32, WORDS> words;
            for (int e = 0; e < WORDS; ++e)
                words.at[e] = bits_of(y.at[2 * e]) | bits_of(y.at[2 * e + 1]) << 16;
            *reinterpret_cast<Vector<u32, WORDS>*>(out + at) = words;
        }
    }
}

// Grid: CTAs that take the tiles in turn; where SPLIT CTAs share one, a CTA for each part.
extern "C" __global__ void __launch_bounds__(384, 1)
shift(const u16* xp, const u16* wp, const T* bias, T* out, i64 images) {
    const Pipes p = pipes_of(pattern_shared());
    const i64 work = images * TILES_N * TILES_M * SPLIT;
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES; ++i) {
            init_barrier(p.x_full + i, 1);
            init_barrier(p.x_empty + i, TILE_WARPS);
        }
        for (int i = 0; i < (RESIDENT ? 1 : W_STAGES); ++i) {
            init_barrier(p.w_full + i, 1);
            init_barrier(p.w_empty + i, TILE_WARPS * MATES);
        }
        publish_barriers();
    }
    if constexpr (MATES == 1) __syncthreads();
    else meet_cluster();
    if (threadIdx.x >= 256) {
        give_registers<40>();
        if (threadIdx.x == 256) fetch_patches(p, xp, work);
        if (threadIdx.x == 288) fetch_weights(p, wp, work);
        if constexpr (MATES * SPLIT > 1) meet_cluster();
        if constexpr (SPLIT > 1) meet_cluster();
    } else {
        take_registers<232>();
        u32 x_use = 0, w_use = 0;
        if (RESIDENT) wait_phase(p.w_full, 0);
        u32 turn = 0;
        for (i64 i = blockIdx.x; i < work; i += gridDim.x, ++turn) {
            const Tile t = tile_of(i);
            if (ALTERNATE && turn % 2 != threadIdx.x / 128) {  // the other warpgroup's
                x_use += BLOCKS * __popc(t.live);
                w_use += BLOCKS * __popc(t.live) * GROUP_TAPS;
                continue;
            }
            // Only one at a time waits for patches: a phase that is two ahead would look over.
            if (ALTERNATE && turn > 0) sync_some(2 + turn % 2, 256);
            Sums acc = {};
            multiply_tile(acc, p, t, x_use, w_use, [&] {
                if (ALTERNATE && i + gridDim.x < work) arrive_some(2 + (turn + 1) % 2, 256);
            });
            if constexpr (SPLIT == 1) store_tile(acc, p, t, bias, out);
            else {  // one tile a CTA, so that its patches and weights are done with
                float* sums = reinterpret_cast<float*>(p.patches);
                sync_some(1, 256);
                leave_sums(acc, sums);
                meet_cluster();
                add_sums(sums, t, bias, out);
                meet_cluster();  // others may still read the sums
            }
        }
        if constexpr (MATES > 1) meet_cluster();  // the other may still send weights
    }
}
