"""Measured times: buckets, the nearest one, the choice by it, and `opkiln-bench table`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opkiln import dispatch, measured, own_table, tilings
from opkiln.measured import Bucket, Entry, Prediction, bucket_of, choose, nearest, parse, predict
from opkiln.policy import Policy
from opkiln.registry import REGISTRY, Implementation, accepts_everything
from opkiln.spec import Call
from opkiln_bench import commands
from opkiln_bench.catalogue import load_rows
from opkiln_bench.contestants import bring, bucket_entry, canonical

H200 = torch.device("cuda", 0)


def call_of(rows: int = 2048, n: int = 4096, policy: Policy | None = None, **more: Any) -> Call:
    """A call of rms_norm, as its metadata would be on a GPU."""
    x = torch.empty(rows, n, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(n, dtype=torch.bfloat16, device="meta")
    arguments = {"input": x, "weight": weight, "normalized_shape": [n], **more}
    bound = canonical("rms_norm", arguments)
    call = Call.of(*bound, real=False, **({"policy": policy} if policy else {}))
    call.device = H200
    return call


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


@pytest.fixture
def rows(make_row: Make) -> list[dict[str, Any]]:
    def row(label: str, bucket: Any, **changes: Any) -> dict[str, Any]:
        return make_row(label, bucket={"kind": bucket.kind, "sizes": list(bucket.sizes)}, **changes)

    return [
        row("a", bucket_of(call_of())),
        row("b", bucket_of(call_of(rows=1)), times_us={"opkiln": "refused", "torch": 3.0}),
        row("c", bucket_of(call_of(rows=2)), times_us={"opkiln": "refused", "liger": 3.0}),
        make_row("old"),
    ]


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


HERE = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "opkiln": "0.1.0"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's configuration folder, on the machine that the synthetic runs come from."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(own_table, "here", lambda: HERE)
    monkeypatch.setattr(measured, "entry_points", lambda group: [])
    return tmp_path


def own_path(config: Path) -> Path:
    path = own_table.path_of("sm90", HERE)
    assert path.parent == config / "opkiln" / "measured"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_the_users_own_table(
    config: Path, rows: list[Any], make_row: Make, make_run: Make, capsys: Any
) -> None:
    path = own_path(config)
    assert commands.main(["table", str(make_run("a", rows).path.parent), "--arch", "sm90"]) == 0
    assert capsys.readouterr().out.startswith(f"2 times in {path}\n")
    faster = {**rows[0], "backends": make_row(times_us={"opkiln": 5.0, "torch": 60.0})["backends"]}
    again = make_run("b", [faster], date="2026-12-01T00:00:00Z")
    assert commands.main(["table", str(again.path.parent), "--arch", "sm90"]) == 0
    found = measured.tables.__wrapped__("sm90")["rms_norm", "bfloat16 2d"]
    assert sorted(e.us.get("opkiln", 0) for e in found) == pytest.approx([0, 5], rel=0.01)
    assert all(e.source.startswith("your table, NVIDIA H200, ") for e in found)
    assert not list(path.parent.glob("*.json.*"))  # no half-written file stays


def test_the_time_of_a_tuned_call_is_the_tuned_one(
    config: Path, rows: list[Any], make_run: Make
) -> None:
    rows[0]["backends"]["opkiln"]["tuned_us"] = 7.5
    assert commands.main(["table", str(make_run("a", rows).path.parent), "--arch", "sm90"]) == 0
    times = json.loads(own_path(config).read_text())["times"]
    assert [entry["us"]["opkiln"] for entry in times if "opkiln" in entry["us"]] == [7.5]


def stated(**changes: str) -> str:
    document = {"schema": 1, "gpu": "G", "made_with": HERE | changes, "times": []}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "does not say what it was made with"),
        (stated(gpu="NVIDIA H100"), "is of gpu NVIDIA H100, here is NVIDIA H200; not used"),
        (stated(driver="570"), "is of driver 570, here is 580; not used"),
        (stated(triton="3.5"), "is of triton 3.5, here is none; not used"),
        (stated().replace('"schema": 1', '"schema": 2'), "has schema 2, this opkiln reads 1"),
    ],
    ids=["corrupt", "list", "gpu", "driver", "version", "schema"],
)
def test_a_users_table_that_does_not_serve_is_named(text: str, message: str, config: Path) -> None:
    path = own_path(config)
    path.write_text(text)
    with pytest.warns(UserWarning) as told:
        assert measured.tables.__wrapped__("sm90") == {}
        assert tilings.tuned.__wrapped__("sm90", path.parent) == {}
    (warning,) = told  # one, though times and tilings were both asked for
    assert str(path) in str(warning.message) and message in str(warning.message)


def test_a_table_of_another_machine_in_the_same_home(
    config: Path, rows: list[Any], make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(make_run("a", rows).path.parent)
    assert commands.main(["table", run, "--arch", "sm90"]) == 0
    monkeypatch.setattr(own_table, "here", lambda: HERE | {"driver": "590"})
    with pytest.warns(UserWarning, match="is of driver 580, here is 590; not used"):
        assert measured.tables.__wrapped__("sm90") == {}
    newer = {"device": "NVIDIA H200", "driver": "590", "torch": "2.11.0"}
    again = make_run("b", rows, environment=newer | {"versions": {"opkiln": "0.1.0"}})
    assert commands.main(["table", str(again.path.parent), "--arch", "sm90"]) == 0
    assert len(list((config / "opkiln" / "measured").glob("sm90-*.json"))) == 2
    own_table._document.cache_clear()
    assert measured.tables.__wrapped__("sm90")


def test_what_cannot_be_read_is_begun_anew(config: Path, rows: list[Any], make_run: Make) -> None:
    own_path(config).write_text("{")
    assert commands.main(["table", str(make_run("a", rows).path.parent), "--arch", "sm90"]) == 0
    assert len(json.loads(own_path(config).read_text())["times"]) == 2


def test_own_tables_are_of_one_machine(
    config: Path, rows: list[Any], make_run: Make, capsys: Any
) -> None:
    env = make_run("a", rows).header["environment"]
    make_run("b", rows, environment=env | {"torch": "2.12.0"})
    runs = [str(config / name) for name in ("a", "b")]
    assert commands.main(["table", *runs, "--arch", "sm90"]) == 2
    assert "these runs differ in torch" in capsys.readouterr().err
    assert not (config / "opkiln").exists()


def test_several_writers_lose_nothing(config: Path, rows: list[Any], make_run: Make) -> None:
    """Each of four processes adds a time of its own to one table."""
    script = (
        "import sys; from pathlib import Path; from opkiln_bench.records import read_run;"
        "from opkiln_bench.table import write_own; write_own([read_run(Path(sys.argv[1]))], 'sm90')"
    )
    processes = []
    for i in range(4):
        bucket = {**rows[0]["bucket"], "sizes": [i, *rows[0]["bucket"]["sizes"]]}
        run = make_run(f"r{i}", [{**rows[0], "bucket": bucket}])
        processes.append(subprocess.Popen([sys.executable, "-c", script, str(run.path.parent)]))
    assert [p.wait() for p in processes] == [0] * 4
    assert len(json.loads(own_path(config).read_text())["times"]) == 4


def test_own_table_needs_an_architecture(
    rows: list[Any], make_run: Make, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(measured, "arch_of", lambda device: None)
    assert commands.main(["table", str(make_run("a", rows).path.parent)]) == 2
    assert "--arch sm90" in capsys.readouterr().err
