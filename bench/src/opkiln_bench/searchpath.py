"""The one SearchPathPlugin: configuration of distributions that add workloads.

A distribution names its configuration package in the entry point group `opkiln.workloads`; it
needs no Hydra itself.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

GROUP = "opkiln.workloads"


def workload_packages() -> dict[str, str]:
    """Entry point name -> configuration package, in name order."""
    return {e.name: e.value for e in sorted(entry_points(group=GROUP), key=lambda e: e.name)}


class WorkloadSearchPath(SearchPathPlugin):
    """Lets plugins add suites, devices and the like to the app."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for name, package in workload_packages().items():
            search_path.append(provider=f"opkiln-workloads-{name}", path=f"pkg://{package}")


def register() -> None:
    Plugins.instance().register(WorkloadSearchPath)
