"""Fill the compilers' caches before anything is timed: rows compiled by several processes.

`python -m opkiln_bench.warm CUDA_INDEX < tasks` runs backends once on rows, as lines
`op<TAB>label<TAB>dtype<TAB>backend` name them. What compiles keeps its code on disk (Triton,
Inductor, flashinfer's nvcc builds), so that the timing process only loads it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from opkiln_bench.analysis import OURS
from opkiln_bench.catalogue import Row

# Rows above LARGE_BYTES of input go to a few processes: all share the GPU's memory, and a top-k of
# 8.6 GB takes 30.
LARGE_BYTES = 1 << 30
LARGE_PROCESSES = 3
DONE = "done"
SAY_EVERY_S = 10.0

COMPILED = (OURS, "torch-compile", "liger", "flaggems")  # each row has code of its own
BUILT = ("flashinfer",)  # by nvcc; one build an op serves every row

Task = tuple[Row, str]


def tasks_of(rows: Sequence[Row], backends: Iterable[str]) -> list[Task]:
    """What is worth compiling ahead: rows that a compiling backend implements."""
    from opkiln.registry import REGISTRY

    chosen = set(backends)
    tasks: list[Task] = []
    built: set[tuple[str, str]] = set()
    for row in rows:
        for backend in sorted(REGISTRY.of(row.name).keys() & chosen):
            if backend in COMPILED:
                tasks.append((row, backend))
            elif backend in BUILT and (row.name, backend) not in built:
                built.add((row.name, backend))
                tasks.append((row, backend))
    return tasks


def shares(tasks: Sequence[Task], processes: int) -> list[list[Task]]:
    """The tasks of each process: large rows in the first ones, a row's together."""
    parts: list[list[Task]] = [[] for _ in range(processes)]
    rows = [list(group) for _, group in groupby(tasks, key=lambda t: t[0].key)]
    for of_row in sorted(rows, key=lambda r: r[0][0].input_bytes <= LARGE_BYTES):
        large = of_row[0][0].input_bytes > LARGE_BYTES
        min(parts[:LARGE_PROCESSES] if large else parts, key=len).extend(of_row)
    return [part for part in parts if part]


def builds(tasks: Sequence[Task]) -> list[list[Task]]:
    """The nvcc builds, a process a family. Each starts a compiler a core, so nothing runs beside
    them: 14 processes that compiled rows meanwhile did 184 of 644 calls in 189 s.
    """
    by_family: dict[str, list[Task]] = {}
    for task in tasks:
        if task[1] in BUILT:
            by_family.setdefault(task[0].family, []).append(task)
    return list(by_family.values())


def keep_caches() -> None:
    """Caches on disk that the timing process shares with those that compile."""
    cache = Path(tempfile.gettempdir()) / f"opkiln-bench-{getpass.getuser()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    # else Inductor moves it at its first compilation, and Triton misses what it had before
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))


def fill_cache(
    tasks: Sequence[Task], processes: int, index: int, folder: Path, say: Callable[[str], None]
) -> None:
    """Compile every task in subprocesses; their output goes to `folder`. Failures show up later.

    Autotuning results of processes that shared the GPU are noise: they are thrown away, so that the
    timing process tunes alone.
    """
    keep_caches()
    folder.mkdir(parents=True, exist_ok=True)
    run_all(builds(tasks), index, folder, "build", say)
    run_all(shares([t for t in tasks if t[1] not in BUILT], processes), index, folder, "warm", say)
    for tuned in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        tuned.unlink()


def run_all(
    parts: Sequence[Sequence[Task]], index: int, folder: Path, name: str, say: Callable[[str], None]
) -> None:
    """A process for each part, all at once; until they have ended."""
    with tempfile.TemporaryDirectory() as scratch:
        logs, running = [], []
        for number, part in enumerate(parts):
            logs.append(folder / f"{name}-{number}.log")
            running.append(start(part, index, logs[-1], Path(scratch) / str(number)))
        try:
            wait(running, logs, sum(map(len, parts)), say)
        finally:
            for process in running:
                process.kill()
                process.wait()


def start(part: Sequence[Task], index: int, log: Path, scratch: Path) -> subprocess.Popen[str]:
    """A process that compiles `part`. FlagGems keeps what it tuned in `scratch`, not for later."""
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "FLAGGEMS_CACHE_DIR": str(scratch)}
    with open(log, "w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "opkiln_bench.warm", str(index)],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **threads},
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at start: the log says why
        process.stdin.write("".join("\t".join((*row.key, b)) + "\n" for row, b in part))
        process.stdin.close()
    return process


def wait(
    running: Sequence[subprocess.Popen[str]],
    logs: Sequence[Path],
    total: int,
    say: Callable[[str], None],
) -> None:
    """Until all have ended, saying now and then how far they are."""
    told = time.monotonic()
    while any(process.poll() is None for process in running):
        time.sleep(0.2)
        if time.monotonic() - told > SAY_EVERY_S:
            told = time.monotonic()
            finished = sum(log.read_text(errors="replace").count(f"\n{DONE}\n") for log in logs)
            say(f"  compiled {finished} of {total}")


def main() -> None:
    import torch

    from opkiln_bench.contestants import bring, declined, enter
    from opkiln_bench.held_back import every_row
    from opkiln_bench.tuning import only_compile

    only_compile()
    device = torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(device)
    by_key = {row.key: row for row in every_row()}
    tasks = [line.rstrip("\n").split("\t") for line in sys.stdin]
    for key, group in groupby(tasks, key=lambda t: tuple(t[:3])):
        subject = bring(by_key[key], device)
        for *_, backend in group:
            try:
                if declined(subject, backend) is None:
                    enter(subject, backend)
            except Exception as error:  # the timing process meets it again and reports it
                print(f"{subject.row} {backend}: {type(error).__name__}: {error}")
            print(f"\n{DONE}", flush=True)
        del subject
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
