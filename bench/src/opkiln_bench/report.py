"""`opkiln-bench report RUN...`: pages and rows.csv from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opkiln_bench.analysis import results
from opkiln_bench.catalogue import load_rows
from opkiln_bench.pages import write_pages
from opkiln_bench.records import Key, read_run
from opkiln_bench.rows_csv import update_csv


def publish(folders: Sequence[Path], pages: Path, rows_csv: Path) -> list[Path]:
    """Pages of the runs' rows (later runs win) into `pages`; their lines into `rows_csv`."""
    runs = [read_run(folder) for folder in folders]
    order: list[Key] = [row.key for row in load_rows()]
    rank = {key: i for i, key in enumerate(order)}
    rows = sorted(
        results(runs),
        key=lambda r: rank.get((r.record["op"], r.record["label"], r.record["dtype"]), len(rank)),
    )
    update_csv(rows_csv, rows, order)
    return write_pages(pages, rows, runs)
