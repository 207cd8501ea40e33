"""The command: help, configuration, bad input, and a CPU sweep end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from opkiln_bench.records import read_run
from opkiln_bench.rows_csv import read_csv

SWEEP = [
    "device=cpu",
    "op=[rms_norm,batch_norm]",
    "suite=smoke",
    "backends=[opkiln,torch,torch-ref]",
]


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "opkiln_bench", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OPKILN_COMMIT": "test"},
    )


def test_help_lists_groups_and_units(tmp_path: Path) -> None:
    done = bench(tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert "suite: auto, every, held_back, page_all, page_norm, smoke" in done.stdout
    assert "budget_ms" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_cfg_shows_the_job(tmp_path: Path) -> None:
    done = bench(tmp_path, "--cfg", "job", "suite=page_norm", "op=*norm", "workload=llama-*")
    assert done.returncode == 0, done.stderr
    assert "page: norm" in done.stdout
    assert "workload: llama-*" in done.stdout


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("op=rms_nrm", "unknown op 'rms_nrm'; the nearest are rms_norm"),
        ("backends=[torhc]", "unknown backend 'torhc'; the nearest are torch"),
        ("suite.rows_per_op=-1", "suite.rows_per_op must be at least 1, got -1"),
        ("device.bandwidth_gbps=100", "device.bandwidth_gbps, peaks_tflops and floor go together"),
        ("backends=[vllm]", "backend vllm cannot be measured here: its wheel is larger"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tmp_path: Path, argument: str, message: str) -> None:
    done = bench(tmp_path, "device=cpu", argument)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("reprot", "unknown command 'reprot'; the nearest is report; settings are name=value"),
        ("verfy", "the nearest is verify;"),
        ("xyzzy", "the nearest is report, compare, history, verify, calibrate, collect, table, t"),
    ],
)
def test_an_unknown_command_lists_the_nearest(tmp_path: Path, word: str, told: str) -> None:
    done = bench(tmp_path, word, "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr and done.stderr.count("\n") == 1


def test_a_broken_configuration_fails_before_anything_runs(tmp_path: Path) -> None:
    for argument in ("timer.min_samples=many", "timer.samples=20", "suite=none"):
        assert bench(tmp_path, argument).returncode != 0
        assert list(tmp_path.glob("runs/*/records.jsonl")) == []


def test_a_cpu_sweep_end_to_end(tmp_path: Path) -> None:
    first = bench(tmp_path, *SWEEP, "run=one", "op=rms_norm")
    assert first.returncode == 0, first.stderr
    again = bench(tmp_path, *SWEEP, "run=one")
    assert again.returncode == 2 and "resume=true continues it" in again.stderr
    resumed = bench(tmp_path, *SWEEP, "run=one", "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "1 rows on CPU" in resumed.stdout and "1 rows were done before" in resumed.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs"]

    run = read_run(tmp_path / "runs" / "one")
    assert {op for op, _, _ in run.rows} == {"RMSNormFwd", "BatchNormFwd"}
    for row in run.rows.values():
        for backend in ("torch", "torch-ref"):
            entry = row["backends"][backend]
            assert entry["status"] == "ok", entry
            assert len(entry["forward_us"]) + len(entry["reversed_us"]) >= 20
            assert entry["host_us"] > 0
    assert run.header["commit"] == "test"
    assert str(tmp_path) not in json.dumps(run.header) and "output" not in run.header["config"]
    assert len(run.footers) == 2 and 0 < sum(s for _, s in run.spent) <= run.wall_s
    method = (tmp_path / "runs/one/pages/method.md").read_text()
    assert "- Where the time went: " in method and "s in 2 parts." in method
    page = (tmp_path / "runs/one/pages/normalization.md").read_text()
    assert page.startswith("# Normalization (CPU wall clock)")
    lines = read_csv(tmp_path / "runs/one/rows.csv")
    assert len(lines) == 2 and {line["commit"] for line in lines} == {"test"}

    report = bench(tmp_path, "report", "runs/one", "--into", "published")
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "published/normalization.md").read_text() == page
    collected = bench(tmp_path, "collect", "runs/one", "--into", "runs/whole")
    assert collected.stdout == "2 rows in runs/whole\n"


def test_multirun_by_shards(tmp_path: Path) -> None:
    done = bench(tmp_path, "-m", *SWEEP, "run=split", "shard=0/2,1/2")
    assert done.returncode == 0, done.stderr
    shards = [read_run(tmp_path / "runs/split" / n) for n in ("0", "1")]
    assert all(len(s.rows) == 1 for s in shards)
    assert set(shards[0].rows).isdisjoint(shards[1].rows)
