// topk_selector's rows, and how a CTA copies them ahead of the selection: see topk.cu, its macros too.

constexpr int WARPS = THREADS / 32;
constexpr int SCORES = 4 * UNROLL;        // of a thread in a round
constexpr int GRANULE = 32 * UNROLL;      // vectors of a warp in a round
constexpr int OWN_SAMPLES = 4096 / THREADS < 4 ? 4 : 4096 / THREADS > SCORES ? SCORES : 4096 / THREADS;
constexpr int SAMPLE = THREADS * OWN_SAMPLES;  // of a round
constexpr int ENTRIES = CAPACITY / THREADS;
constexpr int BINS = 2048;
constexpr int OWN_BINS = BINS / THREADS;  // a thread's
static_assert(CAPACITY % (2 * THREADS) == 0 && SCORES <= 32 && BINS % THREADS == 0, "sizes");

struct Row {
    const float* scores;
    i64 stride;
    int start, end;
    DEVICE float at(int position) const { return scores[position * stride]; }
};

struct Task {
    const float* scores;
    const START* starts;
    const END* ends;
    u32 rows, length, groups;
    i64 kv, stride_xb, stride_xs, stride_xkv, stride_xg, stride_sb, stride_ss, stride_eb, stride_es;
    int topk;

    template <typename I>
    DEVICE int clamped(I value) const { return static_cast<int>(value < 0 ? 0 : value > kv ? kv : value); }
    DEVICE Row row(u32 i) const {
        const u32 outer = i / groups, group = i - outer * groups;
        const u32 batch = outer / length, query = outer - batch * length;
        return {scores + batch * stride_xb + query * stride_xs + group * stride_xg, stride_xkv,
                clamped(starts[batch * stride_sb + query * stride_ss]),
                clamped(ends[batch * stride_eb + query * stride_es])};
    }
    DEVICE bool takes_all(const Row& row) const { return row.end - row.start <= topk; }
};

// What a warp streams of a row: `vectors` lie from this lane's first one to the row's end.
struct Share {
    int head, tail;  // whole vectors lie between these positions
    int first, rounds, vectors;
};
DEVICE Share share_of(const Row& row) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = static_cast<int>((row.start + 3u) / 4);
    const int end = max(row.end / 4, begin);
    const u32 granules = (end - begin + GRANULE - 1u) / GRANULE;
    const u32 mine = warp * granules / WARPS, next = (warp + 1) * granules / WARPS;
    const int first = begin + static_cast<int>(mine * GRANULE + lane);
    return {min(4 * begin, row.end), 4 * end, first, static_cast<int>(next - mine), end - first};
}

struct Ring {
    const Task& task;
    float4* mine;       // the first of this lane's slots
    u32 row;            // opened next
    const float4* from;  // copied next
    int left, vectors;  // of the row that is open
    int in, out;  // rounds: filled next, read next

    DEVICE Ring(const Task& task, unsigned char* memory) : task(task), row(blockIdx.x), left(0), in(0), out(0) {
        if (VECTOR == 1) return;
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        mine = reinterpret_cast<float4*>(memory) + warp * GRANULE + lane;
        for (int i = 0; i < RING; ++i) refill();
    }
    // Copies the next round of this row or of one to come.
    DEVICE void refill() {
        while (left == 0 && row < task.rows) {
            const Row next = task.row(row);
            row += gridDim.x;
            if (task.takes_all(next)) continue;
            const Share share = share_of(next);
            from = reinterpret_cast<const float4*>(next.scores) + share.first;
            left = share.rounds;
            vectors = share.vectors;
        }
        float4* to = mine + in * (WARPS * GRANULE);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            if (left && 32 * u < vectors) copy_async(to + 32 * u, from + 32 * u);
        }
        copies_commit();
        if (left) {
            --left;
            from += GRANULE;
            vectors -= GRANULE;
            in = in + 1 == RING ? 0 : in + 1;
        }
    }
    // This lane's vectors of the round, 32 apart.
    DEVICE const float4* arrived() const {
        copies_wait<RING - 1>();
        return mine + out * (WARPS * GRANULE);
    }
    DEVICE void next() {
        out = out + 1 == RING ? 0 : out + 1;
        refill();
    }
};
