"""The generated pages of the site: one for each family of ops, and the results.

write(folder) writes folder/ops/<family>.md from the specs, the functions' docstrings and the
installed backends, and folder/results.md from results/h200/rows.csv.
"""

import csv
import inspect
import math
from collections.abc import Iterable
from pathlib import Path

from opkiln import functional
from opkiln.meta import dtype_name
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln.spec import OpSpec, TensorSpec

ROWS = Path(__file__).parents[1] / "results" / "h200" / "rows.csv"
FAMILIES = {
    "norm": "Normalization",
    "conv": "Convolution",
    "pool": "Pooling",
    "rope": "Rotary embedding",
    "misc": "FFT, MHC and top-k",
}


def write(folder: Path) -> None:
    """Write all pages. Needs the families' packages for what their backends promise."""
    (folder / "ops").mkdir(parents=True, exist_ok=True)
    for family, title in FAMILIES.items():
        page = folder / "ops" / f"{family}.md"
        page.write_text(family_page(family, title), encoding="utf-8")
    (folder / "results.md").write_text(results_page(), encoding="utf-8")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *[list(row) for row in rows]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def public_function(spec: OpSpec) -> str:
    """The name in opkiln.functional that serves a forward op."""
    base = spec.name.removesuffix("_indices")
    return spec.name if spec.name in functional.__all__ else base


def family_page(family: str, title: str) -> str:
    specs = [s for s in CATALOGUE.values() if s.family == family and s.forward_op is None]
    parts = [
        f"# {title}\n",
        f"`pip install opkiln-{family}` installs the kernels of this family.\n",
    ]
    for spec in specs:
        parts.append(op_section(spec))
    return "\n".join(parts)


def op_section(spec: OpSpec) -> str:
    name = public_function(spec)
    function = getattr(functional, name)
    doc = inspect.getdoc(function) or ""
    signature = str(inspect.signature(function)).replace("'", "")
    parts = [
        f"## {spec.name}\n",
        f"`opkiln.functional.{name}{signature}`\n",
        f"```text\n{doc}\n```\n",
        f"On the benchmark's pages: {spec.op}. Canonical form, as backends see it:\n",
        table(["tensor", "dims", "dtypes"], [tensor_row(t) for t in spec.tensors]),
        outputs_line(spec),
        gradient_line(spec),
        backends_table(spec),
    ]
    return "\n".join(parts)


def tensor_row(tensor: TensorSpec) -> list[str]:
    dtypes = ", ".join(dtype_name(d) for d in tensor.dtypes) or "the first tensor's"
    return [tensor.name + (" (optional)" if tensor.optional else ""), f"`{tensor.dims}`", dtypes]


def outputs_line(spec: OpSpec) -> str:
    shown = ", ".join(o.name for o in spec.returns) or "none: it writes its inputs"
    saved = ", ".join(o.name for o in spec.outputs if o.saved)
    return f"Outputs: {shown}." + (f" Saved for the backward: {saved}." if saved else "") + "\n"


def gradient_line(spec: OpSpec) -> str:
    if spec.backward is None:
        return "No derivative.\n"
    return f"Gradients: {', '.join(spec.backward.wrt)} ({spec.backward.spec.name}).\n"


def backends_table(spec: OpSpec) -> str:
    """Who implements the op and its backward here, and what they promise; no peers of the bench."""
    names = [spec.name, *([spec.backward.spec.name] if spec.backward else [])]
    rows = [
        [name, backend, ", ".join(sorted(impl.traits)) or "-", "yes" if impl.auto else "by name"]
        for name in names
        for backend, impl in sorted(REGISTRY.of(name).items())
        if impl.auto or backend in ("opkiln", "torch-ref")
    ]
    return table(["op", "backend", "promises", "chosen by itself"], rows)


def results_page() -> str:
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    gpus = ", ".join(sorted({row["gpu"] for row in rows}))
    commits = ", ".join(sorted({row["commit"][:12] for row in rows}))
    dates = sorted(row["date"][:10] for row in rows)
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    ops = dict.fromkeys(row["op"] for row in rows)
    lines = [op_line(op, [r for r in rows if r["op"] == op and r["ratio"]]) for op in ops]
    head = ["op", "rows", "ahead", "level", "behind", "geometric mean of the ratios"]
    return (
        "# Results\n\nFastest other implementation's device time over ours, "
        f"{gpus}, {days}, commit {commits}. Written by `opkiln-bench`; every row with its "
        "alternatives stands in `results/h200`.\n\n" + table(head, lines)
    )


def op_line(op: str, rows: list[dict[str, str]]) -> list[str]:
    counts = [sum(row["verdict"] == v for row in rows) for v in ("ahead", "level", "behind")]
    mean = math.exp(sum(math.log(float(row["ratio"])) for row in rows) / len(rows))
    return [op, str(len(rows)), *map(str, counts), f"{mean:.2f}"]
