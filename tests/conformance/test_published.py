"""Geometries of the published workloads, which a GPU's conformance run adds to the other cases."""

from typing import Any

import pytest
import torch
from opkiln.conformance import cases_of, check, cuda_checks
from opkiln.conformance.rows.published import PUBLISHED
from opkiln.ops import CATALOGUE
from opkiln_bench.catalogue import load_rows

WINDOW = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "ceil_mode": False}


def test_ids_are_those_of_no_other_case() -> None:
    for op in CATALOGUE:
        ids = [c.id for c in cuda_checks.published_cases(op)]
        others = {c.id for c in [*cases_of(op), *cuda_checks.many_cases(op)]}
        assert len(set(ids)) == len(ids) and not others & set(ids)


def geometry(shapes: dict[str, Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Sizes, weight and window; the batch and a pool's channels do not count."""
    rank = len(shapes["input"]) - 2
    given = WINDOW | {"stride": options.get("kernel_size", 1)} | options
    window = {n: v for n in (*WINDOW, "kernel_size") if (v := given.get(n)) is not None}
    per_dim = {
        n: (v,) * rank if isinstance(v, int) and n not in ("groups", "ceil_mode") else v
        for n, v in window.items()
    }
    told = sorted((n, tuple(v) if isinstance(v, list) else v) for n, v in per_dim.items())
    return (*shapes["input"][2:], tuple(shapes.get("weight", ())), *told)


@pytest.mark.parametrize("op", [op for op in PUBLISHED if "conv" in op or "pool" in op])
def test_every_published_window_is_there(op: str) -> None:
    wanted = {
        geometry({n: tuple(t.shape) for n, t in r.tensors.items()}, dict(r.args))
        for r in load_rows()
        if r.name == op
    }
    there = {
        geometry(
            {n: x.shape for n, x in r.arguments.items() if hasattr(x, "shape")},
            {n: x for n, x in r.arguments.items() if not hasattr(x, "shape")},
        )
        for r in PUBLISHED[op]
    }
    assert wanted and wanted <= there


@pytest.mark.parametrize("op", ["rms_norm", "batch_norm", "max_pool1d_indices", "conv1d"])
def test_the_reference_takes_them(op: str) -> None:
    """Meant for a GPU: the first alone here."""
    case = next(cuda_checks.published_cases(op))
    assert check(case, "torch-ref", torch.device("cpu")).status == "passed"
