"""Measured times: buckets, the nearest one, the choice by it, and `opkiln-bench table`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measured_calls import H200, call_of
from opkiln import dispatch, measured
from opkiln.measured import Bucket, Entry, Prediction, bucket_of, choose, nearest, parse, predict
from opkiln.policy import Policy
from opkiln.registry import REGISTRY, Implementation, accepts_everything
from opkiln.spec import Call
from opkiln_bench import commands
from opkiln_bench.catalogue import load_rows
from opkiln_bench.contestants import bring, bucket_entry, canonical


def test_a_bucket_is_what_the_time_depends_on() -> None:
    bucket = bucket_of(call_of())
    assert (bucket.op, bucket.kind) == ("rms_norm", "bfloat16 2d")
    assert bucket.sizes == (2048, 4096, 4 * 2048 * 4096, 2 * 2048 * 4096)
    assert bucket == bucket_of(call_of(eps=0.5)) != bucket_of(call_of(rows=2047))
    across = torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta").T
    assert bucket_of(call_of(input=across)).kind == "bfloat16 2d strided"


def test_flags_and_kernels_tell_calls_apart() -> None:
    def bucket(function: str, **arguments: Any) -> Bucket:
        return bucket_of(Call.of(*canonical(function, arguments), real=False))

    x, line = torch.empty(4, 8, 6, 6, device="meta"), torch.empty(8, device="meta")
    trained, evaluated = (
        bucket("batch_norm", input=x, running_mean=line, running_var=line, training=training)
        for training in (True, False)
    )
    assert (trained.kind, evaluated.kind) == ("float32 4d training", "float32 4d")
    assert trained.distance(evaluated) == math.inf
    wide, narrow = (
        bucket("conv2d", input=x, weight=torch.empty(8, 8, k, k, device="meta"), padding=k // 2)
        for k in (3, 1)
    )
    assert wide.kind == narrow.kind and wide.distance(narrow) == pytest.approx(math.log2(9))


def test_distance_is_the_largest_ratio_in_octaves() -> None:
    a = Bucket("op", "kind", (1024, 16, 0))
    assert a.distance(a) == 0
    assert a.distance(replace(a, sizes=(512, 64, 0))) == 2
    assert a.distance(replace(a, sizes=(512, 64, 2))) == 2  # none counts as one
    for other in (replace(a, op="x"), replace(a, kind="x"), replace(a, sizes=(1024, 16))):
        assert a.distance(other) == math.inf


def entry(call: Call, **us: float) -> Entry:
    return Entry(bucket_of(call), us, "there, then", {"torch": 7.0}, 5.0)


def test_the_nearest_within_a_factor_of_four() -> None:
    table = [entry(call_of(rows=rows), torch=float(rows)) for rows in (64, 512, 4096)]
    chosen = {
        rows: found and found.us["torch"]
        for rows in (1, 15, 16, 100, 1000, 16384, 16400)
        if (found := nearest(table, bucket_of(call_of(rows=rows)))) or found is None
    }
    assert chosen == {
        1: None,
        15: None,
        16: 64,
        100: 64,
        1000: 512,
        16384: 4096,
        16400: None,
    }
    assert nearest([], bucket_of(call_of())) is None


def implementation(backend: str, priority: int = 0) -> Implementation:
    return Implementation("rms_norm", backend, "1", 1, accepts_everything, lambda: print, priority)


OURS, TORCH, OTHER = implementation("opkiln", 10), implementation("torch"), implementation("x", 5)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets a test state what was measured of the usual call on an sm90."""

    def state(**us: float) -> None:
        found = entry(call_of(), **us)
        key = found.bucket.op, found.bucket.kind
        monkeypatch.setattr(measured, "arch_of", lambda device: "sm90")
        monkeypatch.setattr(measured, "tables", {"sm90": {key: [found]}}.__getitem__)

    yield state


def order(*candidates: Implementation, call: Call | None = None) -> list[str]:
    return [impl.backend for impl, _ in choose(candidates, call or call_of())]


