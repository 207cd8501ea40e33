"""tests/norm/offline.py for the rotation kernel: its reports, and the opcodes in their order.

A script: reads a JSON list of requests, prints a JSON list of reports with `opcodes`.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "norm"))

from offline import OPCODE, compile_kernel, report, tool


def opcodes(request: dict[str, Any]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder, "kernel.cubin")
        cubin.write_bytes(compile_kernel(request).asm["cubin"])
        sass = tool("cuobjdump", "--dump-sass", str(cubin))
    return [m[1] for m in map(OPCODE.match, sass.splitlines()) if m]


if __name__ == "__main__":
    found = [report(r) | {"opcodes": opcodes(r)} for r in json.load(sys.stdin)]
    json.dump(found, sys.stdout)
