"""A script: compile the pools' backwards for sm_90 as a GPU would, and print a JSON report of each.

Run without TRITON_INTERPRET, which would make the kernels Python. A case's call is planned on meta
tensors, its launch is recorded, and what it would compile is compiled.
"""

import importlib
import importlib.util
import json
import pathlib
import sys
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool import backward_plan
from opkiln_pool.backward_plan import BackwardTiling

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from compiled import Launch, recorded, request

OFFLINE = pathlib.Path(__file__).parents[1] / "norm" / "offline.py"
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
STEM = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": False}
MAX = STEM | {"dilation": (1, 1)}
MEAN = STEM | {"count_include_pad": False, "divisor_override": None}
FIVE = {k: (5, 5) if k == "kernel_size" else v for k, v in MEAN.items()} | {"padding": (2, 2)}
CUBE = {k: (*v, v[0]) if isinstance(v, tuple) else v for k, v in MAX.items()}
PAIRS = {"kernel_size": (2, 2, 2), "stride": (2, 2, 2), "padding": (0, 0, 0),
         "dilation": (1, 1, 1), "ceil_mode": False}  # fmt: skip
LINE = {"kernel_size": (128,), "stride": (1,), "padding": (0,), "dilation": (1,)}
LINE |= {"ceil_mode": False}
THIRDS = LINE | {"kernel_size": (3,), "stride": (3,)}
ECG = {"kernel_size": (5,), "stride": (2,), "padding": (2,), "dilation": (2,), "ceil_mode": True}
Case = tuple[str, tuple[int, ...], torch.dtype, dict[str, Any], Any]

CASES: dict[str, Case] = {
    "stem-f16": ("max_pool2d", (8, 64, 112, 112), F16, MAX, None),
    "stem-bf16-static": ("max_pool2d", (8, 64, 112, 112), BF16, MAX,
                         BackwardTiling("cells", 128, 4, v=4, static=True)),
    "stem-f32": ("max_pool2d_indices", (8, 64, 112, 112), F32, MAX, None),
    "stem-odd": ("max_pool2d", (8, 64, 55, 55), F16, MAX, None),
    "mean-f16": ("avg_pool2d", (8, 64, 112, 112), F16, MEAN, None),
    "mean-5x5": ("avg_pool2d", (8, 64, 56, 56), F16, FIVE, None),
    "volume-f16": ("max_pool3d", (2, 64, 16, 56, 56), F16, PAIRS, None),
    "volume-bf16-overlap": ("max_pool3d", (2, 64, 32, 112, 112), BF16, CUBE, None),
    "line-thirds": ("max_pool1d", (8, 80, 4096), F16, THIRDS,
                    BackwardTiling("cells", 128, 4, v=8)),
    "line-dilated": ("max_pool1d", (8, 128, 2048), BF16, ECG, None),
    "line-whole": ("max_pool1d", (8, 256, 128), F16, LINE, None),
    "channels-last": ("max_pool2d", (8, 64, 112, 112), F16, MAX, None),
    "channels-last-mean": ("avg_pool2d", (8, 64, 112, 112), F16, MEAN, None),
    "global-odd": ("adaptive_max_pool2d", (8, 64, 7, 7), F16, {"output_size": (1, 1)}, None),
    "spp": ("adaptive_max_pool2d", (8, 64, 56, 56), F16, {"output_size": (6, 6)}, None),
    "spp-gathered": ("adaptive_max_pool2d", (8, 64, 56, 56), F16, {"output_size": (6, 6)},
                     BackwardTiling("gather", 128, 4, static=True)),
    "nondiv-odd": ("adaptive_avg_pool2d", (8, 64, 55, 57), BF16, {"output_size": (7, 7)}, None),
    "tokens": ("mean_pooling", (2, 2048, 64, 128), F16, {"chunk_size": 64, "num_chunks": None},
               None),
    "tokens-sequences": ("mean_pooling", (1, 2048, 64, 128), F16,
                         {"chunk_size": 64, "num_chunks": 40}, None),
}  # fmt: skip


def call_of(name: str) -> tuple[Call, list[torch.Tensor | None]]:
    """The backward's call, and its tensors without data."""
    op, shape, dtype, params, _ = CASES[name]
    x = torch.empty(shape, dtype=dtype, device="meta")
    if name.startswith("channels-last"):
        x = x.contiguous(memory_format=torch.channels_last)
    given = [x]
    if op == "mean_pooling":
        sequences = torch.empty(5, dtype=torch.int32, device="meta")
        given.append(sequences if name.endswith("sequences") else None)
    forward = Call.of(CATALOGUE[op], given, params, needs_grad=True, real=False)
    outs = [m.empty() for m in forward.outputs]
    kept = [given[1]] if op == "mean_pooling" else outs[-1:] if "max" in op else []
    tensors = [outs[0], *kept]
    rest = {"input_shape": shape, "output_mask": (True,)}
    return Call.of(CATALOGUE[f"{op}_backward"], tensors, params | rest, real=False), tensors


def launch_of(name: str) -> Launch:
    call, tensors = call_of(name)
    part = "mean_backward" if name.startswith("tokens") else "pool_backward"
    module: Any = importlib.import_module(f"opkiln_pool.{part}")
    backward_plan.tuned = lambda op, b: None  # the rule's tilings, whatever the table says
    (launch,) = recorded(module, lambda: module.prepare(call, CASES[name][-1])(*tensors))
    return launch


def main() -> None:
    spec = importlib.util.spec_from_file_location("offline", OFFLINE)
    offline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(offline)
    wanted = sys.argv[1:] or CASES
    print(json.dumps({name: offline.report(request(*launch_of(name))) for name in wanted}))


if __name__ == "__main__":
    main()
