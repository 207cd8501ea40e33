"""`batch_invariant` over row counts: the check catches what depends on them, our kernels do not.

On a GPU every op that promises it, for each count of GPU_COUNTS up to 4,096; on a CPU, in Triton's
interpreter, some ops for a few counts.
"""

from __future__ import annotations

from typing import Any

import opkiln
import pytest
import torch
from conformance.mutants import BACKEND, Mutant, as_tuple, sound
from opkiln.conformance import cases_of
from opkiln.conformance.row_counts import (
    CPU_COUNTS,
    GPU_COUNTS,
    INVARIANT,
    ROWS,
    grown,
    is_plain,
    row_count_checks,
    rows_of,
    some,
)
from opkiln.dispatch import refusal
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY, Launch
from opkiln.spec import Call

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
FORWARD = [name for name, spec in CATALOGUE.items() if spec.forward_op is None]
# Tiles of the channel norms follow the number of samples.
NOT_PROMISED = {"batch_norm", "group_norm", "instance_norm"}
PROMISED = [name for name in FORWARD if name not in NOT_PROMISED]
QUICK = (
    "rms_norm", "fused_add_layer_norm", "ada_layer_norm", "ada_layer_norm_zero", "conv1d",
    "max_pool2d", "avg_pool1d", "mean_pooling", "rope_neox", "rope_neox_position_ids", "mhc_post",
)  # fmt: skip
TRAITS = frozenset({"deterministic", "batch_invariant"})


def test_counts_are_the_powers_of_two_and_their_neighbours() -> None:
    wanted = {2**k + d for k in range(13) for d in (-1, 0, 1)}
    assert set(GPU_COUNTS) == {n for n in wanted if 1 <= n <= 4096}
    assert set(CPU_COUNTS) < set(GPU_COUNTS)


def test_which_ops_promise_it() -> None:
    """A promise lost here would leave opkiln.use(batch_invariant=True) without a kernel."""
    found = {n for n in FORWARD if "batch_invariant" in REGISTRY.of(n)["opkiln"].traits}
    assert found == set(PROMISED)


@pytest.mark.parametrize("op", PROMISED)
def test_who_promises_it_has_rows_to_show_it_on(op: str) -> None:
    cases = [c for c in cases_of(op) if op in ROWS and is_plain(c)]
    assert {c.dtype for c in cases} & {torch.float16, torch.float32, torch.complex64}
    assert all(name in CATALOGUE[op].tensor_names for name in ROWS[op])


def test_a_gpu_runs_every_row_and_every_dtype() -> None:
    cases = [c for c in cases_of("layer_norm") if is_plain(c)]
    chosen = some(cases)
    assert len(chosen) < len(cases)
    assert {c.row.label for c in chosen} == {c.row.label for c in cases}
    assert {c.dtype for c in chosen} == {c.dtype for c in cases}
    assert len({c.dtype for c in chosen if c.row.label != cases[0].row.label}) > 1
    assert some([]) == []


@pytest.mark.parametrize("op", PROMISED if CUDA else QUICK)
def test_our_rows_do_not_depend_on_their_number(op: str) -> None:
    outcomes = [task() for task in row_count_checks(op, "opkiln", DEVICE)]
    assert not [o for o in outcomes if o.status == "failed"]
    assert "passed" in [o.status for o in outcomes]


@pytest.mark.parametrize("op", QUICK)
def test_no_count_is_refused(op: str) -> None:
    """One implementation takes them all: another's bits would differ."""
    case = grown(next(c for c in cases_of(op) if is_plain(c) and c.dtype != torch.float64))
    spec, tensors, params = case.build(DEVICE)
    lead = dict(zip(spec.tensor_names, tensors, strict=True))[ROWS[op][0]].shape[0]
    for count in GPU_COUNTS:
        part = [x if x is None or x.shape[0] != lead else rows_of(x, count) for x in tensors]
        call = Call.of(spec, part, params, INVARIANT)
        assert refusal(REGISTRY.of(op)["opkiln"], call) is None


@pytest.mark.parametrize("rows", [1, 3, 4096])
def test_the_policy_leaves_who_keeps_both_promises(rows: int) -> None:
    x = torch.empty(rows, 64, device=DEVICE)
    with opkiln.use(deterministic=True, batch_invariant=True):
        found = opkiln.explain(opkiln.functional.rms_norm, x, (64,))
        assert found.chosen == "opkiln"
        left = {c.backend: c.reason for c in found.candidates if c.status == "refused"}
    assert left["torch"] == "does not promise batch_invariant, which the policy asks for"


def off_at(count: int) -> Mutant:
    """Other bits in the last row where the input has so many rows."""

    def prepare(call: Call) -> Launch:
        right = sound(call)

        def launch(*tensors: Any) -> Any:
            outs = as_tuple(right(*tensors))
            if tensors[0].shape[0] == count:
                outs[0][-1:] = torch.nextafter(outs[0][-1:], outs[0][-1:] + 1)
            return outs

        return launch

    return Mutant(f"off_at_{count}", "rms_norm", prepare, traits=TRAITS)


@pytest.mark.parametrize("count", CPU_COUNTS[:-1])
def test_a_count_with_other_bits_is_caught(count: int) -> None:
    with REGISTRY.temporarily(off_at(count), "test:off"):
        (task,) = row_count_checks("rms_norm", BACKEND, torch.device("cpu"))
        outcome = task()
    assert outcome.status == "failed"
    assert outcome.message.startswith(f"out of {count} rows has other bits than in 9 rows")
    assert outcome.features == ("row_counts",)


def test_a_sound_one_passes_and_one_without_the_promise_is_refused() -> None:
    sound_one = Mutant("sound", "rms_norm", sound, traits=TRAITS)
    silent = Mutant("silent", "rms_norm", sound)
    for mutant, status in ((sound_one, "passed"), (silent, "refused")):
        with REGISTRY.temporarily(mutant, "test:rows"):
            (task,) = row_count_checks("rms_norm", BACKEND, torch.device("cpu"))
            outcome = task()
        assert outcome.status == status, outcome.message
