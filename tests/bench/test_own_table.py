"""The user's own table of measured times and tilings: `opkiln-bench table RUN` adds to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opkiln import measured, own_table, tilings
from opkiln_bench import commands

Make = Callable[..., Any]
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
