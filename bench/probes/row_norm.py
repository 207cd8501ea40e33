"""Measure every candidate tiling of the row norm kernels on the rows of the benchmark pages.

    python bench/probes/row_norm.py --out DIR [--only NAME,...] [--dtypes bf16,...] [--no-compile]
    python bench/probes/row_norm.py --out DIR --behind | --second
    python bench/probes/row_norm.py --write-tuning DIR/row_norm.json ...

The first writes DIR/row_norm.json and prints one line a row; the second does so for the rows of
BEHIND or SECOND with fewer candidates, and then checks what row_checks.py says (not with --only);
the third puts what such files say of their rows into the tuning/sm90.json of opkiln-norm. Device
time by CUPTI, L2 flushed before each call, median; a candidate whose output is wrong is recorded
and never timed. CUDA candidates run in a process of their own first: one that hangs is left out.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import torch

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]

import row_checks  # noqa: E402
from opkiln.device import cuda  # noqa: E402
from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_norm import row_cluster, row_plan  # noqa: E402
from opkiln_norm.row_cluster import ClusterTiling  # noqa: E402
from opkiln_norm.row_plan import Tiling, plan_for  # noqa: E402
from row_pages import BEHIND, SECOND, Row, read_rows  # noqa: E402
from row_second import second  # noqa: E402
from row_table import line, write_tuning  # noqa: E402
from row_tilings import AnyTiling, candidates, focused  # noqa: E402

TOLERANCE = {"bf16": 2**-7, "f16": 2**-10, "f32": 2**-19}
COMPILE_UNTIL_S = 150  # rows measured after so long get no torch.compile baseline
VET_ROWS = 3000  # five or more for a CTA of a ring of 3: its stages are used again
VET_S = 90


def make_call(row: Row, tensors: list[Any], tiling: AnyTiling, real: bool = True) -> Call:
    """The row's call, with `tiling` as the only row of the tuning table."""
    use = dataclasses.asdict(tiling)
    entry = {"op": row.op, "itemsize": row.itemsize, "n": row.n, "rows": [1, None], "use": use}
    table = [{**entry, "label": row.label}]
    clustered = isinstance(tiling, ClusterTiling)
    row_plan.tuning_rows = lambda: [] if clustered else table
    row_cluster.cluster_rows = lambda: table if clustered else []
    return Call.of(CATALOGUE[row.op], tensors, row.params, real=real)


def warm(task: Any) -> dict[str, Any]:
    """Compile one candidate into the cache on disk, in a process of its own.

    A task of row_checks instead is run there: it compiles much and times nothing.
    """
    if not isinstance(task[0], Row):
        return {"bad": row_checks.alone_and_among_many(task)}
    row, tiling = task
    call = make_call(row, row.tensors("meta"), tiling, real=False)
    if isinstance(tiling, ClusterTiling):
        return warm_cluster(call)
    return common.resources_of(lambda: warm_triton(call, tiling))


def warm_triton(call: Call, tiling: Tiling) -> Any:
    from opkiln_norm.row_norm import OPERANDS, RESULTS, row_norm_kernel

    plan = plan_for(call)
    metas = [
        next((getattr(call.tensors, n) for n in group if hasattr(call.tensors, n)), None)
        for group in OPERANDS
    ]
    names = [o.name for o in call.spec.returns]
    outputs = [call.outputs[names.index(n)] if n in names else None for n in RESULTS]
    dtypes = [None if m is None else m.dtype for m in (*metas, *outputs)]
    return row_norm_kernel.warmup(
        *dtypes, *plan.arguments(call.params), grid=(1,), **plan.constexprs(call),
        **plan.options,
    )  # fmt: skip


def warm_cluster(call: Call) -> dict[str, Any]:
    plan = row_cluster.plan_for(call)
    if plan is None:
        return {"compile_error": "the plan refuses this call"}
    macros = plan.macros(call)
    try:
        name = plan.tiling.kernel
        kernel = cuda.load(row_cluster.source(name), name, torch.device("cuda", 0), macros)
        attributes = kernel.handle.attributes
        return {"registers": attributes.num_regs, "spills": attributes.local_size_bytes}
    except Exception as error:  # whatever NVRTC and the driver raise: a finding, not a failure
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}


