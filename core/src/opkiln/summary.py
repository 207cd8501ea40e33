"""Summaries of `opkiln conform`: the file next to a run, and what packages ship of it.

A package that registers a backend may hold `cards/<backend>-<device>.json`, the part of a summary
that is about its own implementations; `ship` writes it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

from opkiln.errors import ArgumentError
from opkiln.registry import ENTRY_POINT_GROUP, REGISTRY

SCHEMA_VERSION = 2
FOLDER = "cards"
CORE = "opkiln:torch"  # core's own plugin, which has no entry point

Summary = Mapping[str, Any]


def as_text(summary: Summary) -> str:
    """A summary as JSON: a line for each op."""
    head = json.dumps({k: v for k, v in summary.items() if k != "ops"}, indent=2)
    ops = ",\n    ".join(json.dumps(op) for op in summary["ops"])
    return head[:-2] + ',\n  "ops": [\n    ' + ops + "\n  ]\n}\n"


def provenance(summary: Summary) -> dict[str, str]:
    environment = summary["environment"]
    return {
        "device": environment["gpu"] or "cpu",
        "date": environment["date"],
        "commit": environment["commit"] or "",
    }


def read(path: Path) -> list[Summary]:
    """The summaries in a file; ArgumentError for one that is none."""
    try:
        return parsed(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror or error}") from error


def parsed(text: str, where: str) -> list[Summary]:
    """One summary, or a list of them as the pytest plugin writes it."""
    try:
        document = json.loads(text)
        found = document if isinstance(document, list) else [document]
        levels = {summary["schema_version"] for summary in found}
        for summary in found:
            provenance(summary), summary["backend"], summary["ops"]
    except (ValueError, KeyError, TypeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ArgumentError(f"{where} is no summary of `opkiln conform`: {told}") from error
    if levels - {SCHEMA_VERSION}:
        raise ArgumentError(
            f"{where} has schema {max(levels)}, cards are made of schema {SCHEMA_VERSION}: "
            "run `opkiln conform` again"
        )
    return found


@cache
def packages() -> dict[str, str]:
    """Plugin, as the registry names it -> the package that it lies in."""
    found = {CORE: "opkiln"}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.dist is not None:
            found[f"{point.dist.name}:{point.name}"] = point.module.partition(".")[0]
    return found


def shipped() -> list[Summary]:
    """The summaries in the installed plugins' packages. One that cannot be read is told and passed
    over.
    """
    REGISTRY.load()
    loaded = {p.name for p in REGISTRY.plugins if p.ok}
    names = sorted({package for plugin, package in packages().items() if plugin in loaded})
    return [summary for package in names for summary in shipped_in(package)]


@cache
def shipped_in(package: str) -> list[Summary]:
    folder = files(package) / FOLDER
    if not folder.is_dir():
        return []
    found: list[Summary] = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".json"):
            try:
                found += parsed(entry.read_text(encoding="utf-8"), f"{package}/{entry.name}")
            except ArgumentError as error:
                warnings.warn(f"opkiln: cards: {error}", stacklevel=3)
    return found


def ship(path: Path) -> list[Path]:
    """Write what a summary holds into the packages whose implementations it is of: `cards/
    <backend>-<device>.json` in each. What was written. ArgumentError where nothing is.
    """
    written = []
    for summary in read(path):
        by_package: dict[str, list[Any]] = {}
        for op in summary["ops"]:
            plugin = REGISTRY.owner(op["op"], summary["backend"])
            if plugin in packages():
                by_package.setdefault(packages()[plugin], []).append(op)
        for package, ops in sorted(by_package.items()):
            folder = Path(str(files(package))) / FOLDER
            folder.mkdir(exist_ok=True)
            device = provenance(summary)["device"].lower().replace(" ", "-")
            target = folder / f"{summary['backend']}-{device}.json"
            target.write_text(as_text({**summary, "ops": ops}), encoding="utf-8")
            written.append(target)
    if not written:
        raise ArgumentError(f"{path}: no installed package has the implementations that it is of")
    return written
