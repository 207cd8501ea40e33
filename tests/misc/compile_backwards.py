"""A script: compile the Triton backwards for sm_90 as a GPU would, and print a JSON report of each.

Run without TRITON_INTERPRET, which would make the kernels Python. A case's call is planned on meta
tensors, its launches are recorded, and what they would compile is compiled.
"""

import importlib
import importlib.util
import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from opkiln.ops import CATALOGUE
from opkiln.spec import Call

OFFLINE = pathlib.Path(__file__).parents[1] / "norm" / "offline.py"
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
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


def recorded(case: Case) -> list[tuple[Any, dict[str, Any], tuple[Any, ...]]]:
    """Kernel, options and arguments of each launch."""
    op, tensors, params = case
    module = importlib.import_module(f"opkiln_misc.{op}")
    found: list[Any] = []

    def launcher(
        kernel: Any, grid: Any, options: dict[str, Any], fixed: tuple[Any, ...] = ()
    ) -> Callable[..., None]:
        return lambda *args: found.append((kernel, options, (*args, *fixed)))

    module.launcher = launcher
    module.prepare(Call.of(CATALOGUE[op], tensors, params, real=False))(*tensors)
    return found


def request(kernel: Any, options: dict[str, Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """What offline.py compiles. Integers that Triton would take as multiples of 16 are compiled in:
    so are vectors of that length allowed.
    """
    signature, constexprs = {}, {}
    for param, value in zip(kernel.params, args, strict=True):
        if isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        elif (
            value is None or param.is_constexpr or isinstance(value, bool)
            or (not param.do_not_specialize and (value == 1 or value % 16 == 0))
        ):  # fmt: skip
            constexprs[param.name] = value
        else:
            signature[param.name] = "i32"
    name = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
    return dict(kernel=name, signature=signature, constexprs=constexprs, options=options)


def main() -> None:
    spec = importlib.util.spec_from_file_location("offline", OFFLINE)
    offline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(offline)
    reports = {}
    for name, case in CASES.items():
        for kernel, options, args in recorded(case):
            report = offline.report(request(kernel, options, args))
            reports[f"{name} {kernel.fn.__name__}"] = report
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
