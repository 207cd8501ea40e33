"""The check before timing: wrong results are caught, right ones pass, slices equal the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from opkiln_bench import check
from opkiln_bench.catalogue import Row, load_rows, parse_rows
from opkiln_bench.contestants import Subject, bring, enter

CPU = torch.device("cpu")
ROWS = {r.key: r for r in load_rows(["opkiln_bench.conf"])}
RMS = ROWS["RMSNormFwd", "llama-8b-decode", "bf16"]
BATCH = ROWS["BatchNormFwd", "resnet50-fc", "f16"]
POOL = ROWS["MaxPool1dIndicesFwd", "ecg-cnn-dilated", "bf16"]

Spoil = Callable[[torch.Tensor], torch.Tensor]


def verdict_of(
    row: Row, spoil: Spoil = lambda t: t, which: int = 0, backend: str = "torch"
) -> check.Verdict:
    """What the check says of torch's result after `spoil`, under the name of `backend`."""
    subject = bring(row, CPU)
    _, outputs = enter(subject, "torch")
    outputs[which] = spoil(outputs[which])
    return check.against_reference(subject, {backend: outputs})[backend]


@pytest.mark.parametrize("row", [RMS, BATCH, POOL], ids=["rms", "batch", "pool-indices"])
def test_right_results_pass(row: Row) -> None:
    found = verdict_of(row)
    assert found.ok, found.reason


def one_nan(t: torch.Tensor) -> torch.Tensor:
    t.view(-1)[5] = float("nan")
    return t


def dropped_tail(t: torch.Tensor) -> torch.Tensor:
    t.view(-1)[-8:] = 0
    return t


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t * 1.05, "times the tolerance"),
        (one_nan, "out[0, 5] is nan"),
        (dropped_tail, "8 of 4096 elements wrong"),
        (lambda t: t[:, :-1].contiguous(), "shapes and dtypes"),
        (lambda t: t.float(), "shapes and dtypes"),
    ],
    ids=["scaled", "unwritten", "tail", "shape", "dtype"],
)
def test_wrong_results_are_caught(spoil: Spoil, reason: str) -> None:
    found = verdict_of(RMS, spoil)
    assert not found.ok
    assert reason in found.reason


def one_unit_more(t: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(t, torch.full_like(t, float("inf")))


def test_a_peer_may_round_twice_and_ours_may_not() -> None:
    peer, ours = (verdict_of(RMS, one_unit_more, backend=b) for b in ("quack", "opkiln"))
    assert peer.ok and 1.0 < peer.ratio < 4.0
    assert not ours.ok


def test_running_statistics_are_checked() -> None:
    found = verdict_of(BATCH, lambda t: t + 0.01, which=2)  # outputs, then running_mean and _var
    assert not found.ok


def test_an_index_off_by_one_is_caught() -> None:
    found = verdict_of(POOL, lambda t: t + (torch.arange(t.shape[-1]) == 3), which=1)
    assert not found.ok
    assert "elements wrong" in found.reason


def test_inputs_of_a_mutating_call_stay_for_the_next_backend() -> None:
    subject = bring(BATCH, CPU)
    before = [None if t is None else t.clone() for t in subject.tensors]
    enter(subject, "torch")
    for old, new in zip(before, subject.tensors, strict=True):
        assert old is None or torch.equal(old, new)


def test_slices_see_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["RMSNormFwd", "llama-8b-prefill", "bf16"]
    subject = bring(row, CPU)
    subject = Subject(
        row, subject.spec, [subject.tensors[0][:37], subject.tensors[1]], subject.params
    )
    monkeypatch.setattr(check, "SLICE_ELEMENTS", 4096 * 5)
    assert [(c.start, c.length) for c in check.slices(subject)][-1] == (35, 2)
    _, (right,) = enter(subject, "torch")
    wrong = right.clone()
    wrong[36, 4095] += 1
    found = check.against_reference(subject, {"right": [right], "wrong": [wrong]})
    assert found["right"].ok, found["right"].reason
    assert not found["wrong"].ok


def test_the_same_row_has_the_same_values() -> None:
    first, second = bring(RMS, CPU), bring(RMS, CPU)
    assert torch.equal(first.tensors[0], second.tensors[0])
    assert not torch.equal(first.tensors[0][0, :8], first.tensors[1][:8])


def small_topk() -> Row:
    (row,) = parse_rows(
        {
            "op": "TopkSelectorFwd",
            "name": "topk_selector",
            "function": "topk_selector",
            "family": "top-k",
            "rows": [
                {
                    "label": "small",
                    "dtypes": ["f32"],
                    "tensors": {
                        "scores": [1, 37, 64, 1],
                        "starts": [1, 37, "i32"],
                        "ends": [1, 37, "i32"],
                    },
                    "fill": {"starts": 3, "ends": 60},
                    "args": {"topk": 8},
                }
            ],
        },
        "test",
    )
    return row


def test_a_set_may_come_in_any_order_in_every_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SLICE_ELEMENTS", 64 * 5)
    assert len(list(check.slices(bring(small_topk(), CPU)))) == 8
    assert verdict_of(small_topk(), lambda t: t.flip(-1)).ok

    def last_row_wrong(t: torch.Tensor) -> torch.Tensor:
        t[0, 36, 0, 0] = 2
        return t

    assert not verdict_of(small_topk(), last_row_wrong).ok


@pytest.mark.parametrize("backend", ["quack", "opkiln"])
def test_ties_at_the_threshold(backend: str) -> None:
    """Position 20 scores as the last chosen one: a peer may take it, ours takes the lowest."""
    subject = bring(small_topk(), CPU)
    scores = subject.tensors[0]
    assert scores is not None
    scores.zero_()[0, :, 10:17] = 1.0  # seven of eight; the eighth is any of the zeros
    _, (out,) = enter(subject, "torch")
    assert 3 in out[0, 5]

    def judged(spoil: Spoil) -> bool:
        return check.against_reference(subject, {backend: [spoil(out.clone())]})[backend].ok

    assert judged(lambda t: t)
    assert judged(lambda t: t.where(t != 3, 20)) == (backend != "opkiln")
    assert not judged(lambda t: t.where(t != 3, 10))  # a position twice
    assert not judged(lambda t: t.where(t != 12, 20))  # a lower score
