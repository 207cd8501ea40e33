"""Peers: other libraries' implementations, reachable by name and never picked by dispatch.

One module a peer; each lists what it implements and imports its library when a row asks for it.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from opkiln.hookspecs import hookimpl
from opkiln.registry import Implementation

from opkiln_bench.peers import (
    flaggems,
    flashinfer,
    liger,
    quack,
    torch_autograd,
    torch_compile,
    torch_direct,
)

OPKILN_API = 1
PEERS = (torch_compile, torch_direct, torch_autograd, quack, flashinfer, liger, flaggems)


@hookimpl
def opkiln_implementations() -> list[Implementation]:
    return [impl for peer in PEERS for impl in peer.implementations()]


def unmeasured() -> dict[str, dict[str, Any]]:
    """Peers of the pages without a module here: `reason`, and the pages' `figures`."""
    import yaml  # every process with this distribution loads this module at its first dispatch

    text = (files("opkiln_bench") / "unmeasured.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def _figures() -> dict[tuple[str, str, str], list[tuple[str, float]]]:
    """(op, label, dtype) -> (peer, time in us), the fastest first."""
    found: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for name, peer in unmeasured().items():
        for op, label, dtype, time_us in peer.get("figures", ()):
            found.setdefault((op, label, dtype), []).append((name, float(time_us)))
    return {key: sorted(figures, key=lambda f: f[1]) for key, figures in found.items()}


def unmeasured_figures(op: str, label: str, dtype: str) -> list[tuple[str, float]]:
    """What the pages give for a row of peers that are not measured here: (name, time in us)."""
    return list(_figures().get((op, label, dtype), ()))


def fault_of(backend: str, op: str) -> str:
    """Why a peer's results of an op can be wrong, where that is known; empty elsewhere."""
    return {**torch_direct.FAULTS, **torch_autograd.FAULTS}.get((backend, op), "")


def absent() -> dict[str, str]:
    """Peers that cannot be measured here, and why."""
    found = {name: peer["reason"] for name, peer in unmeasured().items()}
    for library in (quack, flashinfer, liger, flaggems):
        if not library.implementations():
            found[library.BACKEND] = f"{library.DISTRIBUTION} is not installed"
    return found
