"""Pooling modules: a function, and the attributes of torch's module that are its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opkiln import functional as F
from opkiln.nn.served import Served

AVG1 = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
AVG = (*AVG1, "divisor_override")
MAX = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


def serving(fn: Callable[..., Any], attributes: tuple[str, ...]) -> Callable[..., Any]:
    """`serve` of a pool (see Served)."""

    def serve(self: Any, input: Any, *, backend: str | None = None) -> Any:
        return fn(input, *[getattr(self, name) for name in attributes], backend=backend)

    return serve


class AvgPool1d(Served, torch.nn.AvgPool1d):
    op, serve = "avg_pool1d", serving(F.avg_pool1d, AVG1)


class AvgPool2d(Served, torch.nn.AvgPool2d):
    op, serve = "avg_pool2d", serving(F.avg_pool2d, AVG)


class AvgPool3d(Served, torch.nn.AvgPool3d):
    op, serve = "avg_pool3d", serving(F.avg_pool3d, AVG)


class MaxPool1d(Served, torch.nn.MaxPool1d):
    op, serve = "max_pool1d", serving(F.max_pool1d, MAX)


class MaxPool2d(Served, torch.nn.MaxPool2d):
    op, serve = "max_pool2d", serving(F.max_pool2d, MAX)


class MaxPool3d(Served, torch.nn.MaxPool3d):
    op, serve = "max_pool3d", serving(F.max_pool3d, MAX)


class AdaptiveAvgPool2d(Served, torch.nn.AdaptiveAvgPool2d):
    op, serve = "adaptive_avg_pool2d", serving(F.adaptive_avg_pool2d, ("output_size",))


class AdaptiveMaxPool2d(Served, torch.nn.AdaptiveMaxPool2d):
    op = "adaptive_max_pool2d"
    serve = serving(F.adaptive_max_pool2d, ("output_size", "return_indices"))
