"""GPUs are leased by file locks: two runs never get the same one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from opkiln_bench import lease, runner
from opkiln_bench.catalogue import CatalogueError
from opkiln_bench.lease import leased_gpu

GPUS = ["gpu-a", "gpu-b"]
HOLDER = """
import sys, time
from opkiln_bench.lease import leased_gpu
with leased_gpu(["gpu-a", "gpu-b"], None, print) as index:
    print(index, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def locks_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(lease.tempfile, "tempdir", None)  # it is looked up once
    monkeypatch.setattr(lease, "RETRY_S", 0.05)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Another process that leased the first GPU."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "0\n"
    yield process
    process.kill()
    process.wait()


def test_the_first_free_gpu_and_its_return() -> None:
    for _ in range(2):
        with leased_gpu(GPUS, None, print) as first, leased_gpu(GPUS, None, print) as second:
            assert (first, second) == (0, 1)


def test_another_process_is_seen(holder: subprocess.Popen[str]) -> None:
    with leased_gpu(GPUS, None, print) as index:
        assert index == 1


def test_waits_until_a_killed_process_lets_go(holder: subprocess.Popen[str]) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        holder.kill()

    with leased_gpu(GPUS, 0, say) as index:
        assert index == 0
    assert said == ["every GPU is leased to another run: waiting for one"]


def test_no_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CatalogueError, match="torch sees no GPU here"):
        with leased_gpu([], None, print):
            pass
    monkeypatch.setattr(runner, "gpu_uuids", lambda: [])
    for index in (None, 0):
        with pytest.raises(CatalogueError, match="torch sees no GPU here"):
            with runner.device_in_use("cuda", index, print):
                pass


def test_a_run_on_a_gpu_makes_it_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(runner, "gpu_uuids", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    with runner.device_in_use("cuda", None, print) as first:
        with runner.device_in_use("cuda", None, print) as second:
            assert (str(first), str(second)) == ("cuda:0", "cuda:1")
    assert current == [0, 1]
    with pytest.raises(ValueError, match=r"device\.index must be 0 to 1, got 7"):
        with runner.device_in_use("cuda", 7, print):
            pass
