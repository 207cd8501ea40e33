"""opkiln doctor | list | explain | tune: output, JSON, exit codes, one-line errors."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import opkiln
import pytest
import torch
from click.testing import CliRunner, Result
from opkiln import Implementation, hookimpl, simple
from opkiln.cli import doctor
from opkiln.cli.commands import opkiln as command
from opkiln.cli.values import parse_value
from opkiln.errors import ArgumentError
from opkiln.ops import CATALOGUE
from opkiln.policy import Policy
from opkiln.registry import REGISTRY, accepts_everything

CPU = torch.device("cpu")
RMS_NORM = ["explain", "rms_norm", "input=f16[4,64]", "weight=f32[64]", "normalized_shape=64"]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(command, args)


def test_list_names_ops_of_a_family_and_their_backends() -> None:
    rows = json.loads(invoke("list", "--family", "pool", "--json").output)
    assert [r["op"] for r in rows] == opkiln.ops("pool")
    assert all(r["family"] == "pool" and {"torch", "torch-ref"} <= {*r["backends"]} for r in rows)


@pytest.mark.parametrize("name", ["max_pool2d", "MaxPool2dFwd"])
def test_list_takes_either_name_of_an_op(name: str) -> None:
    done = invoke("list", "--op", name)
    assert done.exit_code == 0
    (line,) = [line for line in done.output.splitlines() if line.startswith("max_pool2d")]
    assert line.split()[:3] == ["max_pool2d", "MaxPool2dFwd", "pool"]


def test_explain_says_what_the_library_says() -> None:
    x, weight = torch.empty(4, 64, dtype=torch.float16), torch.empty(64)
    expected = opkiln.explain(opkiln.functional.rms_norm, x, (64,), weight)
    assert invoke(*RMS_NORM).output == f"{expected}\n"
    assert json.loads(invoke(*RMS_NORM, "--json").output)["chosen"] == expected.chosen


def test_explain_with_gradients_refuses_who_cannot_save(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(invoke(*RMS_NORM, "--grad", "--json").output)
    by_backend = {c["backend"]: c for c in found["candidates"]}
    assert by_backend["torch-compile"]["status"] == "refused"
    assert "backward" in by_backend["torch-compile"]["reason"]


def test_explain_shows_a_preference_that_nobody_serves() -> None:
    with opkiln.use("nobody"):
        found = json.loads(invoke(*RMS_NORM, "--json").output)
    (row,) = [c for c in found["candidates"] if c["backend"] == "nobody"]
    assert row["status"] == "absent"
    assert row["reason"].startswith("no backend of that name implements rms_norm")


def test_explain_of_a_spec_without_a_function() -> None:
    done = invoke(
        "explain",
        "rms_norm_backward",
        "grad_out=f32[4,64]",
        "input=f32[4,64]",
        "rstd=f32[4]",
        "normalized_shape=(64,)",
        "output_mask=(True,False)",
    )
    assert done.exit_code == 0, done.stderr
    assert done.output.startswith("rms_norm_backward (RMSNormBwd) grad_out float32[4, 64]")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["lst"], "No such command 'lst'"),
        (
            ["list", "--op", "rmsnorm"],
            "no op 'rmsnorm'; the nearest are rms_norm,",
        ),
        (["explain", "maxpool2d"], "no op 'maxpool2d'; the nearest are max_pool2d"),
        (["explain", "rms_norm", "f16[2,3]"], "cannot read 'f16[2,3]': expected name=value"),
        (["explain", "rms_norm", "input=g16[2]", "normalized_shape=2"], "g16[2]: no dtype 'g16'"),
        (
            ["explain", "rms_norm", "input=f16[2]", "normalized_shape=3"],
            "rms_norm: input has shape",
        ),
        (["explain", "rms_norm", "input=f16[2]"], "missing 1 required positional argument"),
        (["explain", "rms_norm_backward", "x=1"], "rms_norm_backward has no argument 'x'; known"),
        (["explain", "rms_norm_backward"], "rms_norm_backward: normalized_shape is required"),
        (["conform"], "Missing option '--backend'"),
        (["conform", "--backend", "torhc"], "no backend 'torhc'; the nearest are torch"),
        (["conform", "--backend", "torch", "--op", "rms"], "no op 'rms'; the nearest is rms_norm"),
        (["conform", "--backend", "torch", "--big"], "big calls need a GPU, the device is cpu"),
        (["conform", "--backend", "torch", "--device", "tpu9"], "cannot read the device 'tpu9'"),
        ([*RMS_NORM, "--device", "tpu9"], "Invalid device string: 'tpu9'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(args: list[str], message: str) -> None:
    done = invoke(*args)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("opkiln: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_explain_on_a_gpu_that_is_not_there() -> None:
    done = invoke(*RMS_NORM, "--device", "cuda")
    assert (done.exit_code, done.stderr) == (2, "opkiln: device cuda: torch sees no GPU here\n")


def test_doctor_finds_misspelt_preferences(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer = (("*", ("torhc",)), ("rmsnorm", ("torch",)))
    monkeypatch.setattr(doctor.policy, "BASE", Policy(prefer=prefer))
    done = invoke("doctor")
    assert done.exit_code == 1
    assert "problem: OPKILN_BACKEND names the backend 'torhc'; the nearest are torch" in done.output
    assert "problem: OPKILN_BACKEND names the op 'rmsnorm'; the nearest are rms_norm" in done.output


def test_doctor_reports_an_unreadable_preference() -> None:
    code = "import sys; sys.argv = ['opkiln', 'doctor']; from opkiln.cli import main; main()"
    env = os.environ | {"OPKILN_BACKEND": ":"}
    run = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    problem = "problem: OPKILN_BACKEND: cannot read the backend preference ':'"
    assert [line for line in done.stdout.splitlines() if line.startswith(problem)]


@pytest.mark.parametrize("file", ["missing/c.json", "there/c.json/d.json", "there"])
def test_conform_looks_at_its_file_before_it_runs(tmp_path: Path, file: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "c.json").write_text("")
    path = tmp_path / file
    done = invoke("conform", "--backend", "torch", "--op", "rms_norm", "--json", str(path))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("opkiln: ") and str(path) in done.stderr
    assert done.stderr.count("\n") == 1


def test_conform_passes_and_writes_its_summary(tmp_path: Path) -> None:
    file = tmp_path / "conformance.json"
    done = invoke("conform", "--backend", "torch", "--op", "mean_pooling", "--json", str(file))
    assert done.exit_code == 0, done.output
    summary = json.loads(file.read_text())
    assert (summary["ok"], summary["backend"], summary["device"]) == (True, "torch", "cpu")
    assert [o["op"] for o in summary["ops"]] == ["mean_pooling"]
    assert summary["ops"][0]["passed"] > 10


def test_conform_of_a_wrong_backend_is_a_finding() -> None:
    def one_and_a_half(input: torch.Tensor, *rest: object, **params: object) -> torch.Tensor:
        return 1.5 * mean_pooling.reference(input, *rest, **params)

    class Plugin:
        OPKILN_API = 1

        @hookimpl
        def opkiln_implementations(self) -> list[Implementation]:
            loader = simple(one_and_a_half)
            return [Implementation("mean_pooling", "wrong", "1", 1, accepts_everything, loader)]

    mean_pooling = CATALOGUE["mean_pooling"]
    with REGISTRY.temporarily(Plugin(), "test:wrong"):
        done = invoke("conform", "--backend", "wrong", "--op", "MeanPoolingForward")
    assert done.exit_code == 1
    assert "FAILED mean_pooling[" in done.output


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1e-5", 1e-5),
        ("(3, 3)", (3, 3)),
        ("true", True),
        ("False", False),
        ("none", None),
        ("same", "same"),
    ],
)
def test_values(text: str, value: object) -> None:
    parsed = parse_value(text, CPU, grad=False)
    assert parsed == value
    assert type(parsed) is type(value)


def test_tensor_values() -> None:
    half = parse_value("f16[2, 0,3]", CPU, grad=True)
    assert (half.dtype, half.shape, half.requires_grad) == (torch.float16, (2, 0, 3), True)
    index = parse_value("i32[5]", CPU, grad=True)
    assert index.dtype == torch.int32
    assert index.tolist() == [0] * 5
    assert parse_value("f64[]", CPU, grad=False).shape == ()
    with pytest.raises(ArgumentError, match="no dtype 'float16'"):
        parse_value("float16[2]", CPU, grad=False)


def test_the_installed_script() -> None:
    """The console script's own exit code, not click's test runner's."""
    set_arguments = "import sys; sys.argv = ['opkiln', 'list', '--op', 'nosuch']"
    code = f"{set_arguments}; from opkiln.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("opkiln: no op 'nosuch'")


def test_conform_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends in the middle leaves a summary of the ops before, marked as such."""
    from opkiln.conformance import run

    def interrupted(part: run.Part, **given: Any) -> run.OpReport:
        if part.op == "mhc_post":
            raise KeyboardInterrupt
        return run_part(part, **given)

    run_part = run.conform_part
    monkeypatch.setattr(run, "conform_part", interrupted)
    file = tmp_path / "c.json"
    ops = ["--op", "fft", "--op", "mhc_post"]
    assert invoke("conform", "--backend", "torch", *ops, "--json", str(file)).exit_code != 0
    kept = json.loads(file.read_text())
    assert [op["op"] for op in kept["ops"]] == ["fft"]
    assert (kept["finished"], kept["ok"]) == (False, False)


def test_tune_needs_the_bench_and_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = invoke("tune", "--from", str(tmp_path / "none.json"))
    assert missing.exit_code == 2 and "No such file" in missing.stderr

    def import_module(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="opkiln_bench")

    monkeypatch.setattr(importlib, "import_module", import_module)
    without = invoke("tune", "--from", "step.json")
    assert without.exit_code == 2
    assert without.stderr == "opkiln: tune needs the bench: pip install opkiln-bench\n"
