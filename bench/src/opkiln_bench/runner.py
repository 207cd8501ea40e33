"""From a configuration to a finished run: choose, warm, measure, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from opkiln.registry import REGISTRY
from rich.console import Console

from opkiln_bench.analysis import OURS
from opkiln_bench.catalogue import (
    CatalogueError,
    Row,
    as_patterns,
    in_shard,
    in_suite,
    load_rows,
    select,
)
from opkiln_bench.contestants import chosen_backends
from opkiln_bench.environment import commit, device_name
from opkiln_bench.held_back import held_back
from opkiln_bench.lease import gpu_uuids, leased_gpu
from opkiln_bench.limits import find_profile, limits_of, user_profiles
from opkiln_bench.peers import absent
from opkiln_bench.peers.torch_compile import BACKEND as TORCH_COMPILE
from opkiln_bench.progress import Progress
from opkiln_bench.records import Recorder, RecordError, read_run
from opkiln_bench.report import publish, publish_into
from opkiln_bench.settings import Bench, Suite
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.sweep import Sweep, header_of, now, one_line
from opkiln_bench.timing import Timer
from opkiln_bench.validate import check_calls, check_config, check_device, check_folder, check_ops
from opkiln_bench.warm import fill_cache, tasks_of

WARM_ROWS = 6  # fewer are compiled faster in place: a process needs about 6 s to start
INTERRUPTED = 130


def run(cfg: Bench, raw: Any) -> int:
    """Measure what the configuration asks for. Exit code: 0, 1 (ours wrong or failed), 2, 130."""
    console = Console(soft_wrap=True, highlight=False)
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        check_config(cfg)
        kind = device_kind(cfg.device.kind)
        rows = choose_rows(cfg, kind)
        backends = choose_backends(cfg, kind)
        check_calls(rows)
        if cfg.output.publish_dir:
            check_folder("output.publish_dir", Path(cfg.output.publish_dir))
        done = finished(folder, cfg.resume, backends)
        todo = [r for r in rows if r.key not in done]
        with device_in_use(kind, cfg.device.index, console.print) as device:
            return sweep_rows(cfg, raw, todo, len(rows) - len(todo), backends, device, console)
    except (CatalogueError, RecordError) as error:
        print(f"opkiln-bench: {error}", file=sys.stderr)
        if not any(folder.iterdir()):  # Hydra made it
            folder.rmdir()
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted: {continues(cfg)}", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:  # a full disk: what was written before stands
        print(f"opkiln-bench: {one_line(error)}: {continues(cfg)}", file=sys.stderr)
        return 2


def continues(cfg: Bench) -> str:
    return f"finished rows are in the record; run={cfg.run} resume=true continues it"


def sweep_rows(
    cfg: Bench,
    raw: Any,
    rows: Sequence[Row],
    done_before: int,
    backends: Sequence[str],
    device: torch.device,
    console: Console,
) -> int:
    """Measure `rows` into the record of the run's folder and write its pages."""
    began = time.perf_counter()
    folder = Path(HydraConfig.get().runtime.output_dir)
    profile = complete_profile(cfg, device, raw)
    timer = make_timer(cfg.timer, device)
    stamp = commit()
    recorder = Recorder(folder)
    # Where the record lies is a folder of this machine and says nothing of the figures.
    stated = {k: v for k, v in raw.items() if k != "output"} | {"device": profile}
    header = header_of(device, timer, stamp, stated, backends)
    recorder.write("header", header | {"absent": absent()})
    console.print(
        f"{len(rows)} rows on {device_name(device)} ({timer.title}), "
        f"{', '.join(backends)} -> {folder}"
        + (f"; {done_before} rows were done before" if done_before else "")
    )
    limits = limits_of(profile)
    sweep = Sweep(device, timer, cfg.timer, backends, stamp, limits)
    progress = Progress(console, len(rows), limits)
    try:
        warm_up(cfg, sweep, rows, device, folder, console)
        bad = measure_rows(sweep, rows, recorder, progress)
    finally:  # also what an interrupted run has finished
        wall_s = time.perf_counter() - began
        progress.close(sweep.seconds, wall_s)
        recorder.write("footer", footer(sweep.seconds, wall_s))
        publish([folder], folder / "pages", rows_csv=folder / "rows.csv")
    if cfg.output.publish_dir:
        publish_into([folder], Path(cfg.output.publish_dir))
    console.print(f"pages: {folder / 'pages' / 'index.html'}; rows: {folder / 'rows.csv'}")
    return 1 if bad else 0


def footer(seconds: Mapping[str, float], wall_s: float) -> dict[str, Any]:
    """Where the time of a run went. wall_s: from the choice of rows to here, pages not counted."""
    return {
        "date": now(),
        "seconds": {name: round(s, 2) for name, s in seconds.items()},
        "wall_s": round(wall_s, 2),
    }


