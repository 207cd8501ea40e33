// Batch norm of channels of megabytes, read once: a channel lies spread over the SMs, in registers
// and in shared memory, between its statistics and its normalisation. GROUPS channels are in flight
// at a time, each on CTAs of its own, so that one reads while another waits or writes; a CTA that
// has written a vector asks for the same vector of its next channel.
//
// x, y contiguous [N, CHANNELS, plane]; a CTA's slice of a channel is contiguous, in one plane.
//
// Macros, beside those of channel.cuh. CHANNELS, PLANE_VECTORS (of 16 bytes). GROUPS: CTAs an SM,
// and channels in flight. THREADS: a CTA's. REGISTERS, SHARED: vectors of each tensor that a thread
// keeps there. BACKWARD: two tensors, x and grad_out; else x.
//
// Grid: GROUPS * slices CTAs, all running at once (a cooperative launch): they wait for each other.
// header: the number of the last round of the call before, how many CTAs have left; then u64
// [GROUPS][2][2][slices]: by group, parity of the round and which of two numbers, each CTA's, with
// its round's number. A slot is written again two rounds later: by then all have told their numbers
// of the round between, so all have read it.

constexpr int TENSORS = BACKWARD ? 2 : 1;
constexpr int VALUES = 16 / VALUE_BYTES;
constexpr int VECTORS = REGISTERS + SHARED;  // of each tensor
constexpr int SLICE_VECTORS = VECTORS * THREADS;
constexpr int WARPS = THREADS / 32;
constexpr float THREAD_VALUES = VECTORS * VALUES;
constexpr float SLICE_VALUES = (float)SLICE_VECTORS * VALUES;
constexpr u32 ROUNDS = (CHANNELS + GROUPS - 1) / GROUPS;
static_assert(PLANE_VECTORS % SLICE_VECTORS == 0);

extern __shared__ char kept[];

// The two numbers that a CTA tells the others: moments' mean and m2, or two sums.
struct Pair {
    float a, b;
};

// Over LANES neighbouring lanes, n values each.
template <int LANES = 32>
__device__ Pair over_lanes(Pair mine, float n) {
#pragma unroll
    for (int lane = LANES / 2; lane; lane /= 2) {
        const float a = __shfl_xor_sync(~0u, mine.a, lane), b = __shfl_xor_sync(~0u, mine.b, lane);
        const float distance = a - mine.a;
        mine.b += b + (BACKWARD ? 0 : distance * distance * (n / 2));
        mine.a = BACKWARD ? mine.a + a : (mine.a + a) * 0.5f;
        n *= 2;
    }
    return mine;
}

// Over the threads of a CTA; valid in warp 0. partials: [WARPS].
__device__ Pair over_cta(Pair mine, Pair* partials) {
    mine = over_lanes(mine, THREAD_VALUES);
    if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x >= 32) return mine;
    return over_lanes<WARPS>(partials[threadIdx.x % WARPS], 32 * THREAD_VALUES);
}

// Over the slices of a channel; by warp 0, which tells its CTA's numbers first. slots: [2][slices].
__device__ Pair over_slices(Pair mine, u64* slots, u32 slice, u32 slices, u32 round) {
    const u32 lane = threadIdx.x;
    if (lane < 2) post(slots + lane * slices + slice, lane ? mine.b : mine.a, round);
    Pair whole = {0, 0};
    float n = 0;
    for (u32 s = lane; s < slices; s += 32) {  // slices is a multiple of 32
        u64 first, second;
        do {
            first = look(slots + s);
            second = look(slots + slices + s);
        } while ((u32)(first >> 32) != round || (u32)(second >> 32) != round);
        const Pair theirs = {__uint_as_float((u32)first), __uint_as_float((u32)second)};
        if constexpr (BACKWARD) {
            whole = {whole.a + theirs.a, whole.b + theirs.b};
        } else {
            const float distance = theirs.a - whole.a, share = SLICE_VALUES / (n + SLICE_VALUES);
            whole.a += distance * share;
            whole.b += theirs.b + distance * distance * n * share;
            n += SLICE_VALUES;
        }
    }
    return over_lanes(whole, n);
}

// x, and in BACKWARD g, of one CTA's slice of a channel.
struct Slice {
    Words<4> registers[TENSORS][REGISTERS > 0 ? REGISTERS : 1];
    u32 shared = shared_address(kept) + threadIdx.x * 16;  // [TENSORS][SHARED][THREADS] vectors

    __device__ void fetch(int tensor, int i, const char* from) {  // from: the thread's first
        const char* p = from + i * THREADS * 16;
        if (i < SHARED) copy_vector(shared + (tensor * SHARED + i) * THREADS * 16, p);
        else registers[tensor][i - SHARED] = load_vector(p);
    }
    __device__ Words<4> get(int tensor, int i) {
        if (i < SHARED) return load_shared(shared + (tensor * SHARED + i) * THREADS * 16);
        return registers[tensor][i - SHARED];
    }
};

// A pointer from which the compiler derives no other: it would keep, and spill, one a vector.
template <class T>
__device__ T* anew(T* p) {
    asm volatile("" : "+l"(p));
    return p;
}

// Of the calling thread's first vector.
__device__ i64 thread_offset(u32 channel, u32 slice) {
    constexpr u32 IN_PLANE = PLANE_VECTORS / SLICE_VECTORS;
    const i64 plane = (i64)(slice / IN_PLANE) * CHANNELS + channel;
    return (plane * PLANE_VECTORS + slice % IN_PLANE * SLICE_VECTORS + threadIdx.x) * 16;
}

