"""Training around the ops: threads, processes, devices, CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln.watch import observed

TESTS = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_two_threads_train_at_once_each_by_its_policy() -> None:
    """A backward runs by the policy of its forward, whatever the other thread asks for."""
    if DEVICE == "cuda":
        F.rms_norm(torch.randn(2, 8, device=DEVICE, requires_grad=True), (8,)).sum().backward()
    seen: list[tuple[int, str, tuple[str, ...]]] = []
    wanted = {3: "torch", 5: "torch-ref"}
    failures: list[str] = []

    def note(call: Any, tensors: Any) -> None:
        name = call.spec.name
        seen.append((call.tensors.__dict__[first[name]].shape[0], name, backends(call)))

    def backends(call: Any) -> tuple[str, ...]:
        return call.policy.backends_for(call.spec.name)[:1]

    def work(rows: int) -> None:
        x = torch.randn(rows, 4, 6, 6, device=DEVICE)
        weight = torch.randn(4, 4, 3, 3, device=DEVICE)
        for _ in range(20):
            leaves = [t.clone().requires_grad_() for t in (x, weight)]
            plain = [t.clone().requires_grad_() for t in (x, weight)]
            with opkiln.use(wanted[rows]):
                out = F.max_pool2d(F.rms_norm(F.conv2d(leaves[0], leaves[1]), (4,)), 2)
            out.square().sum().backward()
            t = torch.nn.functional
            t.max_pool2d(t.rms_norm(t.conv2d(*plain), (4,)), 2).square().sum().backward()
            for a, b in zip(leaves, plain, strict=True):
                if not torch.allclose(a.grad, b.grad, rtol=1e-2, atol=1e-2):
                    failures.append(f"{rows} rows: {(a.grad - b.grad).abs().max()}")

    ops = ("conv2d", "rms_norm", "max_pool2d")
    first = dict.fromkeys(ops, "input") | {f"{op}_backward": "grad_out" for op in ops}
    workers = [threading.Thread(target=work, args=(rows,)) for rows in wanted]
    with observed(note):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not failures
    assert set(seen) == {(rows, op, (b,)) for rows, b in wanted.items() for op in first}


def test_the_policy_reaches_a_backward_on_another_thread() -> None:
    """On a CPU a thread of ours; on a GPU autograd's own thread of the device."""
    seen: list[tuple[str, tuple[str, ...], bool, int]] = []
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    with opkiln.use("torch-ref", deterministic=True):
        loss = F.rms_norm(x, (8,)).sum()

    def note(call: Any, tensors: Any) -> None:
        backends = call.policy.backends_for(call.spec.name)[:1]
        seen.append((call.spec.name, backends, call.policy.deterministic, threading.get_ident()))

    with observed(note):
        if DEVICE == "cuda":
            loss.backward()
        else:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
    ((name, backends, deterministic, where),) = seen
    assert (name, backends, deterministic) == ("rms_norm_backward", ("torch-ref",), True)
    assert where != threading.get_ident()


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    """DistributedDataParallel over gloo: see ddp_step.py."""
    program = Path(__file__).with_name("ddp_step.py")
    paths = filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path / "meeting")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0 and said.splitlines()[-1:] == ["same"], said


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_step_on_a_device_that_is_not_current() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.RMSNorm(64)).to("cuda:1")
    x = torch.randn(5, 64, device="cuda:1", requires_grad=True)
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    opkiln.replace(model, dry_run=False)
    with torch.cuda.device(0):
        model(x).square().sum().backward()
        assert torch.cuda.current_device() == 0
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_step_reads_fresh_inputs() -> None:
    """Forward and backward of a replaced model in one CUDA graph, captured on a side stream."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.RMSNorm(64)
    ).cuda()
    opkiln.replace(model, dry_run=False)
    x = torch.zeros(32, 64, device="cuda", requires_grad=True)

    def step() -> torch.Tensor:
        for t in (x, *model.parameters()):
            t.grad = None
        out = model(x)
        out.square().mean().backward()
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = step()
    captured = [t.grad for t in (x, *model.parameters())]
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        found = [out.clone(), *[g.clone() for g in captured]]
        expected = [step().detach(), *[t.grad for t in (x, *model.parameters())]]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
