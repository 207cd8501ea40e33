// fft: out[k] = scale * sum_j in[j] exp(-2 pi i j k / N) for N = 2^m points, Stockham's form: every
// pass reads points N / radix apart and writes them in order, so that no bit reversal is needed.
//
// A thread holds POINTS points; the passes exchange them through shared memory. PER_CTA transforms
// share a CTA. The transforms are the indices of up to four dims, each with its strides. Points from
// `present` on are zeros (a padded input). INVERSE: exp(+2 pi i j k / N), the gradient.
//
// CLUSTER > 1: a cluster of CTAs serves one transform of POINTS * N points. Its first pass leaves POINTS
// transforms of N points, PER_CTA = POINTS / CLUSTER of them in the shared memory of each CTA, so that
// one exchange crosses the cluster and the other passes stay within a CTA.
//
// Macros: REAL; N; POINTS: the largest radix, at most 16 and N; PER_CTA; PITCH: complex numbers of shared
// memory a transform; CLUSTER; COLUMNS: neighbouring threads take neighbouring transforms, not points;
// DIMS: how many of the four have more than one index, the last ones; DENSE: all points are there, next to
// each other, in and out;
// BUFFERS: 2: exchanges take turns, one barrier each; CLUSTER > 1 needs 2;
// ASYNC: CTAs count the bytes that others store in their memory, instead of a barrier of the cluster;
// TOTAL: 0, or this is the first step of a transform of TOTAL points, over every TOTAL / N-th of them
// from column c, the innermost index, on: output k is also turned by exp(-2 pi i k c / TOTAL);
// EDGE: the outputs from `kept` on do not exist, or, where `kept` exceeds their number, zeros follow them;
// APART: of the last step of two: how many outputs lie between two of a transform, else 1.

constexpr int LANES = N / POINTS;  // threads of a transform
static_assert(CLUSTER == 1 || BUFFERS == 2, "the cluster writes to the second buffer");
constexpr int PAD = 16;            // an unused complex number after so many: no bank conflicts

struct alignas(2 * sizeof(REAL)) Complex { REAL x, y; };
DEVICE Complex operator+(Complex a, Complex b) { return {a.x + b.x, a.y + b.y}; }
DEVICE Complex operator-(Complex a, Complex b) { return {a.x - b.x, a.y - b.y}; }
DEVICE Complex operator*(Complex a, Complex b) { return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x}; }
DEVICE Complex quarter_turn(Complex a) {  // times -i, or i
    return INVERSE ? Complex{-a.y, a.x} : Complex{a.y, -a.x};
}

DEVICE void sine_cosine(float turns, float* s, float* c) { sincospif(2 * turns, s, c); }
DEVICE void sine_cosine(double turns, double* s, double* c) { sincospi(2 * turns, s, c); }
// exp(-2 pi i k / of), of a power of two: the fraction is exact. INVERSE: its conjugate, as root16.
DEVICE Complex root(int k, int of) {
    REAL s, c;
    sine_cosine(static_cast<REAL>(k) / of, &s, &c);
    return {c, INVERSE ? s : -s};
}

DEVICE void dft2(Complex& a, Complex& b) {
    const Complex sum = a + b;
    b = a - b;
    a = sum;
}
DEVICE void dft4(Complex& a, Complex& b, Complex& c, Complex& d) {
    dft2(a, c);
    dft2(b, d);
    d = quarter_turn(d);
    dft2(a, b);
    dft2(c, d);
    const Complex one = c;  // in order: 0 in a, 1 in c, 2 in b, 3 in d
    c = b;
    b = one;
}

// cos(2 pi k / 16), exact to the last bit of REAL.
DEVICE constexpr REAL cosine16(int k) {
    k = k % 16;
    if (k > 8) k = 16 - k;
    const REAL sign = k > 4 ? -1 : 1;
    if (k > 4) k = 8 - k;
    const double values[5] = {1, 0.92387953251128675613, 0.70710678118654752440, 0.38268343236508977173, 0};
    return sign * static_cast<REAL>(values[k]);
}
DEVICE constexpr Complex root16(int k) { return {cosine16(k), (INVERSE ? 1 : -1) * cosine16(k + 12)}; }

// In place; term k of the result lies at place<R>(k).
template <int R>
DEVICE constexpr int place(int k) { return R == 16 ? k % 4 * 4 + k / 4 : R == 8 ? k % 4 * 2 + k / 4 : k; }
template <int R>
DEVICE void dft(Complex* v) {
    if (R == 2) dft2(v[0], v[1]);
    if (R == 4) dft4(v[0], v[1], v[2], v[3]);
    if (R == 8 || R == 16) {  // 4 columns of R / 4, turned, then R / 4 rows
        constexpr int OUTER = R / 4;
#pragma unroll
        for (int a = 0; a < OUTER; ++a) {
            dft4(v[a], v[a + OUTER], v[a + 2 * OUTER], v[a + 3 * OUTER]);
#pragma unroll
            for (int k = 1; k < 4; ++k) {
                if (a * k) v[a + OUTER * k] = v[a + OUTER * k] * root16(a * k * 16 / R);
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (R == 8) dft2(v[2 * k], v[2 * k + 1]);
            else dft4(v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]);
        }
    }
}

