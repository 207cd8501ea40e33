"""What a run asks for, checked before anything runs: one line that names the wrong setting."""

from __future__ import annotations

import difflib
import inspect
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from opkiln import functional
from opkiln.ops import CATALOGUE

from opkiln_bench.catalogue import MODES, CatalogueError, Row, in_shard
from opkiln_bench.held_back import PER_OP
from opkiln_bench.inputs import check_fill
from opkiln_bench.settings import Bench

TIMERS = ("auto", "cupti", "wall")
PAGES = (None, "all", "norm")
LEAST = {
    "timer.min_samples": 2,
    "timer.budget_ms": 0,
    "timer.warmup_calls": 1,
    "timer.host_calls": 1,
    "timer.l2_flush_factor": 0,
    "timer.compile_processes": 0,
    "suite.rows_per_op": 1,
    "suite.max_row_mbytes": 0,
    "suite.held_back": 1,
}
PEAKS = ("tensor_f16", "vector_f32", "vector_f64")
FLOOR = ("read_bytes", "write_bytes", "us")


def check_config(cfg: Bench) -> None:
    """Values that types cannot rule out."""
    for name, least in LEAST.items():
        group, field = name.split(".")
        value = getattr(getattr(cfg, group), field)
        if value is not None and value < least:
            raise CatalogueError(f"{name} must be at least {least}, got {value}")
    timer = cfg.timer
    if timer.max_samples < timer.min_samples:
        raise CatalogueError(
            f"timer.max_samples ({timer.max_samples}) is below min_samples ({timer.min_samples})"
        )
    if timer.name not in TIMERS:
        raise CatalogueError(f"timer.name must be one of {', '.join(TIMERS)}, got {timer.name!r}")
    if cfg.suite.page not in PAGES:
        raise CatalogueError(f"suite.page must be all, norm or null, got {cfg.suite.page!r}")
    if (cfg.suite.held_back or 0) > PER_OP:
        raise CatalogueError(f"suite.held_back must be at most {PER_OP}, got {cfg.suite.held_back}")
    if cfg.mode not in MODES:
        raise CatalogueError(f"mode must be one of {', '.join(MODES)}, got {cfg.mode!r}")
    in_shard([], cfg.shard)
    check_device(vars(cfg.device))


def check_device(profile: Mapping[str, Any]) -> None:
    """A device states all of its limits, or none: a part of them would break every page."""
    bandwidth, peaks, floor = (profile.get(k) for k in ("bandwidth_gbps", "peaks_tflops", "floor"))
    if bandwidth is None and not peaks and not floor:
        return
    if bandwidth is None or not peaks or not floor:
        raise CatalogueError(
            "device.bandwidth_gbps, peaks_tflops and floor go together "
            "(opkiln-bench calibrate writes them)"
        )
    for name, value in {"bandwidth_gbps": bandwidth, **peaks}.items():
        if not value > 0:
            raise CatalogueError(f"device: {name} must be above 0, got {value}")
    for what, known, needed in (("peaks_tflops", peaks, PEAKS), ("floor", floor, FLOOR)):
        if missing := [name for name in needed if name not in known]:
            raise CatalogueError(f"device.{what} lacks {', '.join(missing)}")
    check_floor(floor)


def check_floor(floor: Mapping[str, Any]) -> None:
    """Two ascending axes of bytes, and a positive time for each pair."""
    try:
        read, written, us = (np.asarray(floor[name], dtype=float) for name in FLOOR)
    except (TypeError, ValueError) as error:
        raise CatalogueError(f"device.floor is no table of numbers: {error}") from error
    if us.shape != (read.size, written.size) or min(us.shape) < 2 or not (us > 0).all():
        raise CatalogueError("device.floor.us needs a time above 0 for each read and write size")
    if any(axis[0] < 0 or (np.diff(axis) <= 0).any() for axis in (read, written)):
        raise CatalogueError("device.floor: read_bytes and write_bytes must ascend from 0 or more")


def check_ops(rows: Iterable[Row]) -> None:
    """Rows name an op and a function that this opkiln has."""
    for row in {(r.where, r.op, r.name, r.function): r for r in rows}.values():
        spec = CATALOGUE.get(row.name)
        if spec is None:
            raise CatalogueError(f"{row.where}: {unknown('op', row.name, CATALOGUE)}")
        if spec.op != row.op:
            raise CatalogueError(f"{row.where}: {row.name} is {spec.op}, not {row.op}")
        if row.function not in functional.__all__:
            raise CatalogueError(
                f"{row.where}: {unknown('function', row.function, functional.__all__)}"
            )


def check_calls(rows: Iterable[Row]) -> None:
    """Rows pass arguments that their function takes, and fills that exist."""
    for row in rows:
        taken = inspect.signature(getattr(functional, row.function)).parameters
        for name in (*row.tensors, *row.args):
            if name not in taken:
                raise CatalogueError(f"{row.where}: {row}: {unknown('argument', name, taken)}")
        for name, tensor in row.tensors.items():
            try:
                check_fill(tensor.fill)
            except CatalogueError as error:
                raise CatalogueError(f"{row.where}: {row}: {name}: {error}") from error


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names[:3]
    return f"unknown {what} {name!r}; the nearest are {', '.join(near)}"


def check_folder(setting: str, folder: Path) -> None:
    """A folder that a run will write to can be made and written now; it stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CatalogueError(f"{setting}: cannot write {folder}: {error.strerror}") from error