def test_the_faster_goes_first(table: Callable[..., None]) -> None:
    table(opkiln=12.0, torch=10.0)
    assert order(OURS, OTHER, TORCH) == ["torch", "opkiln", "x"]
    (best, why), *rest = choose([OURS, TORCH], call_of())
    assert best is TORCH and [reason for _, reason in rest] == ["priority 10"]
    assert why == "measured on calls like this one: opkiln 12 us, torch 10 us (there, then)"
    table(opkiln=8.0, torch=10.0)
    assert order(OURS, OTHER, TORCH) == ["opkiln", "x", "torch"]
    assert choose([OURS, TORCH], call_of())[0][1].startswith("measured")


def test_noise_is_no_reason(table: Callable[..., None]) -> None:
    table(opkiln=10.0, torch=9.8)
    assert order(OURS, TORCH) == ["opkiln", "torch"]
    table(opkiln=10.0, torch=9.6)
    assert order(OURS, TORCH) == ["torch", "opkiln"]


def test_priority_where_nothing_can_be_compared(table: Callable[..., None]) -> None:
    by_priority = [(OURS, "priority 10"), (TORCH, "priority 0")]
    table(torch=10.0)
    assert choose([OURS, TORCH], call_of()) == by_priority
    table(opkiln=10.0)
    assert choose([OURS, TORCH], call_of()) == by_priority
    table(opkiln=12.0, torch=10.0)
    assert order(implementation("new", 20), OURS, TORCH) == ["new", "opkiln", "torch"]
    assert choose([OURS, TORCH], call_of(rows=1)) == by_priority  # far from what was measured
    assert order(OURS) == ["opkiln"] and choose([], call_of()) == []


def test_batch_invariance_is_not_given_up(table: Callable[..., None]) -> None:
    table(opkiln=12.0, torch=10.0)
    invariant = call_of(policy=Policy(batch_invariant=True))
    assert order(OURS, TORCH, call=invariant) == ["opkiln", "torch"]


def test_the_figures_of_a_backend(table: Callable[..., None]) -> None:
    table(opkiln=12.0, torch=10.0)
    assert predict(call_of(rows=1500), "torch") == Prediction(10.0, "there, then", 0.5, 7.0)
    assert predict(call_of(), "opkiln") == Prediction(12.0, "there, then", 5 / 12, None)
    assert predict(call_of(), "quack") is None
    assert predict(call_of(rows=1), "torch") is None


