"""The measured table of tilings: the rows of the pages find it, other calls follow the rule."""

import pathlib
from typing import Any

import pytest
import torch
import yaml
from opkiln.ops import CATALOGUE
from opkiln.spec import Call
from opkiln_pool import pool_backward, pool_plan
from opkiln_pool.backward_plan import BackwardTiling
from opkiln_pool.mean_plan import MeanTiling
from opkiln_pool.plugin import POOLS
from opkiln_pool.pool_plan import PoolPlan, Tiling, plan_for
from opkiln_pool.variants import KERNELS

ROWS = pathlib.Path(__file__).parents[2] / "bench/src/opkiln_bench/conf/rows"
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
Page = tuple[str, str, str, tuple[int, ...], dict[str, Any]]


def pages() -> dict[str, Page]:
    """(op, label, dtype, shape, canonical parameters) of every pool on the benchmark pages."""
    found = {}
    for op in POOLS:
        for row in yaml.safe_load((ROWS / f"{op}.yaml").read_text("utf-8"))["rows"]:
            args = {k: v for k, v in row["args"].items() if k != "return_indices"}
            params = {k: tuple(v) if isinstance(v, list) else v for k, v in args.items()}
            if op.startswith("avg") and "1d" not in op:
                params.setdefault("divisor_override", None)
            for dtype in row["dtypes"]:
                shape = tuple(row["tensors"]["input"])
                found[f"{op}-{row['label']}-{dtype}"] = op, row["label"], dtype, shape, params
    return found


PAGES = pages()
per_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)


def plan_of(op: str, x: torch.Tensor, params: dict[str, Any]) -> PoolPlan:
    return plan_for(Call.of(CATALOGUE[op], [x], params, real=False))


def empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


@per_page
def test_page_row_finds_a_tiling_measured_in_its_dtype(page):
    op, label, dtype, shape, params = page
    plan = plan_of(op, empty(dtype, *shape), params)
    assert plan.source == label
    key = pool_plan.key_of(op, pool_plan.geometry_of(
        Call.of(CATALOGUE[op], [empty(dtype, *shape)], params, real=False)))  # fmt: skip
    (row,) = [r for r in pool_plan.tuning_rows() if key.items() <= r.items()]
    assert plan.tiling == Tiling(**row["use"])
    assert row["measured"]["us"][dtype] > 0


@per_page
def test_one_binary_for_all_numbers_of_planes(page):
    """What Triton compiles for holds neither batch nor channels; the count is an argument."""
    op, _, dtype, (_, _, *plane), params = page
    plans = [
        plan_of(op, empty(dtype, *lead, *plane), params)
        for lead in ((1, 1), (1, 7), (6, 1), (5, 16), (3,))
    ]
    names = KERNELS[plans[0].tiling.variant].arg_names[4:]
    for plan in plans:
        assert (plan.source, plan.constexprs) == (plans[0].source, plans[0].constexprs)
        pairs = zip(names, plan.arguments, plans[0].arguments, strict=False)
        assert {name for name, a, b in pairs if a != b} <= {"items", "planes"}


@per_page
def test_other_calls_follow_the_rule(page):
    op, _, dtype, (_, _, *plane), params = page
    others = {
        "plane": empty(dtype, 2, 3, *plane[:-1], plane[-1] + 2),
        "channel-slice": empty(dtype, 2, 6, *plane)[:, ::2],
        "row-slice": empty(dtype, 2, 3, *plane[:-1], plane[-1] + 8)[..., : plane[-1]],
        "columns-apart": empty(dtype, 2, 3, *plane[:-1], plane[-1] * 2)[..., ::2],
    }
    if len(plane) > 1:
        last = {2: torch.channels_last, 3: torch.channels_last_3d}[len(plane)]
        others["channels-last"] = empty(dtype, 2, 3, *plane).contiguous(memory_format=last)
    for name, x in others.items():
        assert (name, plan_of(op, x, params).source) == (name, "rule")


def test_table_is_valid():
    """Every row can be launched, and none is found twice."""
    keys = []
    for row in pool_plan.tuning_rows():
        keys.append({k: v for k, v in row.items() if k not in ("label", "use", "measured")})
        assert keys.count(keys[-1]) == 1
        if row["op"] == "mean_pooling":
            tiling = MeanTiling(**row["use"])
            assert tiling.block_n % (32 * tiling.num_warps) == 0
            continue
        if row["op"].endswith("_backward"):
            gradient = BackwardTiling(**row["use"])
            assert row["op"].removesuffix("_backward") in POOLS
            assert gradient.variant in pool_backward.KERNELS
            continue
        tiling = Tiling(**row["use"])
        assert row["op"] in POOLS
        assert tiling.variant in KERNELS
        assert tiling.variant != "strip" or tiling.block == 1
        assert tiling.static is False or tiling.variant in ("patch", "taps")


def test_rule_takes_small_planes_of_16_bits_in_steps():
    """What the probe measured on an H200; averages and f32 are as before."""
    pool = {"output_size": (1, 1)}
    found = {
        (op, dtype, n): plan_of(op, empty(dtype, 2, 3, n, n), pool).tiling
        for op in ("adaptive_max_pool2d", "adaptive_avg_pool2d")
        for dtype in ("f16", "f32")
        for n in (1, 6, 9, 40)
    }
    assert {k for k, t in found.items() if t.step} == {("adaptive_max_pool2d", "f16", 6)}
    tiles = {
        (op, dtype, n): plan_of(op, empty(dtype, 2, 3, n, n), {"output_size": (5, 5)}).tiling
        for op in ("adaptive_max_pool2d_indices", "adaptive_avg_pool2d")
        for dtype in ("bf16", "f32")
        for n in (32, 128)
    }
    assert {t.variant for t in tiles.values()} == {"strip"}
    assert {k[:2] for k, t in tiles.items() if t.step == 1} == {
        ("adaptive_max_pool2d_indices", "bf16")
    }
    assert {(k[1], k[2]) for k, t in tiles.items() if t.num_warps == 1} == {("bf16", 32)}
