"""`name=value` arguments of the command line -> Python values and tensors."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

import torch

from opkiln.errors import ArgumentError, nearest

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i32": torch.int32,
    "i64": torch.int64,
}
TENSOR = re.compile(r"(\w+)\[([\d,\s]*)\]")
WORDS = {"true": True, "false": False, "none": None}


def parse_value(text: str, device: torch.device, grad: bool) -> Any:
    """`f16[2048,4096]` -> a tensor of that dtype and shape; else a Python literal or a word.

    Integer tensors are zeros, the others are not filled. ArgumentError for an unknown dtype.
    """
    found = TENSOR.fullmatch(text)
    if found:
        short, sizes = found[1], [int(n) for n in found[2].split(",") if n.strip()]
        if short not in DTYPES:
            raise ArgumentError(f"{text}: no dtype {short!r}{nearest(short, DTYPES)}")
        dtype = DTYPES[short]
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(sizes, dtype=dtype, device=device)
        return torch.empty(sizes, dtype=dtype, device=device, requires_grad=grad)
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_arguments(pairs: Sequence[str], device: torch.device, grad: bool) -> dict[str, Any]:
    """`name=value` strings as keyword arguments. ArgumentError for anything else."""
    values = {}
    for pair in pairs:
        name, sep, text = pair.partition("=")
        if not sep or not name.isidentifier():
            raise ArgumentError(
                f"cannot read {pair!r}: expected name=value, such as input=f16[8,64] or eps=1e-5"
            )
        values[name] = parse_value(text, device, grad)
    return values
