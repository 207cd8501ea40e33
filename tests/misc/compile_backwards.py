"""A script: compile the Triton backwards for sm_90 as a GPU would, and print a JSON report of each.

Run without TRITON_INTERPRET, which would make the kernels Python. A case's call is planned on meta
tensors, its launches are recorded, and what they would compile is compiled.
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

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from compiled import Launch, recorded, request

OFFLINE = pathlib.Path(__file__).parents[1] / "norm" / "offline.py"
BF16, F32 = torch.bfloat16, torch.float32
Case = tuple[str, list[torch.Tensor], dict[str, Any]]


def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def post(batch: int, streams: int, columns: int, dtype: torch.dtype = BF16) -> Case:
    tensors = [
        meta(batch, streams * columns, dtype=dtype),
        meta(batch, columns, dtype=dtype),
        meta(batch, streams),
    ]
    params = dict(x_res_shape=(batch, streams * columns), output_mask=(True,) * 3)
    return "mhc_post_backward", tensors, params


def pre(batch: int, streams: int, columns: int, dtype: torch.dtype = BF16, repeat: int = 1) -> Case:
    width, m = streams * columns, streams * (streams + 2)
    tensors = [
        meta(batch, width, dtype=dtype), meta(batch, columns, dtype=dtype), meta(0),
        meta(width, m), meta(batch, width, dtype=dtype), meta(m),
    ]  # fmt: skip
    params = dict(
        alpha_pre=0.01, alpha_post=0.01, alpha_res=0.01, sinkhorn_repeat=repeat,
        sinkhorn_eps=0.02, return_h_post=False, output_mask=(True,) * 3,
    )  # fmt: skip
    return "mhc_pre_backward", tensors, params


CASES = {
    "pre-few-f32": pre(8, 4, 2560, F32),
    "pre-rows": pre(8192, 4, 2560, repeat=20),
    "pre-rows-f32": pre(8192, 4, 2560, F32),
    "pre-8-streams-f32": pre(256, 8, 1024, F32),
    "post-large": post(4, 4, 2560),
    "post-rows": post(8192, 4, 2560),
    "post-rows-f32": post(8192, 4, 2560, F32),
    "post-8-streams": post(8192, 8, 2048),
}


def launches_of(case: Case) -> list[Launch]:
    op, tensors, params = case
    module: Any = importlib.import_module(f"opkiln_misc.{op}")
    call = Call.of(CATALOGUE[op], tensors, params, real=False)
    return recorded(module, lambda: module.prepare(call)(*tensors))


def main() -> None:
    spec = importlib.util.spec_from_file_location("offline", OFFLINE)
    offline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(offline)
    reports = {}
    for name, case in CASES.items():
        for launch in launches_of(case):
            reports[f"{name} {launch[0].fn.__name__}"] = offline.report(request(*launch))
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
