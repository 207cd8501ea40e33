"""A script: compile convolution kernels for sm_90 as a GPU would; print a JSON report for each.

Run without TRITON_INTERPRET, which would make the kernels Python.
"""

import importlib.util
import json
import pathlib
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_conv import conv_plan
from opkiln_conv.launch import KERNELS, PACK_OPTIONS, options_of
from opkiln_conv.packed import pack_kernel
from opkiln_conv.tilings import Tiling

OFFLINE = pathlib.Path(__file__).parents[1] / "norm" / "offline.py"
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
Case = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int, int, Tiling | None]

CASES: dict[str, Case] = {  # input, weight, dtype, padding, groups, tiling (None: the rule's)
    "packed": ((1, 256, 112, 112), (512, 256, 3, 3), F16, 1, 1, None),
    "packed-bf16-static": ((1, 32, 32, 64, 64), (64, 32, 3, 3, 3), BF16, 1, 1,
                           Tiling("packed", 64, 256, 32, stages=4, static=True)),
    "packed-split-static": ((1, 128, 28, 28), (128, 128, 3, 3), F16, 1, 1,
                            Tiling("packed", 128, 64, 64, stages=4, split=4, static=True)),
    "pack": ((1, 256, 112, 112), (512, 256, 3, 3), F16, 1, 1, None),
    "pointwise": ((2, 512, 28, 28), (128, 512, 1, 1), F16, 0, 1, None),
    "pointwise-static": ((2, 512, 28, 28), (128, 512, 1, 1), F16, 0, 1,
                         Tiling("pointwise", 64, 64, 64, split=2, static=True)),
    "gather-static": ((2, 64, 56, 56), (64, 64, 3, 3), F16, 1, 1,
                      Tiling("gather", 64, 64, 32, static=True, ahead=True)),
    "gather-one-step": ((1, 128, 28, 28), (256, 4, 3, 3), F16, 1, 32,
                        Tiling("gather", 16, 64, 64, stages=2, static=True)),
    "gather-few-channels": ((1, 3, 112, 112), (64, 3, 3, 3), BF16, 1, 1, None),
    "gather-few-of-groups": ((1, 128, 28, 28), (256, 4, 3, 3), F16, 1, 32, None),
    "gather-f32": ((1, 16, 56, 56), (32, 16, 3, 3), F32, 1, 1, None),
    "channelwise": ((1, 32, 56, 56), (32, 1, 3, 3), F16, 1, 32, None),
}  # fmt: skip


def request(case: str) -> dict[str, Any]:
    """What offline.py compiles for a case; metadata is all that is looked at."""
    shape, weight, dtype, padding, groups, tiling = CASES[case]
    n = len(shape) - 2
    params = {"stride": (1,) * n, "padding": (padding,) * 2 * n, "dilation": (1,) * n}
    params |= {"groups": groups, "allow_tf32": False}
    tensors = [torch.empty(s, dtype=dtype, device="meta") for s in (shape, weight)]
    call = Call.of(CATALOGUE[f"conv{n}d"], [*tensors, None], params, real=False)
    found = (tiling, "test") if tiling else None
    conv_plan.tuned = lambda *_: found
    plan = conv_plan.plan_for(call)
    kernel, options = KERNELS[plan.tiling.variant], options_of(plan)
    arguments, constexprs = plan.arguments, dict(plan.constexprs)
    if case == "pack":
        kernel, options = pack_kernel, PACK_OPTIONS
        arguments, constexprs = plan.pack.arguments, dict(plan.pack.constexprs)
    pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
    signature = dict.fromkeys(pointers, POINTERS[dtype])
    signature |= {"ws_ptr": "*fp32", "counters_ptr": "*i32"} if "ws_ptr" in pointers else {}
    absent = {"bias_ptr"} | ({"ws_ptr", "counters_ptr"} if plan.tiling.split == 1 else set())
    for name in absent & set(pointers):
        constexprs[name] = None
        del signature[name]
    for name, value in zip(kernel.arg_names[len(pointers) :], arguments, strict=False):
        if value == 1:
            constexprs[name] = 1
        else:
            signature[name] = ["i32"] * len(value) if isinstance(value, tuple) else "i32"
    return {
        "kernel": f"{kernel.__module__}:{kernel.__name__}",
        "signature": signature,
        "constexprs": constexprs,
        "options": options,
    }


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("offline", OFFLINE)
    offline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(offline)
    print(json.dumps({case: offline.report(request(case)) for case in CASES}))
