"""Prototype: what a decode row's time is made of."""
import functools, itertools, json, os, pathlib, statistics, sys
import common, numpy as np, torch
sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]
from opkiln.device import cuda

SRC = r"""
using u32 = unsigned int; using i64 = long long;
constexpr int WARPS = THREADS / 32;
__device__ __forceinline__ float2 two(u32 w) { return {__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u)}; }
__device__ __forceinline__ u32 pack(float lo, float hi) { u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo)); return w; }
__device__ __forceinline__ uint4 ld(const char* p) { uint4 v; asm volatile("ld.global" LOADS ".v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)); return v; }
extern "C" __global__ void __launch_bounds__(THREADS)
decode(const char* x, const char* r, const char* w, const char* b, char* y, char* s, int row_bytes, float inv_n, float eps) {
#if MODE == 0
    return;
#endif
    const i64 row = (i64)blockIdx.y * row_bytes;
    uint4 xs[V], rs[V], ws[V], bs[V];
    constexpr int VG = V / G;   // vectors of its own a thread
    const u32 at = threadIdx.x * 16, own = at + blockIdx.x * VG * THREADS * 16;
#pragma unroll
    for (int i = 0; i < V; ++i) {  // own strips first
        const u32 o = (own + i * THREADS * 16) & (THREADS * V * 16 - 1);
        xs[i] = ld(x + row + o);
        if (ADD) rs[i] = ld(r + row + o);
    }
#pragma unroll
    for (int i = 0; i < VG; ++i) {
        if (MODE >= 2) ws[i] = ld(w + own + i * THREADS * 16);
        if (MODE == 4) bs[i] = ld(b + own + i * THREADS * 16);
    }
    float v[V][8];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        const u32 a[4] = {xs[i].x, xs[i].y, xs[i].z, xs[i].w}, c[4] = {rs[i].x, rs[i].y, rs[i].z, rs[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 t = two(a[j]);
            if (ADD) { float2 q = two(c[j]); t.x += q.x; t.y += q.y; }
            v[i][2 * j] = t.x; v[i][2 * j + 1] = t.y;
        }
        if (ADD && i < VG) {
            uint4 o = {pack(v[i][0], v[i][1]), pack(v[i][2], v[i][3]), pack(v[i][4], v[i][5]), pack(v[i][6], v[i][7])};
            *(uint4*)(s + row + own + i * THREADS * 16) = o;
        }
    }
    float mean = 0, rstd = 1;
    constexpr int C = 8 * V;
    __shared__ __align__(16) float part[2][32];
#if MODE == 3
    float a0 = 0, a1 = 0;
#pragma unroll
    for (int i = 0; i < V; ++i)
#pragma unroll
        for (int j = 0; j < 8; j += 2) { a0 += v[i][j] * v[i][j]; a1 += v[i][j + 1] * v[i][j + 1]; }
    float q = a0 + a1;
#pragma unroll
    for (int l = 16; l; l /= 2) q += __shfl_xor_sync(~0u, q, l);
#if FINAL == 0
    if (threadIdx.x % 32 == 0) part[0][threadIdx.x / 32] = q;
    __syncthreads();
    q = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i += 4) { const float4 f = *(const float4*)&part[0][i]; q += (f.x + f.y) + (f.z + f.w); }
#else
    if (threadIdx.x % 32 == 0) part[0][threadIdx.x / 32] = q;
    __syncthreads();
    q = part[0][threadIdx.x % WARPS];
#pragma unroll
    for (int l = WARPS / 2; l; l /= 2) q += __shfl_xor_sync(~0u, q, l);
#endif
    rstd = rsqrtf(q * inv_n + eps);
#endif
#if MODE == 4
    float sum = 0;
#pragma unroll
    for (int i = 0; i < V; ++i)
#pragma unroll
        for (int j = 0; j < 8; j += 4) sum += (v[i][j] + v[i][j + 1]) + (v[i][j + 2] + v[i][j + 3]);
    mean = sum * (1.f / C);
    float m2 = 0;
#pragma unroll
    for (int i = 0; i < V; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) { const float d = v[i][j] - mean; m2 += d * d; }
#pragma unroll
    for (int l = 1, c = C; l < 32; l *= 2, c *= 2) {
        const float om = __shfl_xor_sync(~0u, mean, l), o2 = __shfl_xor_sync(~0u, m2, l);
        const float d = om - mean;
        m2 = (m2 + o2) + d * d * (c * 0.5f);
        mean = 0.5f * (mean + om);
    }
    if (threadIdx.x % 32 == 0) { part[0][threadIdx.x / 32] = mean; part[1][threadIdx.x / 32] = m2; }
    __syncthreads();
    float4 ms[WARPS / 4]; float tot = 0, tm = 0;
#pragma unroll
    for (int i = 0; i < WARPS / 4; ++i) { ms[i] = *(const float4*)&part[0][4 * i]; tm += (ms[i].x + ms[i].y) + (ms[i].z + ms[i].w); }
#pragma unroll
    for (int i = 0; i < WARPS / 4; ++i) { const float4 f = *(const float4*)&part[1][4 * i]; tot += (f.x + f.y) + (f.z + f.w); }
    mean = tm * (1.f / WARPS);
    float d2 = 0;
#pragma unroll
    for (int i = 0; i < WARPS / 4; ++i) {
        const float d0 = ms[i].x - mean, d1 = ms[i].y - mean, d2_ = ms[i].z - mean, d3 = ms[i].w - mean;
        d2 += (d0 * d0 + d1 * d1) + (d2_ * d2_ + d3 * d3);
    }
    rstd = rsqrtf((tot + d2 * (32 * C)) * inv_n + eps);
#endif
#pragma unroll
    for (int i = 0; i < VG; ++i) {
        float o[8];
        const u32 a[4] = {ws[i].x, ws[i].y, ws[i].z, ws[i].w}, c[4] = {bs[i].x, bs[i].y, bs[i].z, bs[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 t = two(a[j]);
            o[2 * j] = v[i][2 * j]; o[2 * j + 1] = v[i][2 * j + 1];
            if (MODE == 4) { o[2 * j] -= mean; o[2 * j + 1] -= mean; }
            if (MODE >= 3) { o[2 * j] *= rstd; o[2 * j + 1] *= rstd; }
            if (MODE >= 2) { o[2 * j] *= t.x; o[2 * j + 1] *= t.y; }
            if (MODE == 4) { float2 q = two(c[j]); o[2 * j] += q.x; o[2 * j + 1] += q.y; }
        }
        uint4 u = {pack(o[0], o[1]), pack(o[2], o[3]), pack(o[4], o[5]), pack(o[6], o[7])};
        *(uint4*)(y + row + own + i * THREADS * 16) = u;
    }
}
"""
LOADS = ("", ".nc.L1::no_allocate")

