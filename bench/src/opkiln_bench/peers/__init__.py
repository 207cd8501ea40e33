"""Peers: other libraries' implementations, reachable by name and never picked by dispatch.

One module a peer; each lists what it implements and imports its library when a row asks for it.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from opkiln.hookspecs import hookimpl
from opkiln.registry import Implementation

from opkiln_bench.peers import flaggems, flashinfer, liger, quack, torch_compile, torch_direct

OPKILN_API = 1
PEERS = (torch_compile, torch_direct, quack, flashinfer, liger, flaggems)


@hookimpl
def opkiln_implementations() -> list[Implementation]:
    return [impl for peer in PEERS for impl in peer.implementations()]


def unmeasured() -> dict[str, dict[str, Any]]:
    """Peers of the pages without a module here: `reason`, and the pages' `fastest` figures."""
    import yaml  # every process with this distribution loads this module at its first dispatch

    text = (files("opkiln_bench") / "unmeasured.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def absent() -> dict[str, str]:
    """Peers that cannot be measured here, and why."""
    found = {name: peer["reason"] for name, peer in unmeasured().items()}
    for library in (quack, flashinfer, liger, flaggems):
        if not library.implementations():
            found[library.BACKEND] = f"{library.DISTRIBUTION} is not installed"
    return found
