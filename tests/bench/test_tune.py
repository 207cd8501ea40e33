"""`opkiln tune`: a captured step becomes rows, the search takes the fastest right tiling, the next
process uses what was found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln import own_table, tilings
from opkiln.measured import bucket_of
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln.spec import Call
from opkiln_bench import commands, tune
from opkiln_bench.contestants import bring
from opkiln_bench.records import RecordError, read_run
from opkiln_bench.search import search
from opkiln_bench.settings import Timer as TimerSettings
from opkiln_bench.step import read_step
from opkiln_bench.timing.wall import WallTimer

CPU = torch.device("cpu")
BRIEF = {"min_samples": 2, "max_samples": 2, "budget_ms": 1.0, "host_calls": 1}
TIMER = WallTimer(TimerSettings(**BRIEF))


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A small step with strides, integers, a gradient and an expanded tensor."""
    path = tmp_path / "step.json"
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with opkiln.capture(path):
        F.rms_norm(torch.randn(6, 4).T, (6,))
        F.max_pool2d(x, 2).sum().backward()
        F.mean_pooling(torch.randn(1, 9, 2, 8), 4, torch.tensor([0, 3, 9]), num_chunks=3)
    return path


def test_rows_are_the_calls(step: Path) -> None:
    rows = {row.name: row for row in read_step(step)}
    assert rows["max_pool2d"].train and not rows["rms_norm"].train
    assert [row.family for row in rows.values()] == ["normalization", *["pooling"] * 3]
    subjects = {name: bring(row, CPU) for name, row in rows.items()}
    x, _ = subjects["rms_norm"].tensors
    assert x is not None and x.stride() == (1, 4) and x.std() > 0.1
    grad, offset = subjects["max_pool2d_backward"].tensors
    assert grad is not None and grad.stride() == (0, 0, 0, 0) and grad.dtype == torch.float32
    assert offset is not None and offset.dtype == torch.uint8 and offset.max() <= 3
    assert subjects["mean_pooling"].tensors[1].tolist() == [0, 3, 9]  # type: ignore[union-attr]
    assert [m.dtype for m in subjects["max_pool2d"].call.outputs] == [torch.float32, torch.uint8]


