"""Each distribution is whole, and works with no other family beside it."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

FAMILIES = ("norm", "conv", "pool", "rope", "misc")
DISTRIBUTIONS = ("opkiln", *(f"opkiln-{f}" for f in FAMILIES), "opkiln-bench")
TUNED = ("norm", "conv", "pool", "misc")
DATA_FILES = {
    **{f"opkiln-{f}": [f"opkiln_{f}/measured/sm90.json"] for f in FAMILIES},
    "opkiln-pool": ["opkiln_pool/measured/sm90.json", "opkiln_pool/csrc/window_rows.cu"],
    "opkiln-bench": ["opkiln_bench/conf/rows/rms_norm.yaml"],
}

SERVED_BY = """
import json, torch, opkiln
import opkiln.functional as F
x, image = torch.randn(3, 64), torch.randn(1, 2, 8, 8)
norm = opkiln.explain(F.rms_norm, x, (64,))
pool = opkiln.explain(F.max_pool2d, image, 2)
y = F.rms_norm(x, (64,))
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,)))
torch.testing.assert_close(F.max_pool2d(image, 2), torch.nn.functional.max_pool2d(image, 2))
print(json.dumps({"backends": opkiln.backends("rms_norm"), "norm": norm.chosen,
                  "pool": pool.chosen, "pool_text": str(pool), "norm_text": str(norm)}))
"""

# gc.collect: a full collection of torch's objects, 0.1 s, falls into whatever is imported next.
IMPORT_COST = """
import gc, json, sys, time, torch
gc.collect()
before = time.process_time()
import opkiln
seconds = time.process_time() - before
print(json.dumps({"ms": 1e3 * seconds, "path": opkiln.__file__,
                  "loaded": [m for m in ("triton", "torch._dynamo", "click") if m in sys.modules]}))
"""


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_wheel_is_typed_and_carries_its_data(name: str, wheels: dict[str, Path]) -> None:
    package = name.replace("-", "_")
    with zipfile.ZipFile(wheels[name]) as wheel:
        files = wheel.namelist()
    assert f"{package}/py.typed" in files
    assert set(DATA_FILES.get(name, ())) <= set(files)
    tuned = name.removeprefix("opkiln-") in TUNED
    assert (f"{package}/tuning/sm90.json" in files) == tuned
    assert {f.split("/")[0] for f in files} == {package, f"{package}-0.1.0.dist-info"}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_asks_for_core_and_triton_alone(family: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[f"opkiln-{family}"]) as wheel:
        text = wheel.read(f"opkiln_{family}-0.1.0.dist-info/METADATA").decode()
        points = wheel.read(f"opkiln_{family}-0.1.0.dist-info/entry_points.txt").decode()
    metadata = Parser().parsestr(text)
    needs = [n.replace("'", '"') for n in metadata.get_all("Requires-Dist", [])]
    always = [n for n in needs if "extra ==" not in n]
    assert always == ["opkiln>=0.1", 'triton>=3.6; platform_system == "Linux"']
    assert {n.partition("extra == ")[2] for n in needs if n not in always} <= {'"cu13"'}
    assert metadata["Requires-Python"] == ">=3.11"
    assert points.split() == ["[opkiln.backends]", f"{family}=opkiln_{family}.plugin"]


def test_only_norm_installed(install) -> None:
    found = install(["opkiln", "opkiln-norm"]).eval(SERVED_BY, TRITON_INTERPRET="1")
    assert found["backends"] == ["opkiln", "torch", "torch-ref"]
    assert found["norm"] == "opkiln", found["norm_text"]
    assert found["pool"] == "torch"
    assert "not installed: pip install opkiln-pool" in found["pool_text"]


def test_only_core_installed(install) -> None:
    core = install(["opkiln"])
    found = core.eval(SERVED_BY)
    assert found["backends"] == ["torch", "torch-ref"]
    assert (found["norm"], found["pool"]) == ("torch", "torch")
    assert "not installed: pip install opkiln-norm" in found["norm_text"]

    costs = [core.eval(IMPORT_COST) for _ in range(3)]
    assert costs[0]["loaded"] == []
    assert Path(costs[0]["path"]).is_relative_to(core.folder)
    assert min(c["ms"] for c in costs) < 100


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "norm"])
def test_family_alone_loads(family: str, install) -> None:
    env = install(["opkiln", f"opkiln-{family}"])
    code = (
        "import json; from opkiln.registry import REGISTRY; REGISTRY.load();"
        "print(json.dumps([[p.name, p.error] for p in REGISTRY.plugins]))"
    )
    assert env.eval(code) == [["opkiln:torch", ""], [f"opkiln-{family}:{family}", ""]]


def test_command_line_without_its_extra_says_how_to_get_it(install) -> None:
    code = (
        "import sys; sys.modules['click'] = None; sys.argv = ['opkiln', 'doctor'];"
        "from opkiln.cli import main; main()"
    )
    done = install(["opkiln"]).run("-c", code)
    assert done.returncode == 2
    assert done.stderr == ("opkiln: the command line is an extra: pip install 'opkiln[cli]'\n")