def vet(tasks: list[tuple[Row, AnyTiling]], start: int) -> None:
    """Run the CUDA candidates on a few rows; a line of JSON each: its place in `tasks`, status."""
    from opkiln_norm.row_norm import prepare

    kept: dict[Row, Any] = {}
    for place, (row, tiling) in enumerate(tasks):
        if place < start or not isinstance(tiling, ClusterTiling):
            continue
        few = dataclasses.replace(row, rows=min(row.rows, VET_ROWS))
        if few not in kept:
            kept.clear()
            tensors = few.tensors("cuda")
            kept[few] = (tensors, references(few, tensors))
        tensors, wants = kept[few]
        try:
            status = status_of(prepare(make_call(few, tensors, tiling)), tensors, wants, few)
            torch.cuda.synchronize()
        except Exception as error:  # recorded
            status = f"{type(error).__name__}: {error}"[-200:]
        print(json.dumps([place, status]), flush=True)
        if "CUDA" in status:  # the context is lost
            sys.exit(1)


def start_vetting(place: int) -> subprocess.Popen[str]:
    command = [sys.executable, *sys.argv, "--vet", str(place)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def vetted(tasks: list[tuple[Row, AnyTiling]], child: subprocess.Popen[str]) -> dict[Any, str]:
    """The status of each CUDA candidate that the other process reached. After a crash a new one
    goes on; after a hang none does.
    """
    found: dict[Any, str] = {}
    end = time.time() + VET_S
    while True:
        try:
            text, _ = child.communicate(timeout=max(end - time.time(), 1))
        except subprocess.TimeoutExpired:
            child.kill()
            text, _ = child.communicate()
            print("a CUDA candidate hangs: it and those after it are left out", flush=True)
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
        found |= {tasks[place]: status for place, status in lines}
        if child.returncode <= 0 or not lines:
            return found
        child = start_vetting(lines[-1][0] + 1)


def references(row: Row, tensors: list[Any]) -> list[torch.Tensor]:
    """The outputs in float64 arithmetic, rounded to the row's dtype."""
    spec = CATALOGUE[row.op]
    step = max(2**26 // row.n, 1)
    wants = [torch.empty_like(tensors[0]) for _ in spec.returns]
    for i in range(0, row.rows, step):
        part = [t[i : i + step] if t is not None and t.ndim > 1 else t for t in tensors]
        wide = [None if t is None else t.double() for t in part]
        for want, got in zip(wants, spec.reference(*wide, **row.params), strict=False):
            want[i : i + step] = got
    return wants


def wrong_elements(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> int:
    """How many elements are off by more than one unit in the last place; NaN is off."""
    wrong = 0
    step = 2**28 // got.shape[1]
    for g, w in zip(got.split(step), want.split(step), strict=True):
        close = (g.float() - w.float()).abs() <= tolerance * w.float().abs() + 2**-18
        wrong += close.numel() - int(close.sum())
    return wrong


def status_of(launch: Callable[..., Any], tensors: list[Any], wants: Any, row: Row) -> str:
    got = launch(*tensors)
    got = got if isinstance(got, tuple) else (got,)
    wrong = [wrong_elements(g, w, TOLERANCE[row.dtype]) for g, w in zip(got, wants, strict=True)]
    return f"{sum(wrong)} elements wrong" if any(wrong) else "ok"


def baselines(row: Row, tensors: list[Any], compiled: bool) -> dict[str, Callable[[], Any]]:
    function = CATALOGUE[row.op].native
    assert function is not None

    def native(*given: torch.Tensor | None) -> Any:
        return function(*given, **row.params)

    found: dict[str, Callable[[], Any]] = {"torch": functools.partial(native, *tensors)}
    if compiled:
        torch._dynamo.reset()
        found["torch-compile"] = functools.partial(torch.compile(native, dynamic=False), *tensors)
    return found


def measure(
    row: Row,
    resources: dict[AnyTiling, Any],
    statuses: dict[Any, str],
    compiled: bool,
    flush: torch.Tensor,
) -> dict[str, Any]:
    """Every candidate and baseline of one row: status, median and least time."""
    from opkiln_norm.row_norm import prepare

    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    wants = references(row, tensors)
    records: list[dict[str, Any]] = []
    calls: list[Callable[[], Any]] = []
    torch.use_deterministic_algorithms(True)  # fills outputs with NaN before the launch
    for tiling in resources:
        clustered = isinstance(tiling, ClusterTiling)
        kernel = "row_cluster" if clustered else "row_norm"
        record = {"kernel": kernel, "use": dataclasses.asdict(tiling)} | resources[tiling]
        records.append(record)
        ran = statuses.get((row, tiling), "not reached") if clustered else "ok"
        if "compile_error" in record or ran != "ok":
            record["status"] = record.get("compile_error", ran)
            continue
        try:
            launch = prepare(make_call(row, tensors, tiling))
            record["status"] = status_of(launch, tensors, wants, row)
        except Exception as error:  # recorded; the other candidates still run
            record["status"] = f"{type(error).__name__}: {error}"[-200:]
        if record["status"] == "ok":
            calls.append(functools.partial(launch, *tensors))
    torch.use_deterministic_algorithms(False)
    del wants
    others = baselines(row, tensors, compiled)
    for function in others.values():
        function()
    iterations = common.ITERATIONS if row.rows * row.n < 2**29 else 11  # 1 ms and more
    times = common.kernel_times_us([*calls, *others.values()], flush, iterations)
    timed = [r for r in records if r["status"] == "ok"]
    for record, samples in zip(timed, times[: len(calls)], strict=True):
        record |= {"us": statistics.median(samples), "low_us": min(samples)}
    medians = map(statistics.median, times[len(calls) :])
    found = {"candidates": records, "baselines": dict(zip(others, medians, strict=True))}
    return dataclasses.asdict(row) | {"itemsize": row.itemsize} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose 'op label' contains one")
    parser.add_argument("--dtypes", default="bf16,f16,f32")
    parser.add_argument("--behind", action="store_true", help="the rows of BEHIND, then the checks")
    parser.add_argument("--second", action="store_true", help="the rows of SECOND, then the checks")
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile baselines")
    parser.add_argument("--vet", type=int, metavar="PLACE", help="what the probe starts itself")
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS", nargs="+")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    rows = read_rows(options.only, options.dtypes)
    some = options.behind or options.second
    if some:
        wanted = BEHIND if options.behind else SECOND
        rows = [r for r in rows if (r.op, r.label) in wanted]
    tilings = focused if options.behind else second if options.second else candidates
    tasks = [(row, t) for row in rows for t in tilings(row)]
    if options.vet is not None:
        return vet(tasks, options.vet)
    start = time.time()
    child = start_vetting(0)
    pages = read_rows("")
    checked = some and not options.only
    cases = row_checks.alone_cases() if checked else []
    extra = row_checks.kernels(pages) if checked else []
    resources = common.warm_all(warm, list(dict.fromkeys([*cases, *tasks, *extra])))
    bad = [text for case in cases for text in resources.pop(case)["bad"]]
    invariance = [*bad[:8], f"batch invariance: {len(cases)} cases, {len(bad)} faults"]
    failed = [(task, found) for task, found in resources.items() if "compile_error" in found]
    print(f"{len(resources)} kernels compiled in {time.time() - start:.0f} s, {len(failed)} failed")
    print(*failed[:3], sep="\n", flush=True)
    statuses = vetted(tasks, child)
    print(f"CUDA candidates vetted at {time.time() - start:.0f} s")
    print(*[s for s in statuses.values() if s != "ok"][:5], sep="\n", flush=True)
    flush = common.flush_buffer()
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    data = common.provenance() | {"results": results}
    for row in rows:
        first = row.label not in {r["label"] for r in results if r["op"] == row.op}
        short_row = row.n * row.itemsize <= row_plan.RESIDENT_BYTES
        compiled = first and short_row and not (options.no_compile or options.second)
        compiled = compiled and time.time() - start < COMPILE_UNTIL_S
        own = {t: resources[row, t] for r, t in tasks if r == row}
        results.append(measure(row, own, statuses, compiled, flush))
        common.write_json(options.out / "row_norm.json", data)
        torch.cuda.empty_cache()
        print(line(results[-1]), flush=True)
    if checked:
        print(*invariance, *row_checks.timed_checks(pages, flush), sep="\n", flush=True)
    print(f"{len(results)} rows in {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