def test_a_row_has_the_bucket_of_the_call(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with opkiln.capture(tmp_path / "s.json") as seen:
        F.max_pool2d(x, 2)
    ((call, _),) = seen.rows.values()
    (row,) = read_step(tmp_path / "s.json")
    assert bucket_of(bring(row, CPU).call) == bucket_of(call)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=9), "has schema 9, this reads 1"),
        (lambda d: d["files"][0].update(name="rms_nrm"), "no op rms_nrm (RMSNormFwd)"),
        (lambda d: d["files"][0]["rows"][0].pop("params"), "is no captured step: KeyError"),
        (lambda d: d["files"][0]["rows"][0]["fill"].update(input="ones"), "unknown fill 'ones'"),
        (lambda d: d["files"][0]["rows"][0].update(tensors=[1]), "is no captured step: "),
    ],
    ids=["schema", "op", "key", "fill", "type"],
)
def test_what_is_no_step_is_one_line(
    step: Path, change: Callable[[Any], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(step.read_text())
    change(document)
    step.write_text(json.dumps(document))
    with pytest.raises(RecordError) as error:
        read_step(step)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert commands.main(["tune", "--from", str(step)]) == 2
    assert capsys.readouterr().err.startswith("opkiln-bench tune: ")


class Slow:
    """A backend of ours with tilings: `ms` of sleep; `wrong` results or `broken` where said."""

    def __init__(self, spec: Any, start: int) -> None:
        self.right = REGISTRY.of(spec.name)["torch-ref"].loader()
        self.start = start
        self.asked: list[int] = []
        self.neighbours: Callable[[int], tuple[int, ...]] = lambda ms: (4 * ms, ms // 2)

    def tilings(self, call: Call) -> list[dict[str, Any]]:
        now = tilings.of(call) or {"kernel": "slow", "ms": self.start}
        self.asked.append(now["ms"])
        return [
            now,
            *({"kernel": "slow", "ms": ms} for ms in self.neighbours(now["ms"])),
            {"kernel": "slow", "ms": 0, "wrong": True},
            {"kernel": "slow", "ms": 0, "broken": True},
        ]

    def prepare(self, call: Call) -> Callable[..., Any]:
        tiling = tilings.of(call) or {"ms": self.start}
        right = self.right(call)
        if tiling.get("broken"):
            raise RuntimeError("out of resources: shared memory")

        def launch(*tensors: Any) -> Any:
            time.sleep(tiling["ms"] / 1e3)
            out = right(*tensors)
            return out + 1 if tiling.get("wrong") else out

        return launch


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """rms_norm of ours is Slow; 16 ms without a tiling."""
    usual = REGISTRY.of("rms_norm")
    made = Slow(CATALOGUE["rms_norm"], 16)
    impl = replace(
        usual["opkiln"],
        supports=lambda call: None,
        loader=lambda: made.prepare,
        tilings=made.tilings,
    )
    monkeypatch.setitem(REGISTRY._by_op["rms_norm"], "opkiln", impl)
    yield made


def test_the_search_goes_to_the_fastest_right_one(step: Path, slow: Slow) -> None:
    row = next(row for row in read_step(step) if row.name == "rms_norm")
    found = search(bring(row, CPU), TIMER)
    assert found is not None and found.tiling == {"kernel": "slow", "ms": 1}
    assert found.us < 0.3 * found.before_us
    assert slow.asked == [16, 8, 4, 2]  # 4 steps, each from the fastest so far
    assert tilings.of(bring(row, CPU).call) is None  # nothing stays on trial


def test_where_nothing_is_faster_the_usual_stays(step: Path, slow: Slow) -> None:
    row = next(row for row in read_step(step) if row.name == "rms_norm")
    slow.start, slow.neighbours = 4, lambda ms: (4 * ms, 2 * ms)
    found = search(bring(row, CPU), TIMER)
    assert found is not None and found.tiling is None and found.us == found.before_us


def test_what_cannot_be_tuned_is_not_searched(step: Path) -> None:
    row = next(row for row in read_step(step) if row.name == "max_pool2d_backward")
    assert search(bring(row, CPU), TIMER) is None


CHILD = """
import json, sys, warnings
warnings.simplefilter("error")
import torch, opkiln
from opkiln import measured, own_table, tilings
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
own_table.here = lambda: json.loads(sys.argv[1])
measured.arch_of = tilings.arch_of = lambda device: "sm90"
from opkiln_bench.contestants import bring
from opkiln_bench.step import read_step
from pathlib import Path
from opkiln_pool.mean_plan import plan_for
row = next(r for r in read_step(Path(sys.argv[2])) if r.name == "mean_pooling")
call = bring(row, torch.device("cpu")).call
print(json.dumps([dict(tilings.of(call) or {}), plan_for(call).tiling.step,
                  measured.predict(call, "opkiln").source]))
"""


def test_from_a_step_to_the_next_process(
    step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the pool's own candidates, in Triton's interpreter; the largest step counts as fast."""
    config = tmp_path / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    monkeypatch.setattr(tune, "arch_of", lambda device: "sm90")
    monkeypatch.setattr(tune, "TimerSettings", lambda: TimerSettings(**BRIEF))

    def take_the_largest_step(subject: Any, timer: Any) -> Any:
        impl = REGISTRY.of(subject.spec.name)["opkiln"]
        if subject.spec.name != "mean_pooling":
            return None
        best = max(impl.tilings(subject.call), key=lambda t: t["step"])
        return tune.Found(best, 1.0, 2.0, 5)

    monkeypatch.setattr(tune, "search", take_the_largest_step)
    assert commands.main(["tune", "--from", str(step), "--runs-dir", str(tmp_path / "runs")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-1].startswith("4 times and 1 tilings in ")
    assert any("5 tilings tried, 2.00 -> 1.00 us" in line for line in told)
    (folder,) = (tmp_path / "runs").iterdir()
    run = read_run(folder)
    assert (folder / "pages" / "pooling.md").is_file()
    (path,) = (config / "opkiln" / "measured").glob("sm90-*.json")
    document = json.loads(path.read_text())
    (entry,) = document["tilings"]
    assert entry["run"] == folder.name and entry["us"] == 1.0
    by_op = {e["op"]: e for e in document["times"]}
    assert by_op["mean_pooling"]["us"]["opkiln"] == 1.0
    env = run.header["environment"]
    made_with = own_table.identity(env["device"], env["driver"], env["torch"], env["versions"])
    assert document["made_with"] == made_with

    def child(identity: dict[str, str]) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-c", CHILD, json.dumps(identity), str(step)]
        return subprocess.run(arguments, capture_output=True, text=True)

    done = child(made_with)
    assert done.returncode == 0, done.stderr
    tiling, steps, source = json.loads(done.stdout)
    assert tiling == entry["tiling"] and steps == tiling["step"]
    assert source.startswith("your table, ")
    foreign = child(made_with | {"driver": "999"})
    assert foreign.returncode == 1 and f"your table {path} is of driver" in foreign.stderr


def test_without_a_gpu_it_says_so(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert commands.main(["tune", "--from", str(step)]) == 2
        assert "no GPU here" in capsys.readouterr().err
