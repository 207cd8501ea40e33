"""What kernels compile to for sm_90 without a GPU, and the launches that say what to compile."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

POINTERS = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
Launch = tuple[Any, dict[str, Any], tuple[Any, ...]]  # kernel, options, arguments


def reports_of(script: pathlib.Path, given: Any = None) -> Any:
    """What a script prints as JSON, in a process of its own: the interpreter is on in this one."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    text = None if given is None else json.dumps(given)
    done = subprocess.run(
        [sys.executable, str(script)], input=text, capture_output=True, text=True, env=env,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def recorded(module: ModuleType, run: Callable[[], Any]) -> list[Launch]:
    """What `run` would launch by the module's launcher."""
    found: list[Launch] = []

    def launcher(
        kernel: Any, grid: Any, options: dict[str, Any], fixed: tuple[Any, ...] = ()
    ) -> Callable[..., None]:
        return lambda *args: found.append((kernel, options, (*args, *fixed)))

    vars(module)["launcher"] = launcher
    run()
    return found


def request(kernel: Any, options: dict[str, Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """What norm/offline.py compiles. Integers that Triton would take as multiples of 16 are
    compiled in: so are vectors of that length allowed.
    """
    signature: dict[str, Any] = {}
    constexprs: dict[str, Any] = {}
    for param, value in zip(kernel.params, args, strict=True):
        if param.is_constexpr or value is None or isinstance(value, bool):
            constexprs[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
        elif isinstance(value, tuple):
            signature[param.name] = ["i32"] * len(value)
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif not param.do_not_specialize and (value == 1 or value % 16 == 0):
            constexprs[param.name] = value
        else:
            signature[param.name] = "i32"
    name = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
    return dict(kernel=name, signature=signature, constexprs=constexprs, options=options)
