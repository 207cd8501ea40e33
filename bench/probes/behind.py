"""Norm and pool rows that are behind: candidates against what ships and against the peers.

    python bench/probes/behind.py --out DIR [--only NAME,...] [--no-peers]

Writes DIR/behind.json, prints the best candidates of each row, what ships, torch.compile and, where
it is installed, quack; then a table. A candidate whose output is wrong is recorded, not timed.
Names: "shipped", or a tiling without what is at its default. `--only` picks rows by parts of
'op label dtype'.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import behind_tilings as tilings
import channel_norm
import channel_rows
import common
import pool
import row_checks
import row_norm
import row_pages
import torch
from behind_report import details, merged, name_of, summary
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_norm import channel_cuda, channel_plan, row_cluster
from opkiln_pool import pool_plan, window_cuda
from row_pages import Row

CHANNEL_TABLES = channel_plan.tuning_rows, channel_cuda.cuda_rows
FILLERS = (0, 5)  # small tensors before those of a channel norm: its parameters lie elsewhere
QUACK_OPS = ("rms_norm", "fused_add_rms_norm")
LONG = 2**29  # elements, from which a call takes a millisecond

ROW_NORMS = """
rms_norm           llama-70b-prefill      f16
rms_norm           llama-70b-prefill      bf16
fused_add_rms_norm llama-70b-prefill      f16
fused_add_rms_norm llama-405b-prefill     f16
fused_add_rms_norm llama-405b-prefill     bf16
rms_norm           quack-throughput-8192  bf16
rms_norm           quack-throughput-131072 f16
"""
WIDTHS = (  # op, dtype, N; those of whole vectors are what the others are judged by
    ("rms_norm", "bf16", 16384), ("rms_norm", "bf16", 12288), ("rms_norm", "bf16", 12289),
    ("rms_norm", "f16", 12289), ("rms_norm", "bf16", 12290), ("rms_norm", "bf16", 8193),
    ("rms_norm", "bf16", 4097), ("layer_norm", "bf16", 16384), ("layer_norm", "bf16", 12289),
    ("fused_add_rms_norm", "bf16", 16384), ("fused_add_rms_norm", "bf16", 12289),
)  # fmt: skip
CHANNEL_NORMS = (
    "wider-channel-affine f16", "image-eval", "image-affine", "image-track-stats",
    "resnet-stage3-eval",
)  # fmt: skip
POOLS = ("max_pool2d_indices vgg-block f32", "max_pool1d_indices sincnet")


def all_rows() -> list[Any]:
    """Those that matter most first."""
    channels = [
        r
        for r in channel_rows.read_rows(",".join(CHANNEL_NORMS))
        if r.op in ("instance_norm", "batch_norm") and "cl" not in r.flags
    ]
    widths = [
        Row(op, f"width-{n}", dtype, row_checks.WIDTH_ELEMENTS // n, n, 1 + ("layer" in op), 0, 0)
        for op, dtype, n in WIDTHS
    ]
    wanted = [tuple(line.split()) for line in ROW_NORMS.strip().splitlines()]
    pages = {(r.op, r.label, r.dtype): r for r in row_pages.read_rows("")}
    return [*channels, *widths, *(pages[key] for key in wanted), *pool.read_rows(",".join(POOLS))]


def candidates(row: Any) -> list[Any]:
    """None stands for what ships."""
    if isinstance(row, pool.Row):
        return [None, *tilings.pool_tilings(row)]
    if isinstance(row, channel_rows.Row):
        call = row.call(row.tensors("meta"), real=False)
        sizes = channel_cuda.sizes_of(call)
        return [None, *(t for t in tilings.team_tilings(row) if t.fits(sizes))]
    if not row.label.startswith("width"):
        return [None, *tilings.row_tilings(row)]
    return [None, *(tilings.shift_tilings(row) if row.n * row.itemsize % 16 else [])]


def shipped_call(row: Any, tensors: list[Any], real: bool = True) -> Call:
    """The call under the tables as they are; rows across vectors go to Triton, as they did."""
    row_checks.use_tables(True)
    channel_plan.tuning_rows, channel_cuda.cuda_rows = CHANNEL_TABLES
    pool_plan.tuned, window_cuda.cuda_rows = pool.POOL_TUNED, pool.CUDA_ROWS
    row_cluster.SHIFT_BYTES = 2**62
    if isinstance(row, Row):
        return Call.of(CATALOGUE[row.op], tensors, row.params, real=real)
    return row.call(tensors, real=real)


def prepare(row: Any, tiling: Any, tensors: list[Any]) -> Callable[..., Any]:
    """The launch of a candidate."""
    from opkiln_norm import channel_norm as channels
    from opkiln_norm import row_norm as rows

    call = shipped_call(row, tensors)
    if isinstance(row, pool.Row):
        if tiling is not None:
            pool.use(tiling)
        return pool.prepared(call)
    if isinstance(row, channel_rows.Row):
        if tiling is not None:
            return channel_norm.prepare(row, tiling, call)
        return channel_cuda.prepare(call) or channels.prepare_forward(call)
    row_cluster.SHIFT_BYTES = 2**62
    return rows.prepare(call if tiling is None else row_norm.make_call(row, tensors, tiling))


def warm(task: tuple[Any, Any]) -> dict[str, Any]:
    """Compile a candidate, or with "peer" torch.compile's kernels, into the caches on disk."""
    row, tiling = task
    try:
        if tiling == "peer":
            compiled_peer(row, row.tensors("cuda"))()
        elif tiling is None:
            tensors = row.tensors("cuda")
            prepare(row, None, tensors)(*tensors)
        elif isinstance(row, Row):
            return row_norm.warm(task)
        elif isinstance(row, channel_rows.Row):
            return channel_norm.warm(task)
        else:
            return pool.warm(task)
    except Exception as error:  # a finding
        return {"compile_error": f"{type(error).__name__}: {error}"[-200:]}
    return {}


