"""Peers: other libraries' implementations, reachable by name and never picked by dispatch.

One module a peer; each lists what it implements and imports its library when a row asks for it.
"""

from __future__ import annotations

from opkiln.hookspecs import hookimpl
from opkiln.registry import Implementation

from opkiln_bench.peers import flaggems, flashinfer, liger, quack, torch_compile

OPKILN_API = 1
PEERS = (torch_compile, quack, flashinfer, liger, flaggems)


@hookimpl
def opkiln_implementations() -> list[Implementation]:
    return [impl for peer in PEERS for impl in peer.implementations()]
