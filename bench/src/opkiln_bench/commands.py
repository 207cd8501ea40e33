"""The commands beside the Hydra app, which measures: they read or fold what it measured."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from opkiln_bench.catalogue import CatalogueError
from opkiln_bench.records import RecordError


def report(arguments: argparse.Namespace) -> int:
    from opkiln_bench.report import publish_into, put_summary

    into = Path(arguments.into)
    for path in publish_into([Path(r) for r in arguments.runs], into):
        print(path)
    if arguments.readme:
        put_summary(into, Path(arguments.readme))
        print(arguments.readme)
    return 0


def compare(arguments: argparse.Namespace) -> int:
    from opkiln_bench.compare import agreement, changes
    from opkiln_bench.records import read_run

    before, after = read_run(Path(arguments.before)), read_run(Path(arguments.after))
    found = list(changes(before, after, arguments.backend))
    for change in sorted(found, key=lambda c: c.ratio.value):
        if change.kind != "level":
            r = change.ratio
            print(
                f"{change.kind}: {' '.join(change.key)} {change.before_us:.2f} -> "
                f"{change.after_us:.2f} us, {r.value:.3f}x [{r.low:.3f}, {r.high:.3f}], "
                f"noise {r.noise:.1%}"
            )
    slower = sum(c.kind == "slower" for c in found)
    faster = sum(c.kind == "faster" for c in found)
    print(f"{len(found)} rows in both: {slower} slower, {faster} faster")
    print(agreement(before, after, arguments.backend) or "no row in both: nothing to compare")
    return 1 if slower and arguments.fail_on == "regression" else 0


def history(arguments: argparse.Namespace) -> int:
    from opkiln_bench.history import lines

    for line in lines([Path(p) for p in arguments.paths], arguments.row):
        print(line)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    from opkiln_bench.records import read_runs
    from opkiln_bench.verify import figures, measure_again, name_of, published_row

    folder = Path(arguments.run)
    runs = read_runs(folder)
    published = published_row(runs, arguments.row, folder / "rows.csv")
    run = next(r for r in runs if r.name == published.run)
    print(f"{name_of(published.record)}, run {run.name}, commit {run.header['commit']}")
    again = measure_again(published, run, print)
    found = figures(published, again, arguments.within)
    for figure in found:
        print(f"  {figure}")
    if not found:
        print(f"  nothing to compare: ours was {published.status}, is {again.status}")
    reproduced = bool(found) and all(f.reproduced for f in found)
    print("reproduced" if reproduced else "not reproduced")
    return 0 if reproduced else 1


def calibrate(arguments: argparse.Namespace) -> int:
    from opkiln_bench.runner import device_in_use, device_kind

    kind = device_kind("cuda")  # before triton is imported, which wants a GPU too
    from opkiln_bench.calibrate import calibrate, write_profile

    with device_in_use(kind, None, print) as device:
        profile = calibrate(device, arguments.samples)
    print(write_profile(profile, Path(arguments.to) if arguments.to else None))
    return 0


def collect(arguments: argparse.Namespace) -> int:
    from opkiln_bench.records import collect, read_run

    runs = [read_run(Path(r)) for r in arguments.runs]
    print(f"{collect(runs, Path(arguments.into))} rows in {arguments.into}")
    return 0


def table(arguments: argparse.Namespace) -> int:
    import torch
    from opkiln.measured import arch_of

    from opkiln_bench.records import RecordError, read_runs
    from opkiln_bench.table import write_own, write_tables

    runs = [run for folder in arguments.runs for run in read_runs(Path(folder))]
    if arguments.out:
        written, left_out = write_tables(runs, arguments.out)
    else:
        arch = arguments.arch or arch_of(torch.device("cuda", 0))
        if arch is None:
            raise RecordError("table: no GPU here; --arch sm90 says whose times these are")
        written, left_out = write_own(runs, arch)
    for path, entries in written.items():
        print(f"{entries} times in {path}")
    for reason, count in left_out.items():
        print(f"{count} rows left out: {reason}")
    return 0 if written else 1


def tune(arguments: argparse.Namespace) -> int:
    from opkiln_bench.tune import tune

    return tune(Path(arguments.step), Path(arguments.runs_dir), print)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "report": report,
    "compare": compare,
    "history": history,
    "verify": verify,
    "calibrate": calibrate,
    "collect": collect,
    "table": table,
    "tune": tune,
}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="opkiln-bench")
    sub = root.add_subparsers(dest="command", required=True)
    p = sub.add_parser("report", help="pages, index.html and rows.csv from one or more runs")
    p.add_argument("runs", nargs="+", metavar="RUN", help="a record folder, such as runs/first")
    p.add_argument("--into", default="report", help="folder for them and the records")
    p.add_argument("--readme", help="a Markdown file between whose table markers a summary goes")
    p = sub.add_parser("compare", help="which rows of B became slower or faster than in A")
    p.add_argument("before", metavar="A")
    p.add_argument("after", metavar="B")
    p.add_argument("--backend", default="opkiln")
    p.add_argument("--fail-on", choices=["regression"], help="exit 1 if a row became slower")
    p = sub.add_parser("history", help="one row through every run")
    p.add_argument("row", metavar="ROW", help="op/workload/dtype, as patterns")
    p.add_argument("paths", nargs="*", default=["runs"], help="runs, or folders of runs")
    p = sub.add_parser("verify", help="measure one published row again: reproduced or not")
    p.add_argument("run", metavar="RUN", help="a run, or a published report")
    p.add_argument("--row", required=True, help="its line in rows.csv, from 1; or its name")
    p.add_argument("--within", type=float, default=0.08, help="allowed difference (0.08)")
    p = sub.add_parser("calibrate", help="measure this GPU's limits and floor table")
    p.add_argument("--to", help="file to write; default: the user's configuration folder")
    p.add_argument("--samples", type=int, default=40)
    p = sub.add_parser("collect", help="fold the records of shards into one run")
    p.add_argument("runs", nargs="+", metavar="RUN")
    p.add_argument("--into", required=True, help="folder of the new run")
    p = sub.add_parser("table", help="measured times for dispatch, of opkiln and torch")
    p.add_argument("runs", nargs="+", metavar="RUN")
    p.add_argument(
        "--out",
        help="file to write, {family} in it: one for each family; default: your own table",
    )
    p.add_argument("--arch", help="of your own table, such as sm90; default: this GPU's")
    p = sub.add_parser("tune", help="measure and search the calls of a captured step")
    p.add_argument("--from", dest="step", required=True, help="a file of opkiln.capture")
    p.add_argument("--runs-dir", default="runs", help="folder for the run's record and pages")
    return root


def unknown(word: str) -> str | None:
    """What to tell of a first argument that is neither a command nor Hydra's; else None."""
    if word in COMMANDS or "=" in word or word[:1] in ("-", "~"):
        return None
    near = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.3) or COMMANDS
    return (
        f"opkiln-bench: unknown command {word!r}; the nearest is {', '.join(near)}"
        "; settings are name=value (--help)"
    )


def main(argv: Sequence[str]) -> int:
    """Run a command; what it cannot read or find is one line and exit code 2."""
    arguments = parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except (RecordError, CatalogueError) as error:
        print(f"opkiln-bench {arguments.command}: {error}", file=sys.stderr)
        return 2
