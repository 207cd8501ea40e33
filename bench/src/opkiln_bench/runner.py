"""From a configuration to a finished run: choose, warm, measure, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from opkiln.ops import CATALOGUE
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
from opkiln_bench.environment import commit, device_name, environment
from opkiln_bench.limits import find_profile, limits_of
from opkiln_bench.peers.torch_compile import BACKEND as TORCH_COMPILE
from opkiln_bench.progress import Progress
from opkiln_bench.records import SCHEMA_VERSION, Recorder, RecordError, read_run
from opkiln_bench.report import publish
from opkiln_bench.settings import Bench, Suite
from opkiln_bench.sweep import Sweep, now, one_line
from opkiln_bench.timing import Timer
from opkiln_bench.warm import fill_cache

WARM_ROWS = 6  # fewer are compiled faster in place: a process needs about 6 s to start


def run(cfg: Bench, raw: Any) -> int:
    """Measure what the configuration asks for. Exit code: 0, 1 (ours wrong or failed), 2."""
    console = Console(soft_wrap=True, highlight=False)
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        device = choose_device(cfg)
        rows = choose_rows(cfg, device)
        backends = choose_backends(cfg, device)
        done = finished(folder, cfg.resume, backends)
    except (CatalogueError, RecordError) as error:
        print(f"opkiln-bench: {error}", file=sys.stderr)
        if not any(folder.iterdir()):  # Hydra made it
            folder.rmdir()
        return 2
    profile = complete_profile(cfg, device, raw)
    timer = make_timer(cfg, device)
    stamp = commit()
    recorder = Recorder(folder)
    recorder.write(
        "header",
        {
            "schema_version": SCHEMA_VERSION,
            "date": now(),
            "commit": stamp,
            "timer": timer.name,
            "environment": environment(device),
            "config": {**raw, "device": profile},
            "backends": backends,
        },
    )
    todo = [r for r in rows if r.key not in done]
    console.print(
        f"{len(todo)} rows on {device_name(device)} ({timer.title}), "
        f"{', '.join(backends)} -> {folder}"
        + (f"; {len(rows) - len(todo)} rows were done before" if len(rows) > len(todo) else "")
    )
    sweep = Sweep(device, timer, cfg.timer, backends, stamp)
    warm_up(cfg, sweep, todo, device, folder, console)
    bad = measure_rows(sweep, todo, recorder, Progress(console, len(todo), limits_of(profile)))
    publish([folder], folder / "pages", rows_csv=folder / "rows.csv")
    if cfg.output.publish_dir:
        target = Path(cfg.output.publish_dir)
        publish([folder], target, rows_csv=target / "rows.csv")
    console.print(f"pages: {folder / 'pages'}; rows: {folder / 'rows.csv'}")
    return 1 if bad else 0


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
    progress.close(sweep.seconds)
    return bad


def choose_device(cfg: Bench) -> torch.device:
    """The device of `device.kind`; `auto` is the GPU if there is one."""
    kind = cfg.device.kind
    if kind not in ("auto", "cuda", "cpu"):
        raise CatalogueError(f"device.kind must be auto, cuda or cpu, got {kind!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise CatalogueError("device.kind is cuda, and torch sees no GPU here")
    if kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", cfg.device.index)
    torch.cuda.set_device(device)
    return device


def choose_rows(cfg: Bench, device: torch.device) -> list[Row]:
    """Suite, then patterns, then shard; rows of ops that this opkiln lacks are left out."""
    suite = cfg.suite
    if suite.name == "auto" and device.type == "cpu":
        suite = Suite(
            **yaml.safe_load((files("opkiln_bench.conf") / "suite/smoke.yaml").read_text())
        )
    rows = [r for r in load_rows() if r.name in CATALOGUE]
    rows = select(rows, cfg.op, cfg.workload, cfg.dtype)
    rows = in_suite(rows, suite.page, suite.max_row_mbytes, suite.rows_per_op)
    if not rows:
        raise CatalogueError(f"suite {suite.name} has no row that op, workload and dtype match")
    return in_shard(rows, cfg.shard)


def choose_backends(cfg: Bench, device: torch.device) -> list[str]:
    """`backends` if given, else the group; a CPU run that asked for nothing compiles nothing."""
    if cfg.backends is not None:
        return chosen_backends(as_patterns(cfg.backends))
    spared = [TORCH_COMPILE] if cfg.suite.name == "auto" and device.type == "cpu" else []
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
    return {**stated, **(find_profile(device_name(device)) or {})}


def make_timer(cfg: Bench, device: torch.device) -> Timer:
    name = cfg.timer.name
    if name == "auto":
        name = "cupti" if device.type == "cuda" else "wall"
    if name == "wall":
        from opkiln_bench.timing.wall import WallTimer

        return WallTimer(cfg.timer)
    if name != "cupti" or device.type != "cuda":
        raise SystemExit(f"opkiln-bench: timer {name!r} cannot time {device}")
    from opkiln_bench.timing.cupti import CuptiTimer

    return CuptiTimer(device, cfg.timer)


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
    wanted = TORCH_COMPILE in sweep.backends and device.type == "cuda" and processes > 0
    if wanted and len(rows) >= WARM_ROWS:
        console.print(f"compiling {len(rows)} rows in {processes} processes")
        with sweep.phase("compiling ahead"):
            fill_cache(rows, processes, device.index, folder)
