"""A broken row file or setting is told in one line before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench.conftest import DEVICE
from bench.test_app import bench
from opkiln_bench.catalogue import CatalogueError, load_rows
from opkiln_bench.settings import Bench, Device, Suite
from opkiln_bench.validate import check_calls, check_config, check_folder, check_ops

ROWS = """\
op: RMSNormFwd
name: rms_norm
function: rms_norm
family: normalization
rows:
  - label: mine
    dtypes: [f32]
    tensors: {input: [4, 64], weight: [64]}
    args: {normalized_shape: [64]}
"""
# what to replace in ROWS, by what, and what is told
BROKEN = {
    "yaml": ("[f32]", "[f32", "mine.yaml: while parsing a flow sequence"),
    "label": ("label: mine", "lable: mine", "mine.yaml: row 1 has no label"),
    "rows": ("rows:", "lines:", "mine.yaml: a row file needs op, name, function, family, rows"),
    "shape": ("[4, 64]", "64", "mine.yaml: row 1 cannot be read: "),
    "args": ("args: {", "fill: {wieght: 1}\n    args: {", "mine: fill names wieght, which is no"),
    "op": (
        "name: rms_norm",
        "name: rms_nrm",
        "mine.yaml: unknown op 'rms_nrm'; the nearest are rms",
    ),
    "page": ("RMSNormFwd", "RMSNorm", "mine.yaml: rms_norm is RMSNormFwd, not RMSNorm"),
    "function": (
        *("function: rms_norm", "function: rmsnorm"),
        "mine.yaml: unknown function 'rmsnorm'; the nearest are rms_norm",
    ),
    "argument": (
        *("normalized_shape:", "normalised_shape:"),
        "unknown argument 'normalised_shape'; the nearest are normalized_shape",
    ),
    "tensor": ("weight: [64]", "gain: [64]", "unknown argument 'gain'; the nearest are"),
    "fill": ("args: {", "fill: {weight: ones}\n    args: {", "weight: unknown fill 'ones': normal"),
}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """An installed distribution with one row file; the name of its configuration package."""

    def install(text: str) -> str:
        site = tmp_path / "site"
        folder = site / "rows_of_mine" / "conf" / "rows"
        folder.mkdir(parents=True)
        (folder / "mine.yaml").write_text(text)
        info = site / "rows_of_mine-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rows-of-mine\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[opkiln.workloads]\nmine = rows_of_mine.conf\n")
        monkeypatch.setenv("PYTHONPATH", str(site))
        monkeypatch.syspath_prepend(site)
        return "rows_of_mine.conf"

    return install


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_row_file(plugin: Callable[[str], str], case: str) -> None:
    old, new, told = BROKEN[case]
    assert old in ROWS
    package = plugin(ROWS.replace(old, new))
    with pytest.raises(CatalogueError) as found:
        rows = load_rows([package])
        check_ops(rows)
        check_calls(rows)
    assert told in str(found.value) and "\n" not in str(found.value)
    assert "rows_of_mine.conf/rows/mine.yaml" in str(found.value)


def test_every_shipped_row_passes() -> None:
    rows = load_rows()
    check_ops(rows)
    check_calls(rows)


@pytest.mark.parametrize("case", ["yaml", "function", "fill"])
def test_a_broken_row_file_ends_the_command(
    plugin: Callable[[str], str], tmp_path: Path, case: str
) -> None:
    old, new, told = BROKEN[case]
    plugin(ROWS.replace(old, new))
    done = bench(tmp_path, "device=cpu", "op=rms_norm", "workload=mine")
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.glob("runs/*")) == []


def test_a_row_file_of_a_plugin_runs(plugin: Callable[[str], str], tmp_path: Path) -> None:
    plugin(ROWS)
    done = bench(tmp_path, "device=cpu", "suite=every", "op=rms_norm", "workload=mine")
    assert done.returncode == 0, done.stderr
    assert "RMSNormFwd mine f32" in done.stdout


PROFILE: dict[str, Any] = yaml.safe_load(DEVICE.read_text())
TABLE: dict[str, Any] = {"read_bytes": [0, 1024], "write_bytes": [0, 1024], "us": [[1, 2], [3, 4]]}


def limits(**changes: Any) -> Bench:
    names = ("bandwidth_gbps", "peaks_tflops", "floor")
    return Bench(device=Device(**{**{n: PROFILE[n] for n in names}, **changes}))


@pytest.mark.parametrize(
    ("cfg", "told"),
    [
        (Bench(device=Device(bandwidth_gbps=100)), "bandwidth_gbps, peaks_tflops and floor go"),
        (Bench(device=Device(peaks_tflops={"vector_f32": 1.0})), "go together"),
        (limits(bandwidth_gbps=-1.0), "device: bandwidth_gbps must be above 0, got -1.0"),
        (limits(peaks_tflops={**PROFILE["peaks_tflops"], "vector_f32": 0}), "vector_f32 must be"),
        (limits(peaks_tflops={"vector_f32": 60.0}), "peaks_tflops lacks tensor_f16, vector_f64"),
        (limits(floor={"read_bytes": [0, 1]}), "device.floor lacks write_bytes, us"),
        (limits(floor={**TABLE, "us": "fast"}), "device.floor is no table of numbers"),
        (limits(floor={**TABLE, "us": [[1, 2]]}), "a time above 0 for each read and write size"),
        (limits(floor={**TABLE, "us": [[1, -2], [3, 4]]}), "a time above 0 for each"),
        (limits(floor={**TABLE, "read_bytes": [9, 1]}), "must ascend from 0"),
        (Bench(suite=Suite(rows_per_op=-1)), "suite.rows_per_op must be at least 1, got -1"),
        (Bench(suite=Suite(max_row_mbytes=-0.5)), "suite.max_row_mbytes must be at least 0"),
        (Bench(suite=Suite(page="norms")), "suite.page must be all, norm or null, got 'norms'"),
    ],
)
def test_a_wrong_value(cfg: Bench, told: str) -> None:
    with pytest.raises(CatalogueError) as found:
        check_config(cfg)
    assert told in str(found.value) and "\n" not in str(found.value)


def test_right_values() -> None:
    check_config(Bench())
    check_config(limits())
    check_config(limits(floor=TABLE))


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CatalogueError, match=r"output\.x: cannot write .*: Not a directory"):
        check_folder("output.x", tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["output.publish_dir=file/out"], "output.publish_dir"),
        (["output.runs_dir=file/runs"], "output.runs_dir"),
        (["-m", "shard=0/2,1/2", "output.runs_dir=file/runs"], "output.runs_dir"),
    ],
    ids=["publish", "runs", "multirun"],
)
def test_a_folder_that_cannot_be_made_ends_the_command(
    tmp_path: Path, arguments: list[str], setting: str
) -> None:
    (tmp_path / "file").touch()
    done = bench(tmp_path, *arguments, "device=cpu", "op=rms_norm")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"opkiln-bench: {setting}: cannot write file/")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.glob("runs/*")) == []
