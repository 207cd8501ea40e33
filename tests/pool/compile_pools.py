"""A script: compile pooling kernels for sm_90 as a GPU would, and print a JSON report for each.

Run without TRITON_INTERPRET, which would make the kernels Python.
"""

import importlib.util
import json
import pathlib
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool import pool_plan
from opkiln_pool.pool_plan import Tiling
from opkiln_pool.variants import KERNELS

OFFLINE = pathlib.Path(__file__).parents[1] / "norm" / "offline.py"
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
STEM = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": False}
MAX = STEM | {"dilation": (1, 1)}
MEAN = STEM | {"count_include_pad": True, "divisor_override": None}
CUBE = {k: (*v, v[0]) if isinstance(v, tuple) else v for k, v in MAX.items()}
LINE = {"kernel_size": (128,), "stride": (1,), "padding": (0,), "dilation": (1,)}
LINE |= {"ceil_mode": False}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Case = tuple[str, tuple[int, ...], torch.dtype, dict[str, Any], Tiling | None]

CASES: dict[str, Case] = {
    "patch-f16": ("max_pool2d", (8, 64, 112, 112), F16, MAX, None),
    "patch-bf16-static": (
        "max_pool2d", (8, 64, 112, 112), BF16, MAX, Tiling("patch", 128, 4, v=8, static=True)),
    "patch-f32-indices": ("max_pool2d_indices", (8, 64, 112, 112), F32, MAX, None),
    "patch-f16-indices": ("max_pool2d_indices", (8, 64, 112, 112), F16, MAX, None),
    "patch-avg": ("avg_pool2d", (8, 64, 112, 112), F16, MEAN, None),
    "patch-volume": ("max_pool3d_indices", (2, 64, 32, 112, 112), BF16, CUBE, None),
    "plane-aligned": ("adaptive_max_pool2d", (8, 64, 8, 8), F16, {"output_size": (1, 1)}, None),
    "strip-aligned": ("adaptive_avg_pool2d", (8, 64, 56, 56), F16, {"output_size": (6, 6)}, None),
    "strip-small-odd": ("adaptive_avg_pool2d", (2, 3, 9, 11), F16, {"output_size": (4, 3)}, None),
    "strip-steps": ("adaptive_max_pool2d_indices", (8, 64, 56, 56), BF16, {"output_size": (6, 6)},
                    Tiling("strip", 1, 1, step=4)),
    "table-plane-odd": ("adaptive_max_pool2d_indices", (8, 64, 7, 7), F16,
                        {"output_size": (1, 1)}, Tiling("plane", 32, 4, step=8)),
    "table-plane": ("max_pool1d_indices", (8, 64, 128), F16, LINE, Tiling("plane", 8, 1, step=32)),
    "table-strip-by-row": ("adaptive_max_pool2d_indices", (8, 64, 56, 56), F16,
                           {"output_size": (6, 6)}, Tiling("strip", 1, 1, step=1)),
    "table-strip-odd": ("adaptive_max_pool2d_indices", (8, 64, 55, 57), BF16,
                        {"output_size": (7, 7)}, Tiling("strip", 1, 1, step=1)),
    "table-volume": ("max_pool3d_indices", (2, 64, 32, 112, 112), BF16, CUBE | {"ceil_mode": True},
                     Tiling("patch", 128, 4, v=8, static=True, pairs=True)),
    "channels-last": ("max_pool2d_indices", (8, 64, 112, 112), F16, MAX, None),
    "taps-odd-rows": ("max_pool2d", (8, 64, 55, 55), F16, MAX, None),
    "plane-odd": ("adaptive_max_pool2d_indices", (8, 64, 7, 7), F16, {"output_size": (1, 1)}, None),
    "strip-odd": ("adaptive_max_pool2d_indices", (8, 64, 55, 57), F32, {"output_size": (7, 7)},
                  None),
}  # fmt: skip


def request(case: str) -> dict[str, Any]:
    """What offline.py compiles for a case; metadata is all that is looked at."""
    op, shape, dtype, params, tiling = CASES[case]
    x = torch.empty(shape, dtype=dtype, device="meta")
    if case == "channels-last":
        x = x.contiguous(memory_format=torch.channels_last)
    call = Call.of(CATALOGUE[op], [x], params, real=False)
    found = (tiling, "test") if tiling else None
    pool_plan.tuned = lambda op, g: found
    plan = pool_plan.plan_for(call)
    kernel = KERNELS[plan.tiling.variant]
    signature = {"x_ptr": POINTERS[dtype], "out_ptr": POINTERS[dtype]}
    constexprs = dict(plan.constexprs) | {"offset_ptr": None}
    if op.endswith("_indices"):
        signature["index_ptr"] = "*i64"
    else:
        constexprs["index_ptr"] = None
    for name, value in zip(kernel.arg_names[4:], plan.arguments, strict=False):
        if value is None:
            constexprs[name] = None
        elif isinstance(value, tuple):
            signature[name] = ["i32"] * len(value)
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return {
        "kernel": f"{kernel.__module__}:{kernel.__name__}",
        "signature": signature,
        "constexprs": constexprs,
        "options": {"num_warps": plan.tiling.num_warps},
    }


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("offline", OFFLINE)
    offline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(offline)
    print(json.dumps({case: offline.report(request(case)) for case in CASES}))
