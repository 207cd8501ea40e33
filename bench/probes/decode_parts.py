"""Prototype: row_decode.cu's shapes on few rows."""
import functools, pathlib, statistics, sys
import common, torch
sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]
from opkiln.device import cuda
from opkiln_norm import row_cluster

SRC = row_cluster.source("row_decode")
OPS = {"rms": "rms_norm", "ln": "layer_norm", "addrms": "fused_add_rms_norm", "addln": "fused_add_layer_norm"}
ROWS = [(op, n) for op in OPS for n in (4096, 8192, 16384)]

def variants(op, n):
    for threads in (128, 256, 512, 1024):
        v = n // 8 // threads
        if not 1 <= v <= (8 if threads <= 256 else 4): continue
        for copies in (1, 2, 4, 8):
            if v % copies: continue
            if n == 16384 and copies == 1: continue
            for final in (0, 1):
                yield dict(TYPE=1, WEIGHT_TYPE=1, CLUSTER=1, THREADS=threads, VECTORS=v, RESIDENT=1, EVEN=1, CENTER=int("ln" in op), HAS_RESIDUAL=int("add" in op),
                           HAS_WEIGHT=1, HAS_BIAS=int("ln" in op), WEIGHT_AT=1, STREAM=0, SHIFT=0, MERGE=0, COPIES=copies, FINAL=final)

def warm(t):
    cuda.compile_cubin(SRC, "sm_90a", dict(t)); return {}

def main():
    out = pathlib.Path(sys.argv[1]); out.mkdir(exist_ok=True, parents=True)
    common.warm_all(warm, list(dict.fromkeys(tuple(c.items()) for op, n in ROWS for c in variants(op, n))))
    flush = common.flush_buffer(); dev = torch.device("cuda", 0); res = []
    from opkiln.ops import CATALOGUE
    from opkiln.spec import Call
    from opkiln_norm import row_norm
    f = torch.nn.functional
    for op, n in ROWS:
        layer, add = "ln" in op, "add" in op
        table = {}
        for rows in (1, 128):
            for place in range(4 if rows == 1 else 1):
                torch.manual_seed(place); cuda._loaded.clear()
                keep = [torch.empty(12800 * place + 128, device="cuda")]
                x, r = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) * 2 + 1 for _ in range(2))
                w, b = (torch.randn(n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                z = x.double() + (r.double() if add else 0)
                eps = 1e-5 if layer else 1e-6
                want = f.layer_norm(z, (n,), w.double(), b.double(), eps) if layer else f.rms_norm(z, (n,), w.double(), eps)
                t = [x, *([r] if add else []), w, *([b] if layer else [])]
                launch = row_norm.prepare(Call.of(CATALOGUE[OPS[op]], t, {"normalized_shape": (n,), "eps": eps}))
                calls, names = [functools.partial(launch, *t)], ["shipped"]
                for c in variants(op, n):
                    k = cuda.load(SRC, "row_decode", dev, c)
                    send = k.configure((c["COPIES"] * rows, 1, 1), (c["THREADS"], 1, 1))
                    def call(send=send, x=x, r=r, w=w, b=b, rows=rows):
                        y, s = torch.empty_like(x), torch.empty_like(x)
                        send(x, r, w, b, y, s, 0, 0, rows, n, n, n, eps)
                        return y, s
                    y, s = call()
                    err = int(((y.double() - want).abs() > 2**-7 * want.abs() + 2**-9).sum()) + (int((s != z.bfloat16()).sum()) if add else 0)
                    name = f"{c['THREADS']}x{c['VECTORS']} copies {c['COPIES']} final {c['FINAL']} regs {k.handle.attributes.num_regs} local {k.handle.attributes.local_size_bytes}"
                    if err: print("WRONG", op, n, name, err); continue
                    calls.append(call); names.append(name)
                for samples, name in zip(common.kernel_times_us(calls, flush, 25), names):
                    table.setdefault(name, []).append(statistics.median(samples))
        lines = sorted(table.items(), key=lambda q: statistics.mean(q[1][:4]))
        res.append({"op": op, "n": n, "lines": lines})
        for name, us in [*lines[:5], *[q for q in lines[5:] if q[0] == "shipped"]]:
            print(f"{op:7s}{n:6d} {statistics.mean(us[:4]):.3f} | {' '.join(f'{u:.2f}' for u in us[:4])} | 128 rows {us[4]:.2f} | {name}")
        common.write_json(out / "decode.json", res)

if __name__ == "__main__": main()
