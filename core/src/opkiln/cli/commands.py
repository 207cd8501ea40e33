"""The commands: doctor, list, explain, conform, cards, tune. Errors are one line; exits 0, 1, 2."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import opkiln as library
from opkiln import functional
from opkiln.cli.values import parse_arguments
from opkiln.dispatch import FAMILY_DISTRIBUTION, Explanation, explain_call
from opkiln.errors import ArgumentError, nearest
from opkiln.ops import CATALOGUE
from opkiln.policy import current
from opkiln.registry import REGISTRY
from opkiln.spec import Call
from opkiln.summary import as_text, ship

FINDING = 1
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class OneLineGroup(click.Group):
    """Every usage error is one line on stderr and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as help_text:
            click.echo(help_text.format_message(), err=True)
            code = 2
        except click.ClickException as error:
            click.echo(f"opkiln: {error.format_message()}", err=True)
            code = 2
        except click.Abort:
            code = 130
        raise SystemExit(code or 0)


def emit(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def show(title: str, columns: Iterable[str], rows: Iterable[list[str]]) -> None:
    """A table, as wide as it needs to be when it does not go to a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 500
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table, markup=False)


def known_op(name: str) -> str:
    """A catalogue name, given as such or as on the pages (RMSNormFwd)."""
    by_page = {spec.op: spec.name for spec in reversed(CATALOGUE.values())}
    found = name if name in CATALOGUE else by_page.get(name)
    if found is None:
        raise click.UsageError(f"no op {name!r}{nearest(name, [*CATALOGUE, *by_page])}")
    return found


def usable_device(name: str) -> torch.device:
    """A device that tensors can be made on. ArgumentError, or torch's RuntimeError for the name."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"device {name}: torch sees no GPU here")
    return device


@click.group(cls=OneLineGroup)
@click.version_option(library.__version__, package_name="opkiln")
def opkiln() -> None:
    """36 GPU ops for PyTorch: who computes them here, and whether they do it right."""


@opkiln.command()
@as_json
def doctor(as_json: bool) -> int:
    """Versions, devices, plugins and what is wrong with them. Exit 1 if something is."""
    from opkiln.cli.doctor import examine

    found = examine()
    if as_json:
        emit(found)
        return FINDING if found["problems"] else 0
    for name, version in found["versions"].items():
        click.echo(f"{name:<8}{version or '-'}")
    click.echo(f"GPUs    {'; '.join(found['devices']) or 'none'}")
    for name, value in found["environment"].items():
        click.echo(f"{name}={value}")
    rows = [
        [
            p["name"],
            p["version"],
            ", ".join(p["backends"]),
            str(p["ops"]),
            "ok" if p["ok"] else "failed",
        ]
        for p in found["plugins"]
    ]
    show("", ["plugin", "version", "backends", "ops", "state"], rows)
    for problem in found["problems"]:
        click.echo(f"problem: {problem}")
    return FINDING if found["problems"] else 0


@opkiln.command("list")
@click.option("--op", help="One op, by its name here or on the pages.")
@click.option("--family", type=click.Choice(list(FAMILY_DISTRIBUTION)), help="One family's ops.")
@click.option("--backend", help="The capability cards of this backend; with --op a whole one.")
@click.option("--summary", type=click.Path(dir_okay=False), help="Cards from this conform --json.")
@as_json
def list_ops(
    op: str | None, family: str | None, backend: str | None, summary: str | None, as_json: bool
) -> int:
    """The ops, and the installed backends of each; or what one backend was shown to do."""
    names = library.ops(family)
    if op is not None:
        names = [n for n in [known_op(op)] if n in names]
    if backend is not None:
        return list_cards(names, backend, summary, op is not None, as_json)
    if summary is not None:
        raise click.UsageError("--summary needs --backend")
    rows: list[dict[str, Any]] = [
        {
            "op": name,
            "page_op": CATALOGUE[name].op,
            "family": CATALOGUE[name].family,
            "backends": library.backends(name),
        }
        for name in names
    ]
    if as_json:
        emit(rows)
    else:
        cells = [[r["op"], r["page_op"], r["family"], ", ".join(r["backends"])] for r in rows]
        show("", ["op", "on the pages", "family", "backends"], cells)
    return 0


def list_cards(
    names: list[str], backend: str, summary: str | None, whole: bool, as_json: bool
) -> int:
    """A table with a line for each op, or whole cards."""
    from opkiln.cli import cards as table

    try:
        found = table.cards_of(names, backend, summary)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        emit([card.as_dict() for card in found])
    elif whole:
        click.echo("\n\n".join(map(str, found)))
    else:
        show("", table.HEAD, map(table.row, found))
        for source in dict.fromkeys(card.source for card in found):
            click.echo(source)
    return 0


@opkiln.command()
@click.argument("op")
@click.argument("arguments", nargs=-1, metavar="NAME=VALUE...")
@click.option("--device", default="cpu", show_default=True, help="Where the tensors are.")
@click.option("--grad", is_flag=True, help="Gradients are wanted.")
@as_json
def explain(op: str, arguments: tuple[str, ...], device: str, grad: bool, as_json: bool) -> int:
    """Who would serve a call, and why the others would not.

    OP is a function of opkiln.functional, or a spec such as rms_norm_backward with the spec's own
    arguments. A tensor is written as dtype[sizes]:

    opkiln explain rms_norm input=f16[2048,4096] weight=f16[4096] normalized_shape=4096
    """
    try:
        found = explanation(op, parse_arguments(arguments, usable_device(device), grad), grad)
    except (TypeError, ValueError, RuntimeError) as error:  # ArgumentError and torch's own
        raise click.UsageError(str(error).splitlines()[0]) from error
    if as_json:
        emit(found.to_json())
    else:
        click.echo(str(found))
    return 0


def explanation(op: str, values: dict[str, Any], grad: bool) -> Explanation:
    """Of a public function where there is one of that name, else of the spec."""
    function: Callable[..., Any] | None = getattr(functional, op, None)
    if op in functional.__all__ and function is not None:
        return library.explain(function, **values)
    spec = CATALOGUE[known_op(op)]
    if spec.name in functional.__all__:
        return library.explain(getattr(functional, spec.name), **values)
    names = [*spec.tensor_names, *spec.param_names]
    for name in values:
        if name not in names:
            raise ArgumentError(f"{spec.name} has no argument {name!r}{nearest(name, names)}")
    for name in spec.param_names:
        if name not in values:
            raise ArgumentError(f"{spec.name}: {name} is required; arguments: {', '.join(names)}")
    tensors = [values.get(name) for name in spec.tensor_names]
    params = {name: values[name] for name in spec.param_names}
    return explain_call(Call.of(spec, tensors, params, current(), grad))


@opkiln.command()
@click.option("--backend", required=True, help="The backend to check.")
@click.option("--op", "ops", multiple=True, help="Only this op (repeatable); default: all it has.")
@click.option("--device", default="cpu", show_default=True, help="Where the cases run.")
@click.option("--big", is_flag=True, help="Also above 2^32 elements: up to 100 GB of GPU memory.")
@click.option("--cases-only", is_flag=True, help="Nothing that compiles a call, or counts rows.")
@click.option("--jobs", default=1, show_default=True, help="Processes.")
@click.option("--json", "file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def conform(
    backend: str,
    ops: tuple[str, ...],
    device: str,
    big: bool,
    cases_only: bool,
    jobs: int,
    file: Path | None,
) -> int:
    """Check a backend against the specs. Exit 1 if a case fails or none is taken.

    --json FILE writes the summary there, anew after each op; the table is printed in any case, and
    a line on stderr after each op.
    """
    from opkiln import conformance

    def write(report: conformance.Report) -> None:
        if file is not None:
            file.write_text(as_text(report.to_json()), encoding="utf-8")

    def finished(op: conformance.OpReport, so_far: conformance.Report) -> None:
        click.echo(f"{op.op}: {op.status}, {op.cases} cases", err=True)
        write(so_far)

    if backend not in REGISTRY.backends():
        raise click.UsageError(f"no backend {backend!r}{nearest(backend, REGISTRY.backends())}")
    names = [known_op(op) for op in ops] or None
    room = file is None or (file.parent.is_dir() and os.access(file.parent, os.W_OK))
    if file is not None and not (room or file.exists()):
        raise click.UsageError(f"cannot write {file}: {file.parent} is no writable directory")
    try:
        report = conformance.conform(
            backend, names, device, None, None, big, jobs, finished, cases_only
        )
    except ArgumentError as error:
        raise click.UsageError(str(error)) from error
    write(report)
    click.echo(str(report))
    return 0 if report.ok else FINDING


@opkiln.command()
@click.argument("summary", type=click.Path(dir_okay=False, path_type=Path))
def cards(summary: Path) -> int:
    """Put what conform --json wrote into the packages of the backend, which ship it from then on.

    For who develops them, in editable installs: each gets cards/<backend>-<device>.json.
    """
    try:
        written = ship(summary)
    except (ArgumentError, OSError) as error:
        raise click.UsageError(str(error)) from error
    for path in written:
        click.echo(str(path))
    return 0


@opkiln.command()
@click.option("--from", "step", required=True, help="A file that opkiln.capture wrote.")
@click.option("--runs-dir", default="runs", show_default=True, help="For the record and its pages.")
def tune(step: str, runs_dir: str) -> int:
    """Measure the calls of a captured step, search their launch parameters, keep the best.

    They go to your own table, which the next process uses. Needs a GPU and opkiln-bench.
    """
    try:
        commands = importlib.import_module("opkiln_bench.commands")
    except ModuleNotFoundError as error:
        if error.name != "opkiln_bench":
            raise
        raise click.UsageError("tune needs the bench: pip install opkiln-bench") from error
    code: int = commands.main(["tune", "--from", step, "--runs-dir", runs_dir])
    return code
