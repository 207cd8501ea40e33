"""Shards through Hydra's launchers, on a CPU: each job a record, `collect` makes them one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from opkiln_bench.records import read_run

JOBS = (
    *("device=cpu", "suite=smoke", "op=[rms_norm,fft]", "backends=[torch,torch-ref]"),
    *("run=split", "shard=0/2,1/2"),
)


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "opkiln_bench", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OPKILN_COMMIT": "test"},
    )


def plugin(name: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(
        f"hydra_plugins.hydra_{name}_launcher"
    )
    return pytest.mark.skipif(not found, reason=f"needs hydra-{name}-launcher")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("basic"),
        pytest.param("joblib", marks=plugin("joblib")),
        pytest.param("submitit_local", marks=plugin("submitit")),
    ],
)
def test_shards(tmp_path: Path, launcher: str) -> None:
    done = bench(tmp_path, "-m", *JOBS, f"launcher={launcher}")
    assert done.returncode == 0, done.stderr
    shards = [read_run(tmp_path / "runs/split" / n) for n in ("0", "1")]
    assert [len(s.rows) for s in shards] == [1, 1]
    collected = bench(tmp_path, "collect", "runs/split/0", "runs/split/1", "--into", "runs/whole")
    assert collected.stdout == "2 rows in runs/whole\n"
    assert {op for op, _, _ in read_run(tmp_path / "runs/whole").rows} == {
        "RMSNormFwd",
        "FFTC2CFwd",
    }


@plugin("submitit")
def test_slurm_asks_for_one_gpu_a_job(tmp_path: Path) -> None:
    done = bench(tmp_path, "--cfg", "hydra", "-p", "hydra.launcher", "launcher=slurm")
    assert done.returncode == 0, done.stderr
    assert "gpus_per_node: 1" in done.stdout and "SlurmLauncher" in done.stdout


def test_a_failing_job_does_not_stop_the_others(tmp_path: Path) -> None:
    jobs = [j for j in JOBS if not j.startswith(("backends", "shard"))]
    done = bench(tmp_path, "-m", *jobs, "backends=[torch]", "shard=5/2,0/2")
    assert done.returncode == 1
    assert "shard i/n needs 0 <= i < n, got '5/2'" in done.stderr
    assert len(read_run(tmp_path / "runs/split/1").rows) == 1
