"""Markdown pages from judged rows, in the two formats of the published pages.

`<family>.md`: tensor signatures, then a row per workload and dtype with every column.
`all.md`: overview with counts, then a short table per op. `method.md`: how it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from opkiln_bench.analysis import Result
from opkiln_bench.catalogue import TORCH_NAMES
from opkiln_bench.compare import Agreement
from opkiln_bench.peers import unmeasured
from opkiln_bench.records import Run
from opkiln_bench.tuning import MEASURE_MS

FAMILIES = {
    "normalization": "Normalization",
    "convolution": "Convolution",
    "pooling": "Pooling",
    "positional-encoding": "Positional Encoding",
    "fft": "FFT",
    "mhc": "MHC",
    "top-k": "Top-k",
}
MARKS = {"ahead": "🟢 ", "level": "", "behind": "🔴 "}


def milliseconds(time_us: float | None) -> str:
    if time_us is None:
        return "–"
    ms = time_us / 1e3
    return f"{ms:.4f}" if ms >= 0.01 else f"{ms:.3g}"


def ratio(result: Result) -> str:
    """`🟢 1.05×`; why there is none otherwise."""
    if result.ratio is None:
        return result.status if result.status != "ok" else "–"
    return f"{MARKS[result.ratio.verdict]}{result.ratio.value:.2f}×"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def significant(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def alternatives(result: Result) -> tuple[str, str]:
    """Names and times of the alternatives, the fastest first, as two cells."""
    names = " ".join(a.backend for a in result.alternatives)
    return names or "–", " ".join(milliseconds(a.time_us) for a in result.alternatives) or "–"


def label(result: Result) -> str:
    """The row's name on the page of its family."""
    record = result.record
    page = "norm" if record["family"] == "normalization" else "all"
    return str(record["pages"].get(page, record["label"]))


def _joined(tensors: Sequence[tuple[str, str]]) -> str:
    """`input: [2048, 4096]` `weight, bias: [4096]`: tensors of one shape share a code span."""
    return " ".join(
        f"`{', '.join(name for name, _ in group)}: {shape}`"
        for shape, group in ((s, list(g)) for s, g in groupby(tensors, key=lambda t: t[1]))
    )


def _dtype_suffix(tensor: dict[str, Any], record: dict[str, Any]) -> str:
    return "" if tensor["dtype"] == record["dtype"] else f", {tensor['dtype']}"


def dims(record: dict[str, Any]) -> str:
    """The tensors of a call by named sizes."""
    return _joined(
        [
            (n, f"[{t['dims']}]{_dtype_suffix(t, record) if t['fixed_dtype'] else ''}")
            for n, t in record["tensors"].items()
        ]
    )


def sizes(record: dict[str, Any]) -> str:
    """The tensors and parameters of a workload."""
    tensors = _joined(
        [
            (n, f"{t['shape']}{_dtype_suffix(t, record) if t['fixed_dtype'] else ''}")
            for n, t in record["tensors"].items()
        ]
    )
    args = [f"{k}={_plain(v)}" for k, v in record["shown_args"].items()]
    return " ".join([tensors, *args])


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def by_workload(rows: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """Rows of an op by label, in order of first appearance; dtypes in the catalogue's order."""
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    rank = list(TORCH_NAMES)
    return [(n, sorted(g, key=lambda r: rank.index(r.record["dtype"]))) for n, g in groups.items()]


def by_signature(rows: Sequence[Result]) -> list[tuple[str, list[tuple[str, list[Result]]]]]:
    """The workloads of an op by the tensors they have."""
    groups: dict[str, list[tuple[str, list[Result]]]] = {}
    for name, group in by_workload(rows):
        groups.setdefault(dims(group[0].record), []).append((name, group))
    return list(groups.items())


def by_op(rows: Sequence[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(row.record["op"], []).append(row)
    return groups


def by_family(rows: Sequence[Result]) -> dict[str, dict[str, list[Result]]]:
    """family -> op -> rows, families in the order of the pages, a plugin's own after them."""
    known = [*FAMILIES, *sorted({r.record["family"] for r in rows} - set(FAMILIES))]
    found = {f: by_op([r for r in rows if r.record["family"] == f]) for f in known}
    return {family: ops for family, ops in found.items() if ops}


def write_pages(
    folder: Path,
    rows: Sequence[Result],
    runs: Sequence[Run],
    agreements: Sequence[Agreement] = (),
) -> list[Path]:
    """Write every page that the rows fill; the paths written."""
    env = Environment(
        loader=PackageLoader("opkiln_bench"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,  # Markdown, from our own records
    )
    helpers = (ratio, milliseconds, percent, significant, alternatives, sizes, dims)
    env.globals |= {f.__name__: f for f in helpers}
    env.globals |= {"by_signature": by_signature, "by_workload": by_workload, "names": TORCH_NAMES}
    on_all = [r for r in rows if "all" in r.record["pages"]]
    titles = {r.record["timer"]["title"] for r in rows}
    shared = {"title_note": " · ".join(sorted(titles)), "wall": "CPU wall clock" in titles}
    pages: dict[str, dict[str, Any]] = {
        "method.md": {
            "runs": runs,
            "agreements": agreements,
            "unmeasured": unmeasured(),
            "tuning_ms": MEASURE_MS,
        }
    }
    for family, ops in by_family(rows).items():
        heading = FAMILIES.get(family, family)
        pages[f"{family}.md"] = {"heading": heading, "ops": ops, "template": "family.md"}
    if on_all:
        pages["all.md"] = {"families": by_family(on_all), "headings": FAMILIES}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, values in pages.items():
        template = env.get_template(f"{values.pop('template', name)}.j2")
        path = folder / name
        path.write_text(template.render(**shared, **values).rstrip() + "\n", encoding="utf-8")
        written.append(path)
    return written
