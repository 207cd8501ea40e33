"""Markdown pages from judged rows, in the two formats of the published pages.

`<family>.md`: tensor signatures, then a row per workload and dtype with every column.
`all.md`: overview with counts, then a short table per op. `method.md`: how it was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from opkiln_bench.analysis import Result
from opkiln_bench.catalogue import TORCH_NAMES
from opkiln_bench.compare import Agreement
from opkiln_bench.environment import ClockSampler
from opkiln_bench.held_back import PAGE as HELD_BACK
from opkiln_bench.peers import unmeasured_figures
from opkiln_bench.records import Run, row_key
from opkiln_bench.regret import PAGES_TARGET, summary, tenths
from opkiln_bench.tuning import MEASURE_MS

FAMILIES = {
    "normalization": "Normalization",
    "convolution": "Convolution",
    "pooling": "Pooling",
    "positional-encoding": "Positional Encoding",
    "fft": "FFT",
    "mhc": "MHC",
    "top-k": "Top-k",
    "backward": "Backward",
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


def regret(result: Result) -> str:
    """`0.0 %`, or `3.1 % torch` where auto picks the slower; a dash without two contestants."""
    if result.regret is None:
        return "–"
    picked = f" {result.regret.picked}" if result.regret.value > 0 else ""
    return tenths(result.regret.value) + picked


def regrets(rows: Sequence[Result], target: float = PAGES_TARGET) -> str:
    """The sentence about the regret of rows; empty where none has one."""
    named = [(" ".join(row_key(row.record)), row.regret) for row in rows]
    told = summary(named, target)
    return told and f"{told}."


def alternatives(result: Result) -> tuple[str, str]:
    """Names and times of the alternatives, the fastest first, as two cells."""
    names = " ".join(a.backend for a in result.alternatives)
    return names or "–", " ".join(milliseconds(a.time_us) for a in result.alternatives) or "–"


def unmeasured_here(result: Result) -> str:
    """The other system's figures of peers that have no module here: `vllm 0.0125`."""
    figures = unmeasured_figures(*row_key(result.record))
    return " ".join(f"{name} {milliseconds(us)}" for name, us in figures)


def is_gradient(result: Result) -> bool:
    """Whether the row is no row of the pages, but the gradient of one."""
    return result.record.get("forward") is not None


def is_held_back(result: Result) -> bool:
    """Whether the row is of the held-back sample, which has a page of its own."""
    return HELD_BACK in result.record["pages"]


def family_of(result: Result) -> str:
    """The page that a row stands on: gradients have one of their own."""
    return "backward" if is_gradient(result) else str(result.record["family"])


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


SPATIAL = {3: "N, C, L", 4: "N, C, H, W", 5: "N, C, D, H, W"}
# What an op's shape rule calls by one name, as a reader does: by rank, of an op or its family.
READABLE = {
    ("convolution", "*NC_spatial"): SPATIAL,
    ("convolution", "*NO_spatial"): {rank: s.replace("C", "O") for rank, s in SPATIAL.items()},
    ("convolution", "O, I, *kernel"): {3: "O, I, K", 4: "O, I, KH, KW", 5: "O, I, KD, KH, KW"},
    ("pooling", "*NC_spatial"): SPATIAL,
    ("pooling", "*NCHW"): SPATIAL,
    ("pooling", "*grad"): SPATIAL,
    ("mean_pooling_backward", "*grad"): {4: "B, chunks, H, D"},
    ("fft", "*shape"): {1: "n", 2: "B, n"},
    ("fft", "*grad"): {1: "n", 2: "B, n"},
    ("positional-encoding", "*shape"): {2: "S, D", 4: "B, S, H, D"},
    ("positional-encoding", "*grad"): {2: "S, D", 4: "B, S, H, D"},
}


