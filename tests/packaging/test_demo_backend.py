"""The example of a third-party backend, from its wheel, in an environment without our families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DEMO = """
import json, torch, opkiln
import opkiln.functional as F
x, tokens = torch.randn(3, 64), torch.randn(1, 10, 2, 4)
with opkiln.use("demo"):
    preferred = opkiln.explain(F.rms_norm, x, (64,))
    refused = opkiln.explain(F.mean_pooling, tokens, 4)
y = F.rms_norm(x, (64,), backend="demo")
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,)))
try:
    F.mean_pooling(tokens, 4, backend="demo")
except opkiln.BackendError as error:
    strict = str(error)
leaf = x.clone().requires_grad_()
with opkiln.use("demo"):
    F.rms_norm(leaf, (64,)).sum().backward()
def row(explanation, backend):
    (found,) = [c for c in explanation.candidates if c.backend == backend]
    return [found.status, found.reason]
print(json.dumps({
    "backends": opkiln.backends("rms_norm"), "preferred": preferred.chosen, "strict": strict,
    "refused": [refused.chosen, *row(refused, "demo")], "gradient": leaf.grad is not None,
}))
"""

ROWS = """
import json
from opkiln_bench.catalogue import load_rows, select
rows = select(load_rows(), "*", "demo-*", "*")
print(json.dumps([str(r) for r in rows]))
"""

OPKILN = "import sys; from opkiln.cli import main; sys.argv[0] = 'opkiln'; main()"

REASON = "takes dense input whose length is a multiple of chunk_size"


@pytest.fixture(scope="module")
def env(install) -> Any:
    return install(["opkiln", "opkiln-bench", "opkiln-backend-demo"])


def test_explain_and_calls(env) -> None:
    found = env.eval(DEMO)
    assert "demo" in found["backends"]
    assert "opkiln" not in found["backends"]
    assert found["preferred"] == "demo"
    assert found["refused"] == ["torch", "refused", REASON]
    assert REASON in found["strict"]
    assert found["gradient"]


@pytest.fixture(scope="module")
def summary(env, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `opkiln conform` writes of it."""
    file = tmp_path_factory.mktemp("demo") / "conformance.json"
    done = env.run("-c", OPKILN, "conform", "--backend", "demo", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    return file


def test_conforms(summary: Path) -> None:
    by_op = {o["op"]: o for o in json.loads(summary.read_text())["ops"]}
    assert set(by_op) == {"rms_norm", "mean_pooling"}
    for op in by_op.values():
        assert op["failed"] == 0
        assert op["passed"] > 5
    assert any(REASON in line for line in by_op["mean_pooling"]["refusals"])


def test_has_capability_cards(env, summary: Path) -> None:
    """It promises no trait, and its RMS norm, asked for by name, saves nothing for a backward."""
    args = ("list", "--backend", "demo", "--summary", str(summary), "--json")
    done = env.run("-c", OPKILN, *args)
    assert done.returncode == 0, done.stdout + done.stderr
    cards = {card["op"]: card for card in json.loads(done.stdout)}
    assert set(cards) == {"rms_norm", "mean_pooling"}
    for card in cards.values():
        cells = {name: cell["status"] for name, cell in card["cells"].items()}
        served = ("forward", "compile", "export", "autocast")
        assert {n: cells[n] for n in served} == dict.fromkeys(served, "yes")
        assert cells["deterministic"] == cells["batch_invariant"] == "no"
        assert cells["backward"] == cells["graph_capture"] == "not tested"
        assert all(c["case"] for c in card["cells"].values() if c["status"] != "not tested")
        assert {"f16", "bf16", "f32"} <= set(card["errors"])
    for name in ("saved_tensors", "double_backward"):
        assert cards["rms_norm"]["cells"][name]["status"] == "no"
        assert "backward" in cards["rms_norm"]["cells"][name]["reason"]


def test_its_rows_are_in_the_bench(env) -> None:
    assert env.eval(ROWS) == [
        "MeanPoolingForward demo-two-chunks f16",
        "MeanPoolingForward demo-two-chunks f32",
    ]


def test_bench_times_it(env, tmp_path) -> None:
    code = "import sys; from opkiln_bench.app import main; sys.argv[0] = 'opkiln-bench'; main()"
    arguments = ["workload=demo-*", "dtype=f32", "backends=[demo,torch]", "run=demo"]
    folder = f"output.runs_dir={tmp_path}"
    done = env.run("-c", code, *arguments, folder, "device.kind=cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "demo" / "records.jsonl").read_text().splitlines()
    (row,) = (entry for entry in map(json.loads, lines) if entry.get("op"))
    assert row["backends"]["demo"]["status"] == "ok"
