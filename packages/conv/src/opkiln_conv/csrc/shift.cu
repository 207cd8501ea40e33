// The convolution of shift_pack.cu, which comes before this and describes it.

struct Tile {
    int m, first;  // tile of outputs; first position
    i64 image;
    u32 live;      // groups of which some tap lies over the input
};

DEVICE bool over(int first, int last, int shift, int size) {
    return last + shift >= 0 && first + shift < size;
}

DEVICE u32 live_groups(int first) {
    if (GROUP == 0) return 1;
    const int last = (first + WIDTH < POSITIONS ? first + WIDTH : POSITIONS) - 1;
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
    t.m = work % TILES_M;
    work /= TILES_M;
    t.first = work % TILES_N * WIDTH;
    t.image = work / TILES_N;
    t.live = live_groups(t.first);
    return t;
}

// visit(block, group) for what is live, in one order for all roles.
template <typename F>
DEVICE void each_item(const Tile& t, F visit) {
    for (int block = 0; block < BLOCKS; ++block)
        for (int group = 0; group < GROUPS; ++group)
            if (t.live >> group & 1) visit(block, group);
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
            from += (i64)row * BLOCK;
            for (int b = 0; b < PATCH_BYTES; b += AT_ONCE)
                copy_bulk(to + b, from + b / 2, min(PATCH_BYTES - b, AT_ONCE), full);
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
                copy_bulk(p.weights + slot * W_BYTES, from, W_BYTES, p.w_full + slot);
            }
        });
    }
}

// Of an operand that starts at `row` of rows in shared memory, from product 16 * step on.
DEVICE u64 operand(u32 memory, int row, int step) {
    constexpr u64 LAYOUT = BLOCK == 64 ? 1 : BLOCK == 32 ? 2 : 3;  // the swizzle as wide as a row
    constexpr u64 BETWEEN_8 = 8 * ROW_BYTES;
    constexpr u64 FIXED = LAYOUT << 62 | BETWEEN_8 / 16 << 32 | 1 << 16;
    const u32 start = memory + row * ROW_BYTES + step * 32;
    return FIXED | (start & 0x3ffff) / 16;
}

typedef float Sums[MB][WIDTH / 2];

// Reads of the sums stay behind this.
DEVICE void keep_in_place(Sums& acc) {
#pragma unroll
    for (int m = 0; m < MB; ++m)
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) keep(acc[m][i]);
}

// The products of one tile. x_use, w_use: patches and weights that this CTA has used before it.
// issued() is called once all are under way.
template <typename F>
DEVICE void multiply_tile(Sums& acc, const Pipes& p, const Tile& t, u32& x_use, u32& w_use,
                          F issued) {
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
            const int row = shift_of(tap) - base_of(group);
            products_begin();
#pragma unroll
            for (int k = 0; k < STEPS; ++k)
#pragma unroll
                for (int m = 0; m < MB; ++m)
                    product(acc[m], operand(w, m * 64, k), operand(patch, row, k));
            products_commit();
            products_wait<1>();  // all but this tap's are done: what they used is free
            if (!first && leads) {
                if (!RESIDENT) arrive(p.w_empty + (w_use - 1) % W_SLOTS);
                if (j == 0) arrive(p.x_empty + (x_use - 1) % X_STAGES);
            }
            first = false;
            ++w_use;
        }
        ++x_use;
    });
    issued();
    products_wait<0>();
    keep_in_place(acc);
    if (!first && leads) {
        if (!RESIDENT) arrive(p.w_empty + (w_use - 1) % W_SLOTS);
        arrive(p.x_empty + (x_use - 1) % X_STAGES);
    }
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
        to[j * 4] = pair_of(acc[j * 4] + bias_low, acc[j * 4 + 1] + bias_low, T());
        to[j * 4 + 4 * STAGED] = pair_of(acc[j * 4 + 2] + bias_high, acc[j * 4 + 3] + bias_high, T());
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T* staging = reinterpret_cast<T*>(p.staging) + warp * 16 * STAGED;
#pragma unroll
    for (int m = 0; m < MB; ++m) {
        const int channel = t.m * M + m * 64 + warp % 4 * 16, low = channel + lane / 4;
        const float bias_low = HAS_BIAS && low < OUTS ? to_float(bias[low]) : 0;
        const float bias_high = HAS_BIAS && low + 8 < OUTS ? to_float(bias[low + 8]) : 0;
#pragma unroll
        for (int i = 0; i < WIDTH / PASS; ++i)
            store_pass(acc[m] + i * (PASS / 2), staging,
                       out + (t.image * OUTS + channel) * (i64)PIXELS, t.first + i * PASS, channel,
                       bias_low, bias_high);
    }
}

// Grid: CTAs that take the tiles in turn.
extern "C" __global__ void __launch_bounds__(384, 1)
shift(const u16* xp, const u16* wp, const T* bias, T* out, i64 images) {
    const Pipes p = pipes_of(pattern_shared());
    const i64 work = images * TILES_N * TILES_M;
    if (threadIdx.x == 0) {
        for (int i = 0; i < X_STAGES; ++i) {
            init_barrier(p.x_full + i, 1);
            init_barrier(p.x_empty + i, 4);
        }
        for (int i = 0; i < (RESIDENT ? 1 : W_STAGES); ++i) {
            init_barrier(p.w_full + i, 1);
            init_barrier(p.w_empty + i, 4);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        give_registers<40>();
        if (threadIdx.x == 256) fetch_patches(p, xp, work);
        if (threadIdx.x == 288) fetch_weights(p, wp, work);
    } else {
        take_registers<232>();
        u32 x_use = 0, w_use = 0;
        if (RESIDENT) wait_phase(p.w_full, 0);
        u32 turn = 0;
        for (i64 i = blockIdx.x; i < work; i += gridDim.x, ++turn) {
            const Tile t = tile_of(i);
            if (turn % 2 != threadIdx.x / 128) {  // the other warpgroup's
                x_use += BLOCKS * __popc(t.live);
                w_use += BLOCKS * __popc(t.live) * GROUP_TAPS;
                continue;
            }
            // Only one at a time waits for patches: a phase that is two ahead would look over.
            if (turn > 0) sync_some(2 + turn % 2, 256);
            Sums acc = {};
            multiply_tile(acc, p, t, x_use, w_use, [&] {
                if (i + gridDim.x < work) arrive_some(2 + (turn + 1) % 2, 256);
            });
            store_tile(acc, p, t, bias, out);
        }
    }
}