def named_sizes(record: dict[str, Any]) -> dict[str, str]:
    """Tensor name -> its sizes by name. One that is free to broadcast has those it equals here."""
    found: dict[str, str] = {}
    by_shape: dict[tuple[int, ...], str] = {}
    for name, tensor in record["tensors"].items():
        shape, text = tuple(tensor["shape"]), tensor["dims"]
        if text == f"*{name}_dims":
            text = by_shape.get(shape, text)
        readable = READABLE.get((record["name"], text)) or READABLE.get((record["family"], text))
        text = (readable or {}).get(len(shape), text)
        found[name] = text
        by_shape.setdefault(shape, text)
    return found


def dims(record: dict[str, Any]) -> str:
    """The tensors of a call by named sizes."""
    names = named_sizes(record)
    return _joined(
        [
            (n, f"[{names[n]}]{_dtype_suffix(t, record) if t['fixed_dtype'] else ''}")
            for n, t in record["tensors"].items()
        ]
    )


def sizes_stated(record: dict[str, Any]) -> set[tuple[str, int]]:
    """Names and values of the sizes that the shapes of a row state already."""
    names = named_sizes(record)
    return {
        pair
        for n, t in record["tensors"].items()
        for pair in zip(reversed(names[n].split(", ")), reversed(t["shape"]), strict=False)
    }


def sizes(record: dict[str, Any]) -> str:
    """The tensors and parameters of a workload."""
    tensors = _joined(
        [
            (n, f"{t['shape']}{_dtype_suffix(t, record) if t['fixed_dtype'] else ''}")
            for n, t in record["tensors"].items()
        ]
    )
    stated = sizes_stated(record)
    args = [f"{k}={_plain(v)}" for k, v in record["shown_args"].items() if not said(k, v, stated)]
    return " ".join([tensors, *args])


def said(name: str, value: Any, stated: set[tuple[str, int]]) -> bool:
    return isinstance(value, int) and (name, value) in stated


def clocks(run: Run) -> str:
    """What the SM clock was while the rows were timed; empty where a run did not watch it."""
    watched = [c for row in run.rows.values() if (c := row.get("clocks")) and "sm_mhz_min" in c]
    if not watched:
        return ""
    median = statistics.median_low([c["sm_mhz"] for c in watched])
    lowest = min(c["sm_mhz_min"] for c in watched)
    throttled = sum(c["throttled"] for c in watched)
    return (
        f"SM clock while timing, asked every {ClockSampler.PERIOD_S * 1e3:.0f} ms: median of the "
        f"rows {median} MHz, lowest {lowest} MHz; the driver gave a reason to throttle on "
        f"{throttled} of {len(watched)} rows (⚠ throttled)."
    )


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
    known = [*FAMILIES, *sorted({family_of(r) for r in rows} - set(FAMILIES))]
    found = {f: by_op([r for r in rows if family_of(r) == f]) for f in known}
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
    helpers = (
        *(ratio, milliseconds, percent, significant, regret, regrets),
        *(alternatives, unmeasured_here, sizes, dims, clocks),
    )
    env.globals |= {f.__name__: f for f in helpers}
    env.globals |= {"by_signature": by_signature, "by_workload": by_workload, "names": TORCH_NAMES}
    on_all = [r for r in rows if "all" in r.record["pages"]]
    titles = {r.record["timer"]["title"] for r in rows}
    shared = {"title_note": " · ".join(sorted(titles)), "wall": "CPU wall clock" in titles}
    pages: dict[str, dict[str, Any]] = {
        "method.md": {
            "runs": runs,
            "agreements": agreements,
            "tuning_ms": MEASURE_MS,
        }
    }
    for family, ops in by_family(rows).items():
        heading = FAMILIES.get(family, family)
        on_page = [row for found in ops.values() for row in found]
        pages[f"{family}.md"] = {
            "heading": heading,
            "ops": ops,
            "rows": on_page,
            "template": "family.md",
        }
    if on_all:
        pages["all.md"] = {"families": by_family(on_all), "headings": FAMILIES, "rows": on_all}
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, values in pages.items():
        template = env.get_template(f"{values.pop('template', name)}.j2")
        path = folder / name
        path.write_text(template.render(**shared, **values).rstrip() + "\n", encoding="utf-8")
        written.append(path)
    return written
