"""The example of a third-party backend, from its wheel, in an environment without our families."""

from __future__ import annotations

import json
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


def test_conforms(env, tmp_path) -> None:
    file = tmp_path / "conformance.json"
    code = "import sys; from opkiln.cli import main; sys.argv[0] = 'opkiln'; main()"
    done = env.run("-c", code, "conform", "--backend", "demo", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(file.read_text())
    by_op = {o["op"]: o for o in summary["ops"]}
    assert set(by_op) == {"rms_norm", "mean_pooling"}
    for op in by_op.values():
        assert op["failed"] == 0
        assert op["passed"] > 5
    assert any(REASON in line for line in by_op["mean_pooling"]["refusals"])


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