// root(k, of) and root(4 k, of); the other powers are products of at most four of them.
struct Turn { Complex one, four; };
template <int R>
DEVICE Turn turn_of(int k, int of) {
    return {root(k, of), R > 4 ? root(4 * k, of) : Complex{1, 0}};
}
// Term i by root(i k, of). PLACED: term i lies at place<R>(i).
template <int R, bool PLACED>
DEVICE void turn(Complex* v, const Turn& by) {
    Complex low[4] = {{1, 0}, by.one, by.one * by.one, {}};
    low[3] = low[2] * by.one;
    Complex high[4] = {{1, 0}, by.four, {1, 0}, {1, 0}};
    if (R > 8) {
        high[2] = high[1] * high[1];
        high[3] = high[2] * high[1];
    }
#pragma unroll
    for (int i = 1; i < R; ++i) {
        const Complex w = i < 4 ? low[i] : i % 4 == 0 ? high[i / 4] : high[i / 4] * low[i % 4];
        Complex& term = v[PLACED ? place<R>(i) : i];
        term = term * w;
    }
}

DEVICE int padded(int i) { return i + i / PAD; }

struct Transform {
    const Complex* in;
    Complex* out;
    i64 in_stride, out_stride;
    int present, column;
    i64 kept;
    REAL scale;
    bool exists;
};

DEVICE constexpr int radix(int span) { return N / span < POINTS ? N / span : POINTS; }
constexpr int MOST_PASSES = 14;  // of radix 2: ptxas keeps what is used

// The turns of the passes from SPAN on, so that they are computed while the points are on their way.
template <int SPAN>
DEVICE void prepare_turns(Turn* turns, int lane) {
    if constexpr (SPAN < N) {
        constexpr int R = radix(SPAN);
        if (SPAN > 1 && R == POINTS) *turns = turn_of<R>(lane % SPAN, SPAN * R);
        prepare_turns<SPAN * R>(turns + 1, lane);
    }
}

// The passes from the one on whose inputs are SPAN points that have been transformed.
template <int SPAN>
DEVICE void passes(Complex (&v)[POINTS], Complex* buffer, const Transform& t, int lane, const Turn* turns) {
    constexpr int R = radix(SPAN);
#pragma unroll
    for (int b = 0; b < POINTS / R; ++b) {
        const int k = (lane + b * LANES) % SPAN;
        if (SPAN > 1) turn<R, false>(v + b * R, R == POINTS ? *turns : turn_of<R>(k, SPAN * R));
        dft<R>(v + b * R);
    }
    if constexpr (SPAN * R == N) {
#pragma unroll
        for (int b = 0; b < POINTS / R; ++b) {
#pragma unroll
            for (int i = 0; i < R; ++i) {
                const int k = lane + b * LANES + i * SPAN;
                Complex y = v[b * R + place<R>(i)];
                if (TOTAL) y = y * root(static_cast<int>(static_cast<i64>(k) * t.column % (TOTAL ? TOTAL : 1)), TOTAL);
                if (t.exists && (!EDGE || k < t.kept)) t.out[k * t.out_stride] = {y.x * t.scale, y.y * t.scale};
            }
        }
        if (EDGE && t.exists) {
#pragma unroll 1
            for (i64 after = N + lane; after < t.kept; after += LANES) t.out[after * t.out_stride] = {0, 0};
        }
    } else {
        constexpr int NEXT = radix(SPAN * R);
        if (BUFFERS == 1 && SPAN > 1) __syncthreads();  // all have read the last exchange
#pragma unroll
        for (int b = 0; b < POINTS / R; ++b) {
            const int j = lane + b * LANES, first = j / SPAN * SPAN * R + j % SPAN;
#pragma unroll
            for (int i = 0; i < R; ++i) buffer[padded(first + i * SPAN)] = v[b * R + place<R>(i)];
        }
        __syncthreads();
#pragma unroll
        for (int b = 0; b < POINTS / NEXT; ++b) {
#pragma unroll
            for (int i = 0; i < NEXT; ++i) v[b * NEXT + i] = buffer[padded(lane + b * LANES + i * (N / NEXT))];
        }
        // With two buffers the one after next is free again: a barrier lies between.
        Complex* next = buffer;
        if (BUFFERS == 2) next = SPAN == 1 || SPAN == POINTS * POINTS ? buffer + PER_CTA * PITCH : buffer - PER_CTA * PITCH;
        passes<SPAN * R>(v, next, t, lane, turns + 1);
    }
}