def test_dispatch_takes_the_faster_and_explains(
    table: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = implementation("opkiln", 10)
    impls = {"opkiln": ours, "torch": TORCH, "x": replace(OTHER, auto=False)}
    monkeypatch.setattr(REGISTRY, "of", lambda op: impls)
    table(opkiln=12.0, torch=10.0)
    assert [i.backend for i, _ in dispatch.ranked(call_of())] == ["torch", "opkiln"]
    wanted = call_of(policy=Policy(prefer=(("*", ("opkiln",)),)))
    assert [i.backend for i, _ in dispatch.ranked(wanted)] == ["opkiln", "torch"]
    found = dispatch.explain_call(call_of())
    assert found.chosen == "torch"
    by_name = {c.backend: c for c in found.candidates}
    assert (by_name["torch"].time_us, by_name["torch"].host_us) == (10.0, 7.0)
    assert (by_name["x"].time_us, by_name["x"].source) == (None, "rule")
    shown = str(found).splitlines()
    assert shown[-1] == "  times: there, then"
    assert any(line.endswith("10 us, 50 % of the roofline, host 7 us") for line in shown)
    table(opkiln=8.0, torch=10.0)
    assert dispatch.explain_call(call_of()).to_json()["chosen"] == "opkiln"


def test_a_cpu_has_no_table() -> None:
    call = call_of()
    call.device = torch.device("cpu")
    assert measured.arch_of(call.device) is None
    assert predict(call, "torch") is None
    assert order(OURS, TORCH, call=call) == ["opkiln", "torch"]


def test_the_architecture_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert measured.arch_of.__wrapped__(H200) == "sm90"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a call made of metadata
    assert measured.arch_of.__wrapped__(H200) is None


Make = Callable[..., Any]


def test_the_command(
    rows: list[Any], make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("first", rows)
    out = tmp_path / "{family}" / "measured" / "sm90.json"
    assert commands.main(["table", str(run.path.parent), "--out", str(out)]) == 0
    path = tmp_path / "norm" / "measured" / "sm90.json"
    assert capsys.readouterr().out.splitlines() == [
        f"2 times in {path}",
        "1 rows left out: their record states no bucket; measure them again",
    ]
    document = json.loads(path.read_text("utf-8"))
    assert [set(entry["us"]) for entry in document["times"]] == [{"torch"}, {"opkiln", "torch"}]
    first = document["times"][1]
    assert first["us"]["opkiln"] == pytest.approx(10.8, rel=0.01)
    assert (first["commit"], first["run"], document["gpu"]) == ("abc", "first", "NVIDIA H200")
    parsed = parse(document, "x")
    assert parsed[1].bucket == bucket_of(call_of())
    assert parsed[1].source == "NVIDIA H200, 2026-11-30, commit abc, run first"


def test_later_runs_win(rows: list[Any], make_row: Make, make_run: Make, tmp_path: Path) -> None:
    faster = {**rows[0], "backends": make_row(times_us={"opkiln": 5.0, "torch": 60.0})["backends"]}
    later = make_run("later", [faster], date="2026-12-01T00:00:00Z")
    earlier = make_run("earlier", rows)
    out = tmp_path / "all.json"
    folders = [str(run.path.parent) for run in (later, earlier)]
    assert commands.main(["table", *folders, "--out", str(out)]) == 0
    times = {tuple(e["sizes"]): e for e in json.loads(out.read_text())["times"]}
    assert times[bucket_of(call_of()).sizes]["run"] == "later"
    assert len(times) == 2


def test_one_gpu_a_table(
    rows: list[Any], make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("mixed", [rows[0], {**rows[1], "gpu": "NVIDIA H100"}])
    assert commands.main(["table", str(run.path.parent), "--out", str(tmp_path / "x.json")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "these runs have NVIDIA H100, NVIDIA H200" in told
    assert not (tmp_path / "x.json").exists()


def test_a_record_states_the_bucket_of_its_call() -> None:
    row = next(r for r in load_rows(["opkiln_bench.conf"]) if r.label == "image-g32-affine")
    subject = bring(row, torch.device("cpu"))
    bucket = bucket_of(subject.call)
    assert bucket_entry(subject) == {"kind": bucket.kind, "sizes": list(bucket.sizes)}
    assert bucket.kind == "float16 4d"


def test_tables_come_from_the_installed_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "family_of_mine"
    (package / "measured").mkdir(parents=True)
    (package / "__init__.py").touch()
    row = {"op": "rms_norm", "kind": "k", "sizes": [1], "us": {"torch": 1.0}}
    provenance = {"date": "2026-12-01T00:00:00Z", "commit": "abc", "run": "r"}
    document = {"schema": 1, "gpu": "G", "times": [{**row, **provenance}]}
    (package / "measured" / "sm1.json").write_text(json.dumps(document))
    monkeypatch.syspath_prepend(str(tmp_path))
    dist = SimpleNamespace(name="mine")
    point = SimpleNamespace(
        name="mine", value="family_of_mine.plugin", module="family_of_mine.plugin", dist=dist
    )
    monkeypatch.setattr(measured, "entry_points", lambda group: [point])
    found = measured.tables.__wrapped__("sm1")
    assert [e.us for e in found["rms_norm", "k"]] == [{"torch": 1.0}]
    assert measured.tables.__wrapped__("sm2") == {}
    (package / "measured" / "sm3.json").write_text('{"schema": 2}')
    with pytest.warns(UserWarning, match=r"measured/sm3\.json has schema 2, this opkiln reads 1"):
        assert measured.tables.__wrapped__("sm3") == {}
    monkeypatch.setattr(REGISTRY, "allows", lambda name: name != "mine")
    assert measured.tables.__wrapped__("sm1") == {}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema": 2}, "x has schema 2, this opkiln reads 1"),
        ({"schema": 1, "gpu": "G", "times": [{"op": "a"}]}, "x cannot be read: KeyError: 'kind'"),
    ],
    ids=["schema", "key"],
)
def test_a_table_that_cannot_be_read_is_one_line(document: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(document, "x")
    assert str(error.value) == message
