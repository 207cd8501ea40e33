"""Tilings: the trial, the user's table, and what the families offer, right in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import opkiln
import pytest
import torch
from opkiln import own_table, tilings
from opkiln.conformance.compare import compare
from opkiln.dispatch import plan
from opkiln.measured import bucket_of
from opkiln.policy import DEFAULT, Policy
from opkiln.registry import REGISTRY
from opkiln.road import Bound
from opkiln.spec import Call
from opkiln_bench.contestants import canonical
from opkiln_norm import row_cluster, row_plan, row_search
from opkiln_pool import pool_plan

HALF = torch.float16


def of_call(function: str, **arguments: Any) -> Bound:
    torch.manual_seed(0)
    made = {
        name: torch.randn(value[:-1], dtype=value[-1])
        if isinstance(value, tuple) and isinstance(value[-1], torch.dtype)
        else value
        for name, value in arguments.items()
    }
    return canonical(function, made)


CALLS = {
    "few": ("rms_norm", {"input": (3, 2048, HALF), "normalized_shape": [2048]}),
    "many": ("layer_norm", {"input": (130, 96, torch.float32), "normalized_shape": [96]}),
    "long": ("rms_norm", {"input": (2, 70000, HALF), "normalized_shape": [70000]}),
    "ada": ("ada_layer_norm", dict.fromkeys(("input", "scale", "shift"), (8, 264, HALF))),
    "patch": ("max_pool2d", {"input": (2, 3, 20, 24, HALF), "kernel_size": 3, "stride": 2}),
    "pairs": (
        "max_pool2d",
        {"input": (2, 3, 20, 24, HALF), "kernel_size": 3, "stride": 2, "return_indices": True},
    ),
    "taps": ("avg_pool2d", {"input": (2, 3, 20, 23, HALF), "kernel_size": 3}),
    "plane": ("adaptive_avg_pool2d", {"input": (2, 8, 7, 7, HALF), "output_size": 1}),
    "strip": ("adaptive_max_pool2d", {"input": (2, 4, 15, 13, HALF), "output_size": 6}),
    "max plane": ("max_pool1d", {"input": (2, 4, 128, HALF), "kernel_size": 128}),
    "mean": ("mean_pooling", {"input": (1, 50, 4, 16, HALF), "chunk_size": 8}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_candidate_is_right(name: str) -> None:
    function, arguments = CALLS[name]
    bound = of_call(function, **arguments)
    call = Call.of(*bound)
    implementation = REGISTRY.of(bound.spec.name)["opkiln"]
    assert implementation.tilings is not None
    offered = [dict(tiling) for tiling in implementation.tilings(call)]
    assert len(offered) >= 4 and len({str(t) for t in offered}) == len(offered)
    wide = [t if t is None else t.double() for t in bound.tensors]
    expected = bound.spec.reference(*wide, **bound.params)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for tiling in offered:
        with tilings.trial(tiling):
            launch = plan(*bound, DEFAULT.only("opkiln")).launch
            assert implementation.tilings(call)[0] == tiling  # it is the one in use
        outs = launch(*bound.tensors)
        for out, want in zip(outs if isinstance(outs, tuple) else (outs,), expected, strict=False):
            terms = bound.spec.reduction(call)
            found = compare("out", out, want, terms, exact="max" in function, backend="opkiln")
            assert found.ok, (tiling, found.message)


def test_the_first_is_what_is_used_without_a_trial() -> None:
    bound = of_call("max_pool2d", **CALLS["patch"][1])
    call = Call.of(*bound)
    first = REGISTRY.of("max_pool2d")["opkiln"].tilings(call)[0]  # type: ignore[misc]
    assert first == tilings.stated("pool", pool_plan.plan_for(call).tiling)


def test_a_trial_ends_with_its_block() -> None:
    call = Call.of(*of_call("rms_norm", **CALLS["few"][1]))
    with tilings.trial({"kernel": "a"}):
        with tilings.trial({"kernel": "b"}):
            assert tilings.of(call) == {"kernel": "b"}
        assert tilings.of(call) == {"kernel": "a"}
    assert tilings.of(call) is None


def test_what_is_for_another_kernel_or_cannot_be_read_is_not_taken() -> None:
    call = Call.of(*of_call("rms_norm", **CALLS["few"][1]))
    usual = row_plan.plan_for(call)
    for tiling in ({"kernel": "pool", "block_n": 64}, {"kernel": "row_norm", "blocks": 2}):
        with tilings.trial(tiling):
            assert row_plan.plan_for(call) == usual


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Call, Any], None]:
    """States a tiling for a call in the user's table."""

    def state(call: Call, tiling: Any) -> None:
        bucket = bucket_of(call)
        entry = {"op": bucket.op, "kind": bucket.kind, "sizes": list(bucket.sizes)}
        document = {"tilings": [entry | {"tiling": tiling}]}
        monkeypatch.setattr(own_table, "document", lambda arch: document)
        tilings.tuned.cache_clear()

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tilings, "arch_of", lambda device: "sm90")
    return state


def test_the_users_table_serves_exactly_its_calls(table: Callable[..., None]) -> None:
    bound = of_call("rms_norm", **CALLS["few"][1])
    call = Call.of(*bound)
    usual = row_plan.plan_for(call).tiling
    mine = row_plan.Tiling(usual.block_n, usual.num_warps // 2)
    table(call, tilings.stated("row_norm", mine))
    found = row_plan.plan_for(call)
    assert (found.tiling, found.source) == (mine, "your table")
    other = Call.of(*of_call("rms_norm", input=(4, 2048, HALF), normalized_shape=[2048]))
    assert row_plan.plan_for(other).source != "your table"
    invariant = Call.of(*bound, Policy(batch_invariant=True))
    assert row_plan.plan_for(invariant).source != "your table"


def test_the_cuda_kernel_is_left_for_a_triton_tiling_and_taken_for_its_own() -> None:
    """Where cuda-core is not installed the plan says what would be."""
    call = Call.of(*of_call("rms_norm", input=(4, 8192, HALF), normalized_shape=[8192]))
    own = row_cluster.ClusterTiling(2, 256, 2, weight_at=1)
    with tilings.trial(tilings.stated("row_cluster", own)):
        found = row_cluster.plan_for(call)
        assert found is not None and (found.tiling, found.source) == (own, "your table")
    with tilings.trial(tilings.stated("row_norm", row_plan.Tiling(8192, 8))):
        assert row_cluster.plan_for(call) is None
    with tilings.trial(tilings.stated("row_cluster", row_cluster.ClusterTiling(1, 64, 1))):
        assert row_cluster.plan_for(call) is None  # too short for the row: Triton serves


def test_designs_of_the_cuda_kernel_cover_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_search, "has_cuda", lambda call: True)
    for rows, n in ((1, 4096), (2048, 8192), (2048, 16384)):
        x = torch.empty(rows, n, dtype=HALF, device="meta")
        bound = canonical("rms_norm", {"input": x, "normalized_shape": [n]})
        call = Call.of(*bound, real=False)
        kinds = {t["kernel"] for t in row_search.candidates(call)}
        assert kinds == {"row_norm", "row_cluster"}
        for tiling in row_search.candidates(call):
            if tiling["kernel"] == "row_cluster":
                vectors = tiling["cluster"] * tiling["threads"] * tiling["vectors"]
                assert vectors * 8 >= n and 32 <= tiling["threads"] <= 1024


def test_a_family_without_candidates_says_none() -> None:
    assert REGISTRY.of("fft")["opkiln"].tilings is None
    assert opkiln.Implementation.__dataclass_fields__["tilings"].default is None