def compiled_peer(row: Any, tensors: list[Any]) -> Callable[[], Any]:
    torch._dynamo.reset()
    if isinstance(row, channel_rows.Row):
        return channel_rows.baselines(row, tensors, compiled=True)["torch-compile"]
    native = CATALOGUE[row.op].native
    assert native is not None
    function = torch.compile(lambda *given: native(*given, **row.params), dynamic=False)
    return functools.partial(function, *tensors)


def peers(row: Any, tensors: list[Any], wanted: bool) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    if not wanted:
        return found
    if has_compiled_peer(row):
        found["torch-compile"] = compiled_peer(row, tensors)
    if isinstance(row, Row) and row.op in QUACK_OPS and row.n % 8 == 0:
        with contextlib.suppress(ImportError):
            from quack.rmsnorm import rmsnorm_fwd

            if row.adds:
                x, residual, weight = tensors
                found["quack"] = lambda: rmsnorm_fwd(x, weight, None, residual, eps=1e-6)
            else:
                x, weight = tensors
                found["quack"] = lambda: rmsnorm_fwd(x, weight, eps=1e-6)
    return found


def has_compiled_peer(row: Any) -> bool:
    return not (isinstance(row, Row) and (row.label.startswith("width") or row.n > 2**16))


def checker(row: Any, tensors: list[Any]) -> Callable[[Any], str]:
    """What is wrong with an output, in a few words."""
    if isinstance(row, pool.Row):
        want = pool.reference(row, tensors)
        count: Callable[[Any], int] = lambda got: pool.wrong_elements(got, want, row)  # noqa: E731
    elif isinstance(row, channel_rows.Row):
        wants = channel_rows.reference(row, tensors)[:1]

        def count(got: Any) -> int:
            return channel_rows.wrong_elements(row, as_list(got)[:1], wants)

    else:
        sums = row_norm.references(row, tensors)
        tolerance = row_norm.TOLERANCE[row.dtype]

        def count(got: Any) -> int:
            pairs = zip(as_list(got), sums, strict=True)
            return sum(row_norm.wrong_elements(g, w, tolerance) for g, w in pairs)

    def fault(got: Any) -> str:
        wrong = count(got)
        return f"{wrong} elements wrong" if wrong else ""

    return fault


