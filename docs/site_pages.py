"""The generated pages of the site: for each family of ops its functions and its capability cards,
and the results.

write(folder) writes folder/ops/<family>.md from the specs, the functions' docstrings and the
installed backends, folder/cards/<family>.md from the conformance summaries that the families ship,
and folder/results.md from results/h200/rows.csv.
"""

import csv
import inspect
import math
from collections.abc import Iterable
from pathlib import Path

from opkiln import functional
from opkiln.cards import card
from opkiln.cli.cards import HEAD, cards_of, row
from opkiln.meta import dtype_name
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY
from opkiln.spec import OpSpec, TensorSpec

ROWS = Path(__file__).parents[1] / "results" / "h200" / "rows.csv"
OURS = "opkiln"
FAMILIES = {
    "norm": "Normalization",
    "conv": "Convolution",
    "pool": "Pooling",
    "rope": "Rotary embedding",
    "misc": "FFT, MHC and top-k",
}


def write(folder: Path) -> None:
    """Write all pages. Needs the families' packages for what their backends promise."""
    for kind, page_of in (("ops", family_page), ("cards", cards_page)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for family, title in FAMILIES.items():
            page = folder / kind / f"{family}.md"
            page.write_text(page_of(family, title), encoding="utf-8")
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


CARDS = """# Capability cards: {title}

What the conformance kit found of backend `opkiln`, by `opkiln conform`; `opkiln list --backend
opkiln` and `opkiln.card` say the same. `yes`: cases passed and none failed; `no`: all were refused,
with the reason below; `not tested`: no case shows it; `-`: the op has no such form. Errors are
against the reference in double precision, in units in the last place of the result at its own size
or at the root mean square of the result where that is larger; the largest ones are of cases whose
formula amplifies rounding of its input (`mean2000`: a mean of 2,000 standard deviations). A
backward has a card of its own below.

"""


def cards_page(family: str, title: str) -> str:
    """A table of all cards, then each with the cases that its cells rest on."""
    names = [s.name for s in CATALOGUE.values() if s.family == family]
    found = cards_of(names, OURS)
    sources = dict.fromkeys(f"{one.source}.\n" for one in found if one.device)
    parts = [
        CARDS.format(title=title),
        "".join(sources) or "No summary is shipped with the packages here: nothing is tested.\n",
        table(HEAD, map(row, found)),
    ]
    for name in names:
        if OURS in REGISTRY.of(name):
            parts.append(f"## {name}\n\n```text\n{card(name, OURS)}\n```\n")
    return "\n".join(parts)


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
