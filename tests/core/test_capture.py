"""opkiln.capture: which calls of a step it records, on every road, and what it costs afterwards."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import opkiln
import opkiln.functional as F
import pytest
import torch
from opkiln import road, watch
from opkiln.registry import REGISTRY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step.json"


def rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    document = json.loads(path.read_text("utf-8"))
    assert document["schema"] == 1
    return {file["name"]: file["rows"] for file in document["files"]}


def test_a_row_states_the_call(path: Path) -> None:
    x = torch.randn(6, 4, dtype=torch.float16).T
    with opkiln.capture(path):
        for _ in range(3):
            F.rms_norm(x, (6,), eps=1e-3)
    (row,) = rows(path)["rms_norm"]
    assert row == {
        "label": "4x6",
        "dtypes": ["f16"],
        "tensors": {"input": [4, 6, "f16"]},
        "strides": {"input": [1, 4]},
        "fill": {},
        "params": {"normalized_shape": [6], "eps": 1e-3},
        "train": False,
        "count": 3,
    }


def test_a_call_known_before_is_seen_and_later_ones_are_not(path: Path) -> None:
    """The road that recognises the last calls is left, and found again."""
    x, w = torch.randn(4, 8), torch.randn(8)
    for _ in range(5):
        F.rms_norm(x, (8,), w)
    with opkiln.capture(path) as step:
        for _ in range(5):
            F.rms_norm(x, (8,), w)
    for _ in range(5):
        F.rms_norm(x, (8,), w)
    assert rows(path)["rms_norm"][0]["count"] == 5
    assert [row["count"] for _, row in step.rows.values()] == [5]
    assert not watch._OBSERVERS


def test_a_training_step_with_its_backward(path: Path) -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with opkiln.capture(path):
        F.max_pool2d(x, 2).sum().backward()
        F.max_pool2d(x.detach(), 2)
    found = rows(path)
    assert [row["train"] for row in found["max_pool2d"]] == [True, False]
    assert [row["label"] for row in found["max_pool2d"]] == ["2x3x8x8", "2x3x8x8-2"]
    (back,) = found["max_pool2d_backward"]
    assert back["tensors"]["offset"] == [2, 3, 4, 4, "u8"]
    assert back["strides"] == {"grad_out": [0, 0, 0, 0]}
    assert back["fill"]["offset"].keys() == {"low", "high"}
    assert back["params"]["input_shape"] == [2, 3, 8, 8]


def test_other_threads_and_the_operator(path: Path) -> None:
    x = torch.randn(4, 8)

    def work() -> None:
        F.layer_norm(x, (8,))

    with opkiln.capture(path):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.ops.opkiln.layer_norm(x, None, None, [8], 1e-5)
    assert rows(path)["layer_norm"][0]["count"] == 2


def test_values_that_lengths_depend_on(path: Path) -> None:
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32)
    with opkiln.capture(path):
        F.mean_pooling(torch.randn(1, 9, 2, 3), 4, offsets, num_chunks=3)
    (row,) = rows(path)["mean_pooling"]
    assert row["fill"] == {"cu_seqlens": [0, 3, 9]}


def test_a_step_that_fails_leaves_no_file(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), opkiln.capture(path):
        F.rms_norm(torch.randn(4, 8), (8,))
        raise ZeroDivisionError
    assert not list(path.parent.iterdir()) and not watch._OBSERVERS


def test_explaining_is_no_call(path: Path) -> None:
    with opkiln.capture(path):
        opkiln.explain(F.rms_norm, torch.randn(4, 8), (8,))
    assert rows(path) == {}


def test_plans_of_a_captured_step_are_not_kept_in_use(path: Path) -> None:
    x = torch.randn(4, 8)
    before = REGISTRY.generation
    with opkiln.capture(path) as step:
        F.rms_norm(x, (8,))
    F.rms_norm(x, (8,))
    assert REGISTRY.generation > before
    assert [row["count"] for _, row in step.rows.values()] == [1]
    assert any(key[0] == REGISTRY.generation for key in road.PLANS if isinstance(key, tuple))