def measure_rows(sweep: Sweep, rows: Sequence[Row], recorder: Recorder, progress: Progress) -> int:
    """Measure rows into the record; how many could not be, or have ours wrong or failed."""
    bad = 0
    for row in rows:
        progress.start(row)
        began = time.perf_counter()
        try:
            entry = sweep.measure(row)
        except Exception as error:  # the other rows are still worth measuring
            progress.fail(row, one_line(error))
            bad += 1
            continue
        recorder.write("row", entry)
        bad += entry["backends"].get(OURS, {}).get("status") in ("wrong", "failed")
        progress.finish(entry, time.perf_counter() - began)
    return bad


def device_kind(kind: str) -> str:
    """cuda or cpu; `auto` is the GPU if there is one."""
    if kind not in ("auto", "cuda", "cpu"):
        raise CatalogueError(f"device.kind must be auto, cuda or cpu, got {kind!r}")
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise CatalogueError("device.kind is cuda, and torch sees no GPU here")
    return kind


@contextmanager
def device_in_use(
    kind: str, index: int | None, say: Callable[[str], None]
) -> Iterator[torch.device]:
    """The device of a run; a GPU is leased for the block and made the current one."""
    if kind == "cpu":
        yield torch.device("cpu")
        return
    uuids = gpu_uuids()
    with leased_gpu(uuids, index, say) as leased:
        torch.cuda.set_device(leased)
        yield torch.device("cuda", leased)


def choose_rows(cfg: Bench, kind: str) -> list[Row]:
    """Suite, then patterns, then shard. A row of an op that this opkiln lacks is an error."""
    suite = cfg.suite
    if suite.name == "auto" and kind == "cpu":
        suite = Suite(
            **yaml.safe_load((files("opkiln_bench.conf") / "suite/smoke.yaml").read_text())
        )
    rows = load_rows(mode=cfg.mode)
    check_ops(rows)
    if suite.held_back:
        rows = held_back(rows, suite.held_back)
    rows = select(rows, cfg.op, cfg.workload, cfg.dtype)
    rows = in_suite(rows, suite.page, suite.max_row_mbytes, suite.rows_per_op, suite.args)
    if not rows:
        raise CatalogueError(f"suite {suite.name} has no row that op, workload and dtype match")
    return in_shard(rows, cfg.shard)


def choose_backends(cfg: Bench, kind: str) -> list[str]:
    """`backends` if given, else the suite's, else the group.

    A CPU run that asked for nothing compiles nothing.
    """
    wanted = cfg.backends if cfg.backends is not None else cfg.suite.backends
    if wanted is not None:
        return chosen_backends(as_patterns(wanted))
    spared = [TORCH_COMPILE] if cfg.suite.name == "auto" and kind == "cpu" else []
    return chosen_backends(cfg.backend.patterns, [*cfg.backend.exclude, *spared])


def finished(folder: Path, resume: bool, backends: Sequence[str]) -> set[tuple[str, str, str]]:
    """Rows that a record in `folder` holds with every backend asked for; none for a new run."""
    try:
        earlier = read_run(folder)
    except RecordError:
        if (folder / "records.jsonl").exists():
            raise
        return set()
    if not resume:
        raise RecordError(
            f"{folder} has a record: resume=true continues it, run=NAME starts another"
        )
    done = set()
    for key, row in earlier.rows.items():
        wanted = {b for b in backends if b == OURS or b in REGISTRY.of(row["name"])}
        if wanted <= set(row["backends"]):
            done.add(key)
    return done


def complete_profile(cfg: Bench, device: torch.device, raw: Any) -> dict[str, Any]:
    """The device's limits: as configured, else the profile that carries its name, else none."""
    stated = dict(raw["device"])
    if device.type != "cuda" or stated.get("bandwidth_gbps"):
        return stated
    try:
        found = find_profile(device_name(device)) or {}
    except yaml.YAMLError as error:
        raise CatalogueError(f"a profile in {user_profiles()}: {one_line(error)}") from error
    check_device(found)
    return {**stated, **found}


def make_timer(settings: TimerSettings, device: torch.device) -> Timer:
    name = settings.name
    if name == "auto":
        name = "cupti" if device.type == "cuda" else "wall"
    if name == "wall":
        from opkiln_bench.timing.wall import WallTimer

        return WallTimer(settings)
    if device.type != "cuda":
        raise CatalogueError(f"timer {name!r} cannot time {device}")
    from opkiln_bench.timing.cupti import CuptiTimer

    return CuptiTimer(device, settings)


def warm_up(
    cfg: Bench,
    sweep: Sweep,
    rows: Sequence[Row],
    device: torch.device,
    folder: Path,
    console: Console,
) -> None:
    """Compile the rows in parallel processes first."""
    processes = cfg.timer.compile_processes
    if device.type != "cuda" or processes == 0 or len(rows) < WARM_ROWS:
        return
    tasks = tasks_of(rows, sweep.backends)
    if tasks:
        console.print(f"compiling {len(tasks)} calls of {len(rows)} rows in {processes} processes")
        with sweep.phase("compiling ahead"):
            fill_cache(tasks, processes, device.index, folder, console.print)
