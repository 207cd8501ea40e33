"""`opkiln-bench report RUN...`: pages, index.html and rows.csv from records.

A published folder keeps the records it was made from under `records/`, so that a later sweep of
some rows replaces exactly these, on every page.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from opkiln_bench.analysis import Result, results
from opkiln_bench.catalogue import load_rows
from opkiln_bench.compare import Agreement, agreement
from opkiln_bench.held_back_page import write_held_back
from opkiln_bench.html import write_html
from opkiln_bench.limits import limits_of
from opkiln_bench.pages import is_gradient, is_held_back, write_pages
from opkiln_bench.records import RECORDS, Key, Run, read_runs, record_path
from opkiln_bench.rows_csv import update_csv
from opkiln_bench.summary import into_readme, summary

GRADIENTS_CSV = "rows_bwd.csv"
HELD_BACK_CSV = "rows_held_back.csv"


def ordered(runs: Sequence[Run], order: Sequence[Key]) -> list[Result]:
    """The judged rows of runs, later runs winning, as the catalogue orders them."""
    rank = {key: i for i, key in enumerate(order)}
    return sorted(
        results(runs),
        key=lambda r: rank.get((r.record["op"], r.record["label"], r.record["dtype"]), len(rank)),
    )


def agreements(runs: Sequence[Run]) -> list[Agreement]:
    """How far runs of one commit on one GPU, one after the other, agree."""
    found = []
    for before, after in pairwise(runs):
        a, b = before.header, after.header
        same = a["commit"] == b["commit"]
        same = same and a["environment"]["device"] == b["environment"]["device"]
        agreed = agreement(before, after) if same else None
        if agreed is not None:
            found.append(agreed)
    return found


def publish(folders: Sequence[Path], pages: Path, rows_csv: Path) -> list[Path]:
    """Pages of the runs' rows (later runs win) into `pages`; their lines into `rows_csv`.

    Gradients and the held-back sample have tables of their own beside it, `rows_bwd.csv` and
    `rows_held_back.csv`: `rows_csv` keeps to the pages.
    """
    runs = sorted(
        (run for folder in folders for run in read_runs(folder)), key=lambda r: r.header["date"]
    )
    order = [row.key for row in load_rows(mode="all")]
    everything = ordered(runs, order)
    rows = [r for r in everything if not is_held_back(r)]
    update_csv(rows_csv, [r for r in rows if not is_gradient(r)], order)
    if gradients := [r for r in rows if is_gradient(r)]:
        update_csv(rows_csv.with_name(GRADIENTS_CSV), gradients, order)
    limits = limits_of(runs[-1].header["config"]["device"])
    written = write_pages(pages, rows, runs, agreements(runs))
    if sample := [r for r in everything if is_held_back(r)]:
        update_csv(rows_csv.with_name(HELD_BACK_CSV), sample)
        written.append(write_held_back(pages, sample))
    return [*written, write_html(pages, rows, limits, rows_csv)]


def publish_into(folders: Sequence[Path], into: Path) -> list[Path]:
    """The same, beside records of earlier runs that `into` holds; those of `folders` join them."""
    for run in (run for folder in folders for run in read_runs(folder)):
        kept = into / RECORDS / f"{run.name}.jsonl"
        if kept.resolve() != run.path.resolve():
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(record_path(run.path), kept)
    return publish([into], into, into / "rows.csv")


def put_summary(into: Path, readme: Path) -> None:
    """A table of the published records, a line an op, between the markers of `readme`."""
    runs = sorted(read_runs(into), key=lambda r: r.header["date"])
    headers = [r.header for r in runs]
    gpus = ", ".join(sorted({h["environment"]["device"] for h in headers}))
    rows = ordered(runs, [row.key for row in load_rows(mode="all")])
    table = summary(
        [row for row in rows if not is_held_back(row)],
        gpus,
        [h["commit"] for h in headers],
        [h["date"] for h in headers],
    )
    into_readme(readme, table)
