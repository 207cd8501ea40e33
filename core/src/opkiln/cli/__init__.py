"""The command `opkiln`. click and rich come with the extra `cli`."""

from __future__ import annotations

import sys

EXTRA = "opkiln: the command line is an extra: pip install 'opkiln[cli]'"


def main() -> None:
    """The console script. Exit codes: 0, 1 (a finding), 2 (wrong usage)."""
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError:
        print(EXTRA, file=sys.stderr)
        sys.exit(2)
    from opkiln.cli.commands import opkiln

    opkiln()
