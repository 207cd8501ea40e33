"""The schema of the app's configuration. Names carry units; `conf/*.yaml` holds the values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore


@dataclass
class Suite:
    """Which rows of the catalogue a run may touch."""

    name: str = "every"
    page: str | None = None  # "norm" or "all": only rows of that page
    max_row_mbytes: float | None = None  # bytes that a row's call reads and writes
    rows_per_op: int | None = None  # the smallest ones
    args: dict[str, Any] = field(default_factory=dict)  # only rows that pass these values
    held_back: int | None = None  # so many rows an op of the held-back sample, and no others
    backends: list[str] | None = None  # unless `backends` says others


@dataclass
class Backend:
    """Which registered backends are timed, as patterns."""

    patterns: list[str] = field(default_factory=lambda: ["*"])
    exclude: list[str] = field(default_factory=list)


@dataclass
class Timer:
    """How a call is timed."""

    name: str = "auto"
    min_samples: int = 20
    max_samples: int = 60
    budget_ms: float = 400.0  # of calls, for one backend on one row, above min_samples
    warmup_calls: int = 3
    host_calls: int = 20
    l2_flush_factor: float = 2.0  # zeroed before each call, in sizes of the L2
    compile_processes: int = 14  # fill the compilers' caches before anything is timed; 0: do not


@dataclass
class Device:
    """Where a run happens, and the limits of that device (docs: `opkiln-bench calibrate`)."""

    kind: str = "auto"  # auto, cuda, cpu
    index: int | None = None  # of the GPU; None: the first that no other run has leased
    gpu: str | None = None
    bandwidth_gbps: float | None = None
    peaks_tflops: dict[str, float] = field(default_factory=dict)
    floor: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass
class Output:
    """Where a run writes."""

    runs_dir: str = "runs"
    publish_dir: str | None = None


@dataclass
class Bench:
    """One run."""

    suite: Suite = field(default_factory=Suite)
    backend: Backend = field(default_factory=Backend)
    timer: Timer = field(default_factory=Timer)
    device: Device = field(default_factory=Device)
    output: Output = field(default_factory=Output)
    mode: str = "fwd"  # fwd: the rows of the pages; bwd: every op's backward; all
    op: Any = "*"  # a pattern or a list of them: page names or python names
    workload: Any = "*"
    dtype: Any = "*"  # f16, bf16, f32, c64, c128
    backends: Any = None  # replaces backend.patterns
    shard: str = "0/1"  # this part of the ops, of so many
    run: str = "run"  # record folder under output.runs_dir
    resume: bool = False


def register() -> None:
    """Make the schema known to Hydra."""
    ConfigStore.instance().store(name="schema", node=Bench)
