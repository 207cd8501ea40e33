"""Killed, interrupted, disk full: finished rows stay, and resume=true goes on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from opkiln_bench.records import FILE, RecordError, read_run

ROWS = 6
# host_calls: a row takes about half a second, so that the signal meets one
SWEEP = (
    *("device=cpu", "suite=every", "op=[rms_norm,layer_norm]", "workload=llama-*-decode"),
    *("run=one", "backends=[torch,torch-ref]", "timer.host_calls=4000", "timer.max_samples=20"),
)


def start(folder: Path, *arguments: str, before: Callable[[], None] | None = None):
    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
        if before is not None:
            before()

    return subprocess.Popen(
        [sys.executable, "-m", "opkiln_bench", *SWEEP, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
        env={**os.environ, "OPKILN_COMMIT": "test"},
    )


def finished_rows(folder: Path) -> int:
    try:
        return len(read_run(folder / "runs/one").rows)
    except RecordError:
        return 0


def wait_for_rows(folder: Path, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 120
    while finished_rows(folder) < count:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for_rows(tmp_path, process, 2)
    process.kill()
    process.communicate()
    before = read_run(tmp_path / "runs/one").rows
    assert 2 <= len(before) < ROWS

    resumed = start(tmp_path, "resume=true")
    said, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    after = read_run(tmp_path / "runs/one").rows
    assert len(after) == ROWS
    assert all(after[key] == row for key, row in before.items())
    assert f"; {len(before)} rows were done before" in said
    left = ROWS - len(before)
    assert f"{left} of {left} rows: " in said
    assert "about" in said.splitlines()[1]  # how long the rest will take


def test_ctrl_c_leaves_pages_of_what_was_done(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for_rows(tmp_path, process, 1)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate()
    assert process.returncode == 130, errors
    assert errors.strip().endswith("run=one resume=true continues it")
    assert "Traceback" not in errors
    assert "time " in said
    assert (tmp_path / "runs/one/pages/index.html").exists()
    assert (tmp_path / "runs/one/rows.csv").exists()


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def two_rows_fit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (7_000, 7_000))

    process = start(tmp_path, before=two_rows_fit)
    _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert errors.count("\n") == 1 and "File too large" in errors and "resume=true" in errors
    assert (tmp_path / "runs/one" / FILE).stat().st_size <= 7_000
    kept = finished_rows(tmp_path)
    assert 1 <= kept < ROWS

    resumed = start(tmp_path, "resume=true")
    _, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    assert finished_rows(tmp_path) == ROWS


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("timer.min_samples=0", "timer.min_samples must be at least 2, got 0"),
        ("timer.max_samples=4", "timer.max_samples (4) is below min_samples (20)"),
        ("timer.name=sundial", "timer.name must be one of auto, cupti, wall, got 'sundial'"),
        ("shard=3/2", "shard i/n needs 0 <= i < n, got '3/2'"),
    ],
)
def test_a_wrong_number_is_told_before_anything_runs(
    tmp_path: Path, argument: str, message: str
) -> None:
    process = start(tmp_path, argument)
    said, errors = process.communicate()
    assert (process.returncode, said) == (2, "")
    assert errors == f"opkiln-bench: {message}\n"
    assert list(tmp_path.glob("runs/*")) == []
