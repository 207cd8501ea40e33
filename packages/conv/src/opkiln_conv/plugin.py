"""What this family registers as backend `opkiln`: nothing yet, so torch serves its ops."""

from opkiln.hookspecs import hookimpl
from opkiln.registry import Implementation

OPKILN_API = 1


@hookimpl
def opkiln_implementations() -> list[Implementation]:
    return []
