"""The commands beside the Hydra app: report, compare, calibrate, collect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from opkiln_bench.records import RecordError


def report(arguments: argparse.Namespace) -> int:
    from opkiln_bench.report import publish

    into = Path(arguments.into)
    for path in publish([Path(r) for r in arguments.runs], into, into / "rows.csv"):
        print(path)
    return 0


def compare(arguments: argparse.Namespace) -> int:
    from opkiln_bench.compare import changes
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
    return 1 if slower and arguments.fail_on == "regression" else 0


def calibrate(arguments: argparse.Namespace) -> int:
    import torch

    if not torch.cuda.is_available():
        print("opkiln-bench calibrate: torch sees no GPU here", file=sys.stderr)
        return 2
    from opkiln_bench.calibrate import calibrate, write_profile

    profile = calibrate(torch.device("cuda", 0), arguments.samples)
    print(write_profile(profile, Path(arguments.to) if arguments.to else None))
    return 0


def collect(arguments: argparse.Namespace) -> int:
    from opkiln_bench.records import collect, read_run

    runs = [read_run(Path(r)) for r in arguments.runs]
    print(f"{collect(runs, Path(arguments.into))} rows in {arguments.into}")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "report": report,
    "compare": compare,
    "calibrate": calibrate,
    "collect": collect,
}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="opkiln-bench")
    sub = root.add_subparsers(dest="command", required=True)
    p = sub.add_parser("report", help="pages and rows.csv from one or more runs")
    p.add_argument("runs", nargs="+", metavar="RUN", help="a record folder, such as runs/first")
    p.add_argument("--into", default="report", help="folder for the pages and rows.csv")
    p = sub.add_parser("compare", help="which rows of B became slower or faster than in A")
    p.add_argument("before", metavar="A")
    p.add_argument("after", metavar="B")
    p.add_argument("--backend", default="opkiln")
    p.add_argument("--fail-on", choices=["regression"], help="exit 1 if a row became slower")
    p = sub.add_parser("calibrate", help="measure this GPU's limits and floor table")
    p.add_argument("--to", help="file to write; default: the user's configuration folder")
    p.add_argument("--samples", type=int, default=40)
    p = sub.add_parser("collect", help="fold the records of shards into one run")
    p.add_argument("runs", nargs="+", metavar="RUN")
    p.add_argument("--into", required=True, help="folder of the new run")
    return root


def main(argv: Sequence[str]) -> int:
    """Run a command; a record that cannot be read is one line and exit code 2."""
    arguments = parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except RecordError as error:
        print(f"opkiln-bench {arguments.command}: {error}", file=sys.stderr)
        return 2
