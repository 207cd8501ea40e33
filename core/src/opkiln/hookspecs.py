"""The one door for backends. A plugin is a module (or object) with this hook and `OPKILN_API`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from opkiln.registry import Implementation

API = 1
"""Level of this interface. A plugin states the level it was written for as `OPKILN_API`."""

hookspec = pluggy.HookspecMarker("opkiln")
hookimpl = pluggy.HookimplMarker("opkiln")


@hookspec
def opkiln_implementations() -> list[Implementation]:  # type: ignore[empty-body]
    """The implementations that this plugin provides. Called once; must not import kernels."""
