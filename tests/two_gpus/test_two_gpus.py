"""What takes two GPUs: tensors on the second while the first is current, both at once, a sharded
sweep, data-parallel training. Elsewhere these tests are skipped, and `devices` can be two names of
one device to try their logic.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opkiln.conformance import cases_of, cuda_checks
from opkiln.conformance.checks import SETS, in_order, run
from opkiln.conformance.judge import first_taken, launch_of
from opkiln.conformance.tensors import bits
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

BACKEND = "opkiln"
SECONDS = float(os.environ.get("OPKILN_TWO_GPUS_SECONDS", "60"))
SERVED = [op for op in CATALOGUE if BACKEND in REGISTRY.of(op) and cases_of(op)]
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("op", SERVED)
def test_tensors_on_a_device_that_is_not_current(op: str) -> None:
    """The right result there, and cuda:0 is current as before."""
    case = first_taken(cases_of(op), BACKEND, torch.device("cuda", 1))
    outcome = cuda_checks.on_second_device(case, BACKEND)
    assert outcome.status == "passed", outcome.message


def calls_on(device: torch.device) -> Iterator[tuple[str, Any, Any]]:
    """A call of each op there, prepared: its name, launch and tensors."""
    for op in SERVED:
        bound = first_taken(cases_of(op), BACKEND, device).build(device)
        with torch.device(device):
            yield op, launch_of(bound, BACKEND), bound


def bits_of(op: str, launch: Any, bound: Any) -> list[torch.Tensor]:
    copies = [None if t is None else t.clone() for t in bound.tensors]  # some ops write them
    outs = run(launch, bound._replace(tensors=tuple(copies)))
    return [bits(in_order(o) if op in SETS and i == 0 else o).cpu() for i, o in enumerate(outs)]


def work(device: torch.device, until: float, failures: list[str], rounds: list[int]) -> None:
    """All ops again and again; the bits of the first round are those of every other."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        calls = list(calls_on(device))
        first = {op: bits_of(op, launch, bound) for op, launch, bound in calls}
        done = 0
        while time.monotonic() < until or not done:
            for op, launch, bound in calls:
                found = bits_of(op, launch, bound)
                if not all(map(torch.equal, found, first[op])):
                    failures.append(f"{op} on {device} has other bits in round {done}")
            done += 1
        rounds.append(done)
    except Exception as error:  # a thread's exception would be lost
        failures.append(f"{device}: {type(error).__name__}: {error}")


def both_at_once(devices: tuple[str, str], seconds: float) -> list[int]:
    """Rounds over all ops, of a thread for each device."""
    failures: list[str] = []
    rounds: list[int] = []
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=work, args=(torch.device(d), until, failures, rounds))
        for d in devices
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:5]
    return rounds


def test_two_threads_call_all_ops_at_once() -> None:
    assert len(both_at_once(("cuda:0", "cuda:1"), SECONDS)) == 2


def run_program(*command: str, timeout: float = 600) -> str:
    paths = filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


def test_shards_on_two_gpus_agree_with_one(tmp_path: Path) -> None:
    """`collect` folds what two jobs measured, each on a GPU of its own; the times are one GPU's."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    from opkiln_bench.compare import agreement
    from opkiln_bench.records import read_run

    bench = ("-m", "opkiln_bench")
    how = ("suite=smoke", "backend=ours", f"output.runs_dir={tmp_path}")
    run_program(*bench, *how, "run=one")
    run_program(*bench, "-m", *how, "run=two", "shard=0/2,1/2", "launcher=joblib")
    shards = sorted(str(p.parent) for p in (tmp_path / "two").rglob("records.jsonl"))
    assert len(shards) == 2
    run_program(*bench, "collect", *shards, "--into", str(tmp_path / "whole"))
    one, whole = read_run(tmp_path / "one"), read_run(tmp_path / "whole")
    assert set(one.rows) == set(whole.rows)
    agreed = agreement(one, whole)
    assert agreed is not None and agreed.within, str(agreed)


def test_data_parallel_training_of_a_llama(tmp_path: Path) -> None:
    """The losses of the unpatched model, on two ranks: see ddp_llama.py."""
    pytest.importorskip("transformers")
    program = str(Path(__file__).with_name("ddp_llama.py"))
    said: list[str] = []
    ranks = [
        threading.Thread(
            target=lambda r=rank: said.append(
                run_program(program, str(r), str(tmp_path / "meeting"), "cuda")
            )
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [s.splitlines()[-1] for s in said] == ["same"] * 2
