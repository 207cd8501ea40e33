"""Measure the tilings of topk_selector on its rows of the benchmark pages, and on awkward inputs.

    python bench/probes/topk.py --out DIR [--only SUBSTRING]

Writes DIR/topk.json and prints, for each shape, the tilings from the fastest on; see common.py for
how it measures. A tiling whose result differs from the formula on a sample of rows is not timed.
"""

import dataclasses
import math
import statistics
import sys
import traceback
from collections.abc import Callable
from typing import Any

import common
import torch

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/misc/src")]

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_misc import topk  # noqa: E402
from opkiln_misc.topk import Tiling  # noqa: E402

ROWS, KV = 32768, 65536
SMALL = 2048  # rows of an awkward input
CHECKED = 48  # rows that are compared with the formula
ITERATIONS = 7

# threads, CTAs a multiprocessor, vectors a round, rounds
TILINGS = [
    *[Tiling(*t) for t in [(512, 2, 4, 2), (512, 2, 2, 4), (256, 2, 4, 4), (256, 3, 4, 2)]],
    *[Tiling(*t) for t in [(256, 2, 8, 2), (256, 3, 2, 4), (512, 1, 4, 5), (1024, 1, 2, 5)]],
]


@dataclasses.dataclass(frozen=True)
class Shape:
    """kv: scores of a row; `make` fills rows [n, kv]."""

    label: str
    rows: int
    kv: int
    k: int
    tilings: tuple[Tiling, ...] = tuple(TILINGS)
    make: Callable[[torch.Tensor], Any] = torch.Tensor.normal_
    first: int = 0  # of the window; 1: no row begins at a multiple of 16 bytes


def ramp(x: torch.Tensor, sign: int) -> torch.Tensor:
    return x.copy_(torch.arange(x.shape[1], device=x.device).mul(sign).expand_as(x))


def masked(x: torch.Tensor) -> torch.Tensor:
    """Normal, two thirds of them -inf."""
    x.normal_()
    return x.masked_fill_(torch.rand_like(x) < 2 / 3, -math.inf)


def recent(x: torch.Tensor) -> torch.Tensor:
    """Scores that grow with the position, by three standard deviations over the row."""
    return x.normal_().add_(torch.linspace(0, 3, x.shape[1], device=x.device))


AWKWARD: dict[str, Callable[[torch.Tensor], Any]] = {
    "ascending": lambda x: ramp(x, 1),
    "descending": lambda x: ramp(x, -1),
    "constant": lambda x: x.fill_(2.5),
    "16-values": lambda x: x.copy_(torch.randint(0, 16, x.shape, device=x.device)),
    "all-minus-inf": lambda x: x.fill_(-math.inf),
    "masked": masked,
    "recent": recent,
}
RULE = topk.rule(topk.LEAST_CAPACITY)
FEW = (RULE, Tiling(256, 3, 4, 2), Tiling(512, 1, 4, 5))
SHAPES = [
    Shape("page-k1024", ROWS, KV, 1024),
    Shape("page-k2048", ROWS, KV, 2048),
    Shape("4-long-rows", 4, 1 << 20, 1024),
    Shape("short-rows", 4096, 4096, 1024),
    *[Shape(name, SMALL, KV, 1024, FEW, make) for name, make in AWKWARD.items()],
    Shape("16-values-k2048", SMALL, KV, 2048, FEW, AWKWARD["16-values"]),
    Shape("unaligned", SMALL, KV, 1024, FEW, first=1),
    Shape("k8192", SMALL, KV, 8192, (topk.rule(topk.capacity_of(8192)),)),
]


def inputs(shape: Shape, scores: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, Any]]:
    rows = scores.shape[1]
    starts = torch.zeros(1, rows, dtype=torch.int32, device=scores.device)
    scores = scores[:, :, shape.first :]
    return [scores, starts, starts + scores.shape[2]], {"topk": shape.k}


def call_of(tensors: list[torch.Tensor], params: dict[str, Any], real: bool = True) -> Call:
    return Call.of(CATALOGUE["topk_selector"], tensors, params, real=real)


