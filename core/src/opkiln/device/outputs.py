"""How launches allocate their outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkiln.meta import TensorMeta

Fill = Callable[[], list[torch.Tensor]]


def allocator(device: torch.device, metas: tuple[TensorMeta, ...]) -> Fill:
    """A function that makes the tensors of `metas` on `device`; a GPU must be the current one.

    Inductor's own function where torch has it: 1.15 us on the host of an H200, empty_like 1.61.
    """
    wanted = [(m.shape, m.stride, m.dtype) for m in metas]
    fast: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
    if device.type == "cuda" and fast is not None:
        return lambda: [fast(*shape_stride_dtype) for shape_stride_dtype in wanted]
    empty = torch.empty_strided
    return lambda: [empty(s, t, dtype=d, device=device) for s, t, d in wanted]
