"""Fill the compilers' caches before anything is timed: rows compiled by several processes.

`python -m opkiln_bench.warm CUDA_INDEX < rows` runs our kernels and torch-compile once on each row
named by a line `op<TAB>label<TAB>dtype`. Triton and Inductor keep their code on disk, so that the
timing process only loads it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from opkiln_bench.catalogue import Row, load_rows

LARGE_BYTES = 1 << 30  # rows above it go to one process, one after the other: memory is shared


def shares(rows: Sequence[Row], processes: int) -> list[list[Row]]:
    """The rows of each process: large ones in the first, the others dealt out evenly."""
    large = [r for r in rows if r.input_bytes > LARGE_BYTES]
    parts: list[list[Row]] = [large, *[[] for _ in range(processes - 1)]]
    for row in rows:
        if row.input_bytes <= LARGE_BYTES:
            min(parts, key=len).append(row)
    return [part for part in parts if part]


def fill_cache(rows: Sequence[Row], processes: int, index: int, folder: Path) -> None:
    """Compile every row in subprocesses; their output goes to `folder`. Failures show up later.

    Autotuning results of processes that shared the GPU are noise: they are thrown away, so that the
    timing process tunes alone.
    """
    cache = Path(tempfile.gettempdir()) / f"opkiln-bench-{getpass.getuser()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    # else Inductor moves it at its first compilation, and Triton misses what it had before
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    folder.mkdir(parents=True, exist_ok=True)
    running = []
    for number, part in enumerate(shares(rows, processes)):
        with open(folder / f"warm-{number}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "opkiln_bench.warm", str(index)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at start: the log says why
            process.stdin.write("".join("\t".join(row.key) + "\n" for row in part))
            process.stdin.close()
        running.append(process)
    for process in running:
        process.wait()
    for tuned in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        tuned.unlink()


def main() -> None:
    import torch

    from opkiln_bench.analysis import OURS
    from opkiln_bench.contestants import bring, declined, enter
    from opkiln_bench.peers.torch_compile import BACKEND as TORCH_COMPILE

    device = torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(device)
    wanted = {tuple(line.rstrip("\n").split("\t")) for line in sys.stdin}
    for row in load_rows():
        if row.key not in wanted:
            continue
        subject = bring(row, device)
        for backend in (OURS, TORCH_COMPILE):
            try:
                if declined(subject, backend) is None:
                    enter(subject, backend)
            except Exception as error:  # the timing process meets it again and reports it
                print(f"{row} {backend}: {type(error).__name__}: {error}", flush=True)
        del subject
        torch._dynamo.reset()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