def warm(task: tuple[int, Tiling]) -> dict[str, Any]:
    """Compile a tiling for a shape, by its index, into the cache on disk."""
    from opkiln.device import cuda
    from opkiln_misc.sources import source

    shape = SHAPES[task[0]]
    scores = torch.empty(1, shape.rows, shape.kv, 1, device="meta")
    call = call_of(*inputs(shape, scores), real=False)
    try:
        cuda.compile_cubin(source("topk"), "sm_90a", topk.plan_for(call, task[1]).macros)
    except Exception as error:  # a tiling that does not compile is a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {}


def fault(scores: torch.Tensor, got: torch.Tensor, rows: torch.Tensor, want: torch.Tensor) -> str:
    """Some rows against the formula; in all, that only chosen scores are above the least chosen."""
    flat, k = got.view(-1, got.shape[-1]).sort(-1).values, got.shape[-1]
    wrong = int((flat[rows] != want).any(-1).sum())
    if wrong:
        return f"{wrong} of {len(rows)} rows wrong"
    if int(flat[:, 0].min()) < 0 or int(flat[:, -1].max()) >= scores.shape[2]:
        return "positions outside the row"
    table = scores[0, :, :, 0]
    least = table.gather(1, flat.long()).amin(-1, keepdim=True)
    bad = (flat[:, 1:] == flat[:, :-1]).any(-1)
    bad |= ((table > least).sum(-1) >= k) | ((table >= least).sum(-1) < k)
    return f"{int(bad.sum())} of all rows wrong" if bad.any() else ""


def measure(shape: Shape, scores: torch.Tensor, flush: torch.Tensor) -> list[dict[str, Any]]:
    tensors, params = inputs(shape, scores)
    call = call_of(tensors, params)
    rows = torch.linspace(0, shape.rows - 1, min(CHECKED, shape.rows), device="cuda").long()
    part = [t[:, rows] for t in tensors]
    want = call.spec.reference(*part, **params).view(len(rows), shape.k)
    records, runs = [], []
    torch.use_deterministic_algorithms(True, warn_only=True)  # outputs start as the largest integer
    for tiling in dict.fromkeys(shape.tilings):
        record: dict[str, Any] = dataclasses.asdict(tiling)
        records.append(record)
        try:
            launch = topk.prepare(call, tiling)
            record["status"] = fault(tensors[0], launch(*tensors), rows, want) or "ok"
        except Exception as error:  # recorded; the other tilings still run
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            runs.append((record, lambda launch=launch: launch(*tensors)))
    torch.use_deterministic_algorithms(False)
    times = common.kernel_times_us([run for _, run in runs], flush, ITERATIONS)
    for (record, _), samples in zip(runs, times, strict=True):
        record |= {"us": statistics.median(samples), "low_us": min(samples)}
    return records


def line(shape: Shape, records: list[dict[str, Any]]) -> str:
    timed = sorted((r for r in records if "us" in r), key=lambda r: r["us"])
    shown = [
        f"{r['threads']}x{r['blocks']} u{r['unroll']} r{r['ring']} {r['us']:.1f}" for r in timed
    ]
    failed = len(records) - len(timed)
    head = f"{shape.label} {shape.rows}x{shape.kv} k{shape.k}"
    return f"{head}: " + ", ".join(shown) + (f" | {failed} FAILED" if failed else "")


def main() -> None:
    options = common.options(__doc__)
    shapes = [s for s in SHAPES if options.only in s.label]
    tasks = [(SHAPES.index(s), t) for s in shapes for t in s.tilings]
    common.warm_all(warm, list(dict.fromkeys(tasks)))
    flush = common.flush_buffer()
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    torch.manual_seed(0)
    for shape in shapes:
        scores = torch.empty(1, shape.rows, shape.kv, 1, device="cuda")
        shape.make(scores.view(shape.rows, shape.kv))
        try:
            records = measure(shape, scores, flush)
        except Exception:  # one shape's failure must not lose the others' results
            print(f"{shape.label}: {traceback.format_exc()[-600:]}", flush=True)
            continue
        named = {"label": shape.label, "rows": shape.rows, "kv": shape.kv, "k": shape.k}
        found.append(named | {"tilings": records})
        common.write_json(options.out / "topk.json", common.provenance() | {"results": found})
        print(line(shape, records), flush=True)
        for r in records:
            if r["status"] != "ok":
                print(
                    f"  {r['threads']}x{r['blocks']} u{r['unroll']} r{r['ring']}: {r['status']!r}"
                )


if __name__ == "__main__":
    main()