// A thread's numbers of its vectors, each read once. mean: of the channel, for BACKWARD.
__device__ Pair accumulate(Slice& own, float mean) {
    Pair sums = {0, 0};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const Words<4> x = own.get(0, i), g = BACKWARD ? own.get(TENSORS - 1, i) : x;
        float part = 0;
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
            part += value<TYPE>(g, j);
            if (BACKWARD) sums.b += value<TYPE>(g, j) * (value<TYPE>(x, j) - mean);
        }
        if constexpr (BACKWARD) {
            sums.a += part;
            continue;
        }
        part *= 1.0f / VALUES;  // Chan's formula joins the vector's moments to those before it
        const float distance = part - sums.a;
        sums.a += distance * (1.0f / (i + 1));
        sums.b += distance * distance * (VALUES * (float)i / (i + 1));
#pragma unroll
        for (int j = 0; j < VALUES; ++j)
            sums.b += (value<TYPE>(x, j) - part) * (value<TYPE>(x, j) - part);
    }
    return sums;
}

// The last CTA to leave, when no other reads the header any more, sets it for the next call.
__device__ void leave(u32* header, u32 base) {
    if (threadIdx.x == 0 && atomicAdd(header + 1, 1) == gridDim.x - 1) {
        header[1] = 0;
        header[0] = base + ROUNDS;
    }
}

// y = (x - mean) * scale + shift; BACKWARD: d = (g - shift - slope * (x - mean)) * scale.
struct Line {
    float mean, scale, shift, slope;

    __device__ float operator()(float x, float g) const {
        if (BACKWARD) return (g - shift - slope * (x - mean)) * scale;
        return (x - mean) * scale + shift;
    }
};

// before(channel): what is known of a channel, with a member `mean`. after(channel, known, sums,
// leader): the channel's line, in warp 0; the leader writes what is one number a channel.
template <class Before, class After>
__device__ void stream(const char* x, const char* g, char* out, u32* header, u32 slices,
                       Before before, After after) {
    __shared__ Pair partials[WARPS];
    __shared__ Line line;
    const u32 group = blockIdx.x / slices, slice = blockIdx.x % slices;
    u64* slots = (u64*)header + 1 + (u64)group * 4 * slices;
    Slice own;
    if (group < CHANNELS) {
        const i64 offset = thread_offset(group, slice);
        const char* first[2] = {anew(x + offset), anew(g + offset)};
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int t = 0; t < TENSORS; ++t) own.fetch(t, i, first[t]);
    }
    const u32 base = *(volatile u32*)header;
    u32 round = 0;
    for (u32 channel = group; channel < CHANNELS; channel += GROUPS, ++round) {
        const auto known = before(channel);
        copies_done();
        const Pair cta = over_cta(accumulate(own, known.mean), partials);
        if (threadIdx.x < 32) {
            u64* turn = slots + round % 2 * 2 * slices;
            const Pair sums = over_slices(cta, turn, slice, slices, base + round + 1);
            const Line found = after(channel, known, sums, slice == 0 && threadIdx.x == 0);
            if (threadIdx.x == 0) line = found;
        }
        __syncthreads();
        const Line at = line;
        char* here = anew(out + thread_offset(channel, slice));
        const i64 next = thread_offset(channel + GROUPS, slice);
        const char* later[2] = {anew(x + next), anew(g + next)};
        const bool more = channel + GROUPS < CHANNELS;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const Words<4> xi = own.get(0, i), gi = BACKWARD ? own.get(TENSORS - 1, i) : xi;
            Values<4> result;
#pragma unroll
            for (int j = 0; j < VALUES; ++j)
                result[j] = at(value<TYPE>(xi, j), value<TYPE>(gi, j));
            store_values<4>(here + i * THREADS * 16, result);
            if (more) {
#pragma unroll
                for (int t = 0; t < TENSORS; ++t) own.fetch(t, i, later[t]);
            }
        }
    }
    leave(header, base);
}

extern "C" __global__ void __launch_bounds__(THREADS, GROUPS)
channel_ring_forward(const char* x, void* rm, void* rv, const void* w, const void* b, char* y,
                     float* mean_out, float* rstd_out, u32* header, i64 slices,
                     float inverse_count, float unbiased, float eps, float momentum) {
    stream(x, x, y, header, slices,
        [&](u32 channel) { return load_channel(w, b, rm, rv, channel); },
        [&](u32 channel, const Channel& old, Pair sums, bool leader) {
            const float rstd = rsqrtf(sums.b * inverse_count + eps);
            if (leader) {
                if (mean_out) mean_out[channel] = sums.a;
                if (rstd_out) rstd_out[channel] = rstd;
                if constexpr (HAS_RUNNING)
                    move_running(rm, rv, channel, old, sums.a, sums.b * unbiased, momentum);
            }
            return Line{sums.a, rstd * old.weight, old.bias, 0};
        });
}

extern "C" __global__ void __launch_bounds__(THREADS, GROUPS)
channel_ring_backward(const char* g, const char* x, const void* w, const float* means,
                      const float* rstds, char* d, void* gw, void* gb, u32* header, i64 slices,
                      float inverse_count) {
    struct Known {
        float mean, rstd, weight;
    };
    stream(x, g, d, header, slices,
        [&](u32 channel) {
            const float weight = HAS_WEIGHT ? load_one<WEIGHT_TYPE>(w, channel) : 1;
            return Known{means[channel], rstds[channel], weight};
        },
        [&](u32 channel, const Known& known, Pair sums, bool leader) {
            if (leader) {
                if (gw) store_one<WEIGHT_TYPE>(gw, channel, sums.b * known.rstd);
                if (gb) store_one<WEIGHT_TYPE>(gb, channel, sums.a);
            }
            const float slope = sums.b * known.rstd * known.rstd * inverse_count;
            return Line{known.mean, known.rstd * known.weight, sums.a * inverse_count, slope};
        });
}
