"""Convolution modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkiln import functional as F
from opkiln.nn.served import Served


def conv(fn: Callable[..., Any], module: Any, input: Any, backend: str | None) -> Any:
    """A padding_mode other than zeros pads first, as torch does."""
    padding = module.padding
    if module.padding_mode != "zeros":
        pads = module._reversed_padding_repeated_twice
        input = torch.nn.functional.pad(input, pads, mode=module.padding_mode)
        padding = 0
    rest = (module.stride, padding, module.dilation, module.groups)
    return fn(input, module.weight, module.bias, *rest, backend=backend)


class Conv1d(Served, torch.nn.Conv1d):
    op = "conv1d"

    def serve(self, input: Any, *, backend: str | None = None) -> Any:
        return conv(F.conv1d, self, input, backend)


class Conv2d(Served, torch.nn.Conv2d):
    op = "conv2d"

    def serve(self, input: Any, *, backend: str | None = None) -> Any:
        return conv(F.conv2d, self, input, backend)


class Conv3d(Served, torch.nn.Conv3d):
    op = "conv3d"

    def serve(self, input: Any, *, backend: str | None = None) -> Any:
        return conv(F.conv3d, self, input, backend)