// The first pass of POINTS * N points, of which this thread holds every N-th from `column` on; then the
// points of the thread's own transform of N.
DEVICE void spread(Complex (&v)[POINTS], Complex* buffers, int column, int own, int lane, const Turn& by,
                   u64* arrivals) {
    dft<POINTS>(v);
    turn<POINTS, true>(v, by);
    cluster_wait();  // all CTAs run
#pragma unroll
    for (int i = 0; i < POINTS; ++i) {
        Complex* to = buffers + i % PER_CTA * PITCH + padded(column);
        if (ASYNC) store_async(to, v[place<POINTS>(i)], i / PER_CTA, arrivals);
        else *peer(to, i / PER_CTA) = v[place<POINTS>(i)];
    }
    if (!ASYNC) {
        cluster_arrive();
        cluster_wait();
    } else {
        wait_for_bytes(arrivals);
    }
#pragma unroll
    for (int i = 0; i < POINTS; ++i) v[i] = buffers[own * PITCH + padded(lane + i * LANES)];
}

extern "C" __global__ void __launch_bounds__(LANES * PER_CTA) fft(
    const Complex* in, Complex* out, i64 transforms, i64 size1, i64 size2, i64 size3, i64 in0, i64 in1, i64 in2,
    i64 in3, i64 out0, i64 out1, i64 out2, i64 out3, i64 in_stride, i64 out_stride, i64 present, i64 kept,
    double scale) {
    Complex* buffers = reinterpret_cast<Complex*>(dynamic_shared());
    u64* arrivals = reinterpret_cast<u64*>(buffers + BUFFERS * PER_CTA * PITCH);
    if (CLUSTER > 1) {
        if (ASYNC) expect_bytes(arrivals, PER_CTA * N * sizeof(Complex));
        cluster_arrive_relaxed();
    }
    const int lane = COLUMNS ? threadIdx.x / PER_CTA : threadIdx.x % LANES;
    const int own = COLUMNS ? threadIdx.x % PER_CTA : threadIdx.x / LANES;
    const i64 row = CLUSTER > 1 ? blockIdx.x / CLUSTER : blockIdx.x * static_cast<i64>(PER_CTA) + own;
    // A 64-bit division takes as long as a pass: none where one dim is left.
    const i64 i3 = DIMS > 1 ? row % size3 : row, rest = DIMS > 1 ? row / size3 : 0;
    const i64 i2 = DIMS > 2 ? rest % size2 : rest, i1 = DIMS > 2 ? rest / size2 % size1 : 0;
    const i64 i0 = DIMS > 3 ? rest / size2 / size1 : 0;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int term = CLUSTER > 1 ? rank * PER_CTA + own : 0;
    const int column = CLUSTER > 1 ? rank * LANES * PER_CTA + threadIdx.x : lane;
    Transform t;
    t.exists = PER_CTA == 1 || CLUSTER > 1 || row < transforms;
    t.in = in + (t.exists ? i0 * in0 + i1 * in1 + i2 * in2 + i3 * in3 : 0);
    t.out = out + i0 * out0 + i1 * out1 + i2 * out2 + i3 * out3 + term * (DENSE ? 1 : out_stride);
    t.in_stride = in_stride;
    t.out_stride = (DENSE ? 1 : out_stride) * (CLUSTER > 1 ? POINTS : 1);
    t.present = static_cast<int>(TOTAL ? (present - i3 + TOTAL / N - 1) / (TOTAL ? TOTAL / N : 1) : present);
    t.column = static_cast<int>(i3);
    // This transform's outputs are every APART-th of all, or every POINTS-th of those of its cluster.
    if (EDGE) t.kept = CLUSTER > 1 ? (kept - term + POINTS - 1) / POINTS : (kept - (APART > 1 ? i3 : 0) + APART - 1) / APART;
    t.scale = static_cast<REAL>(scale);
    Complex v[POINTS];
#pragma unroll
    for (int i = 0; i < POINTS; ++i) {
        const int j = column + i * (CLUSTER > 1 ? N : LANES);
        v[i] = Complex{0, 0};
        if (DENSE) v[i] = t.in[j];
        else if (j < t.present) v[i] = t.in[j * t.in_stride];
    }
    Turn turns[MOST_PASSES];
    prepare_turns<1>(turns, lane);
    // What the cluster writes lies behind the buffer of the next exchange.
    if (CLUSTER > 1) spread(v, buffers + PER_CTA * PITCH, column, own, lane, turn_of<POINTS>(column, N * POINTS),
                            arrivals);
    passes<1>(v, buffers + own * PITCH, t, lane, turns);
}
