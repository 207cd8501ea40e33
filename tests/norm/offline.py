"""Compile Triton kernels for a GPU that is not here, and count what the machine code holds.

A script: reads a JSON list of requests, prints a JSON list of reports in the same order.

request: {"kernel": "module:name", "signature": {argument: type}, "constexprs": {argument: value},
    "options": {"num_warps": 4}}. Types are Triton's ("*bf16", "i32", "fp32"; a list makes a tuple).
    Pointers count as 16-byte aligned, integers as multiples of nothing.
report: {"registers", "spill_bytes", "stack_bytes", "shared_bytes", "counts": {opcode: how many}}

Needs only Triton's wheel, which carries ptxas and cuobjdump.
"""

import collections
import importlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITY = 90
TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)")


def compile_kernel(request: dict[str, Any]) -> Any:
    module, _, name = request["kernel"].partition(":")
    fn = getattr(importlib.import_module(module), name)
    types, constexprs = request["signature"], request["constexprs"]
    signature, attrs = {}, {}
    for i, argument in enumerate(fn.arg_names):
        kind = "constexpr" if argument in constexprs else types[argument]
        signature[argument] = tuple(kind) if isinstance(kind, list) else kind
        if kind[:1] == "*":
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constexprs, attrs=attrs)
    return triton.compile(
        source, target=GPUTarget("cuda", CAPABILITY, 32), options=request["options"]
    )


def tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def report(request: dict[str, Any]) -> dict[str, Any]:
    kernel = compile_kernel(request)
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        ptx.write_text(kernel.asm["ptx"])
        cubin.write_bytes(kernel.asm["cubin"])
        target = re.search(r"\.target\s+(\w+)", kernel.asm["ptx"])[1]
        log = tool("ptxas", "-v", "--gpu-name", target, str(ptx), "-o", str(cubin) + ".unused")
        sass = tool("cuobjdump", "--dump-sass", str(cubin))
    # Triton 3.6's ptxas (12.8) drops the constant of a packed 16-bit add: 35 became 0.
    assert not re.search(r"VIADD\.16x2 R\d+, R\d+(\.reuse)?, 0x0 ", sass), request["kernel"]

    def number(pattern: str) -> int:
        return int(re.search(pattern, log)[1])

    opcodes = collections.Counter(m[1] for m in map(OPCODE.match, sass.splitlines()) if m)
    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "shared_bytes": kernel.metadata.shared,
        "counts": dict(opcodes),
    }


if __name__ == "__main__":
    json.dump([report(request) for request in json.load(sys.stdin)], sys.stdout)