def as_list(got: Any) -> list[Any]:
    return list(got) if isinstance(got, tuple) else [got]


def measure(row: Any, usable: list[Any], wanted: bool, flush: torch.Tensor) -> dict[str, Any]:
    """Candidates and peers; a channel norm in several places of memory, its times together."""
    runs: dict[str, Callable[[], Callable[[], Any]]] = {}
    found: dict[str, Any] = {}
    places = FILLERS if isinstance(row, channel_rows.Row) else (0,)
    for filler in places:
        torch.manual_seed(0)
        kept = [torch.empty(128, device="cuda") for _ in range(filler)]
        tensors = row.tensors("cuda")

        care = special(row, tensors)

        def build(tiling: Any, given: list[Any] = tensors, care: Any = care) -> Callable[[], Any]:
            launch = prepare(row, tiling, given)
            if care is not None:
                wrong = pool.wrong_elements(launch(*care[0]), care[1], row)
                if wrong:
                    raise RuntimeError(f"{wrong} elements wrong of ties, NaN and -inf")
            return functools.partial(launch, *given)

        runs = {name_of(t): functools.partial(build, t) for t in usable}
        iterations = 11 if isinstance(row, Row) and row.rows * row.n >= LONG else common.ITERATIONS
        others = peers(row, tensors, wanted)
        more = common.measure(runs, others, checker(row, tensors), flush, iterations)
        found = merged(found, more) if found else more
        del kept, tensors
    return found


def special(row: Any, tensors: list[Any]) -> tuple[list[Any], list[torch.Tensor]] | None:
    """Inputs of a pool where maxima need care, and the outputs."""
    if not isinstance(row, pool.Row):
        return None
    given = pool.special(row, tensors)
    return given, pool.reference(row, given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--seconds", type=float, default=100, help="no row starts after so long")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # of each of many processes
    start = time.time()
    names = options.only.split(",")
    rows = [r for r in all_rows() if any(n in f"{r.op} {r.label} {r.dtype}" for n in names)]
    tasks = [(row, t) for row in rows for t in candidates(row)]
    extra = [] if options.no_peers else [(r, "peer") for r in rows if has_compiled_peer(r)]
    resources = common.warm_all(warm, [*extra, *tasks])
    print(f"{len(resources)} compiled in {time.time() - start:.0f} s", flush=True)
    flush = common.flush_buffer()
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    data = common.provenance() | {"results": results}
    lines = []
    for row in rows:
        if time.time() - start > options.seconds:
            lines.append(f"no time for {row.op} {row.label} {row.dtype}")
            continue
        bad = {t: f["compile_error"] for (r, t), f in resources.items()
               if r == row and "compile_error" in f}  # fmt: skip
        usable = [t for t in candidates(row) if t not in bad]
        try:
            found = measure(row, usable, not options.no_peers, flush)
        except Exception as error:  # the other rows still run
            lines.append(f"{row.op} {row.label} {type(error).__name__}: {error}"[:300])
            continue
        found["candidates"] += [{"name": name_of(t), "status": e} for t, e in bad.items()]
        more = {name_of(t): {"use": None if t is None else dataclasses.asdict(t)} | f
                for (r, t), f in resources.items() if r == row and t != "peer"}  # fmt: skip
        for c in found["candidates"]:
            c |= more.get(c["name"], {})
        results.append(dataclasses.asdict(row) | found)
        common.write_json(options.out / "behind.json", data)
        lines.append(summary(row, found))
        print(lines[-1], flush=True)
        details(found)
        torch.cuda.empty_cache()
    print(f"\n{time.time() - start:.0f} s", *lines, sep="\n")


if __name__ == "__main__":
    main()
