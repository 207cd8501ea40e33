"""Prototype: few rows, by what ships and by what shipped before."""
import functools, pathlib, statistics, sys
import common, torch
sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]
import row_norm as probe
from row_pages import Row
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import row_cluster, row_plan
from opkiln_norm.row_cluster import ClusterTiling
from opkiln_norm.row_plan import Tiling
OLD = {('fused_add_layer_norm', 4096): {'block_n': 4096, 'num_warps': 8, 'preload': True}, ('fused_add_layer_norm', 8192): {'cluster': 8, 'threads': 128, 'vectors': 1, 'weight_at': 1}, ('fused_add_rms_norm', 4096): {'block_n': 4096, 'num_warps': 8, 'preload': True}, ('fused_add_rms_norm', 8192): {'cluster': 8, 'threads': 64, 'vectors': 2, 'weight_at': 1}, ('fused_add_rms_norm', 16384): {'cluster': 8, 'threads': 128, 'vectors': 2, 'weight_at': 1}, ('layer_norm', 4096): {'block_n': 4096, 'num_warps': 8, 'preload': True}, ('layer_norm', 8192): {'block_n': 8192, 'num_warps': 8, 'preload': True}, ('layer_norm', 16384): {'cluster': 8, 'threads': 128, 'vectors': 2, 'weight_at': 1}, ('rms_norm', 4096): {'block_n': 4096, 'num_warps': 16, 'preload': True}, ('rms_norm', 8192): {'block_n': 8192, 'num_warps': 16, 'preload': True}, ('rms_norm', 16384): {'cluster': 8, 'threads': 256, 'vectors': 1, 'weight_at': 1}, ('fused_add_layer_norm', 16384): {'cluster': 8, 'threads': 128, 'vectors': 2, 'weight_at': 1}}
TABLES = row_plan.tuning_rows, row_cluster.cluster_rows
MORE = {("rms_norm", 8192): [(512, 2, 2)], ("layer_norm", 8192): [(512, 2, 2), (256, 4, 2)], ("layer_norm", 16384): [(1024, 2, 2)], ("fused_add_rms_norm", 4096): [(128, 4, 1)],
        ("fused_add_layer_norm", 4096): [(256, 2, 2), (512, 1, 1)], ("fused_add_layer_norm", 8192): [(512, 2, 2)]}
def tilings(op, n):
    use = OLD[op, n]
    return [None, ClusterTiling(**use) if "cluster" in use else Tiling(**use), *(ClusterTiling(1, t, v, weight_at=1, copies=c) for t, v, c in MORE.get((op, n), []))]
def make(op, n, rows, dtype, tensors, t, real=True):
    from opkiln_norm import row_norm
    row = Row(op, "x", dtype, rows, n, 1 + ("layer" in op), 0, 0)
    if t is None:
        row_plan.tuning_rows, row_cluster.cluster_rows = TABLES
        return Call.of(CATALOGUE[op], tensors, row.params, real=real)
    return probe.make_call(row, tensors, t, real)
def warm(task):
    from opkiln_norm import row_norm
    op, n, t, dtype = task
    row = Row(op, "x", dtype, 1, n, 1 + ("layer" in op), 0, 0)
    tensors = row.tensors("cuda")
    row_norm.prepare(make(op, n, 1, dtype, tensors, t))(*tensors)
    return {}
def main():
    from opkiln_norm import row_norm
    out = pathlib.Path(sys.argv[1]); out.mkdir(exist_ok=True, parents=True)
    common.warm_all(warm, [(op, n, t, d) for op, n in OLD for t in tilings(op, n) for d in ("bf16", "f16")])
    flush = common.flush_buffer(); res = []
    for op, n in OLD:
        for dtype in ("bf16", "f16"):
            line = []
            for rows in (1, 4, 16, 64, 128) if dtype == "bf16" else (1,):
                torch.manual_seed(0)
                row = Row(op, "x", dtype, rows, n, 1 + ("layer" in op), 0, 0)
                all_times = {}
                for place in range(3 if rows == 1 else 1):
                    cuda._loaded.clear()
                    keep = torch.empty(4096 * 7 * place + 1, device="cuda")
                    tensors = row.tensors("cuda"); wants = probe.references(row, tensors)
                    calls = []
                    for t in tilings(op, n):
                        launch = row_norm.prepare(make(op, n, rows, dtype, tensors, t))
                        status = probe.status_of(launch, tensors, wants, row)
                        if status != "ok": print("WRONG", op, n, rows, t, status)
                        calls.append(functools.partial(launch, *tensors))
                    for t, samples in zip(tilings(op, n), common.kernel_times_us(calls, flush, 25)):
                        all_times.setdefault(str(t), []).append(statistics.median(samples))
                means = {t: statistics.mean(u) for t, u in all_times.items()}
                res.append(dict(op=op, n=n, dtype=dtype, rows=rows, us=means))
                line.append(f"{rows}: " + " ".join(f"{u:.2f}" for u in means.values()))
            print(f"{op:22s}{n:6d} {dtype:5s}", " | ".join(line), flush=True)
    common.write_json(out / "decode.json", common.provenance() | {"results": res})
if __name__ == "__main__": main()