def variants(n, layer, add):
    vecs = n // 8
    for mode in (0, 1, 2, 4 if layer else 3):
        for threads in (256, 512, 1024):
            v = vecs // threads
            if v < 1 or v > 4: continue
            for g in (1, 2, 4):
                if g > v: continue
                for final in ((0, 1) if mode == 3 else (0,)):
                    for l, loads in enumerate(LOADS):
                        if (l or g > 1) and mode < 3: continue
                        yield dict(MODE=mode, THREADS=threads, V=v, G=g, ADD=int(add), FINAL=final, L=l)

def macros(c): return {k: v for k, v in c.items() if k != "L"} | {"LOADS": '"' + LOADS[c["L"]] + '"'}

def warm(t):
    n, layer, add, c = t
    cuda.compile_cubin(SRC, "sm_90a", macros(dict(c)))
    return {}

ROWS = [("rms", 4096), ("rms", 8192), ("ln", 4096), ("ln", 8192), ("addrms", 4096), ("addrms", 8192), ("addln", 4096)]

def main():
    out = pathlib.Path(sys.argv[1]); out.mkdir(exist_ok=True, parents=True)
    tasks = [(n, "ln" in op, "add" in op, tuple(c.items())) for op, n in ROWS for c in variants(n, "ln" in op, "add" in op)]
    common.warm_all(warm, tasks)
    flush = common.flush_buffer(); dev = torch.device("cuda", 0); res = []
    from opkiln.ops import CATALOGUE
    from opkiln.spec import Call
    from opkiln_norm import row_norm
    for op, n in ROWS:
        layer, add = "ln" in op, "add" in op
        torch.manual_seed(0)
        x, r = (torch.randn(1, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        w, b = (torch.randn(n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        z = x.double() + (r.double() if add else 0)
        f = torch.nn.functional
        want = f.layer_norm(z, (n,), w.double(), b.double(), 1e-5) if layer else f.rms_norm(z, (n,), w.double(), 1e-6)
        calls = []; names = []
        for c in variants(n, layer, add):
            y, s = torch.empty_like(x), torch.empty_like(x)
            k = cuda.load(SRC, "decode", dev, macros(c))
            send = k.configure((c["G"], 1, 1), (c["THREADS"], 1, 1))
            call = functools.partial(send, x, r, w, b, y, s, np.int32(2 * n), np.float32(1 / n), np.float32(1e-5 if layer else 1e-6))
            call(); torch.cuda.synchronize()
            if c["MODE"] >= 3:
                err = int(((y.double() - want).abs() > 2**-7 * want.abs() + 2**-18).sum())
                if err: print("WRONG", op, n, c, err); continue
            calls.append(call); names.append(c | {"regs": k.handle.attributes.num_regs})
        name = {"rms": "rms_norm", "ln": "layer_norm", "addrms": "fused_add_rms_norm", "addln": "fused_add_layer_norm"}[op]
        t = [x, *([r] if add else []), w, *([b] if layer else [])]
        launch = row_norm.prepare(Call.of(CATALOGUE[name], t, {"normalized_shape": (n,), "eps": 1e-5 if layer else 1e-6}))
        calls.append(functools.partial(launch, *t)); names.append("shipped")
        times = common.kernel_times_us(calls, flush, 35)
        rows = sorted(((statistics.median(a), min(a), str(m)) for a, m in zip(times, names)), key=lambda r: r[0])
        res.append({"op": op, "n": n, "rows": rows})
        print(op, n, "shipped", [r[0] for r in rows if r[2] == "shipped"])
        for mode in (0, 1, 2, 3, 4):
            for us, low, m in [r for r in rows if f"'MODE': {mode}" in r[2]][:3]: print(f"   {us:.3f} {low:.3f} {m}")
    common.write_json(out / "decode.json", res)

if __name__ == "__main__": main()
