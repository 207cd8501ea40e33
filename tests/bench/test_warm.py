"""Who compiles what ahead of a sweep."""

from __future__ import annotations

from opkiln_bench.catalogue import load_rows
from opkiln_bench.warm import (
    COMPILED,
    LARGE_BYTES,
    LARGE_PROCESSES,
    Task,
    builds,
    shares,
    tasks_of,
)

ROWS = load_rows(["opkiln_bench.conf"])
TASKS: list[Task] = [(row, backend) for row in ROWS for backend in COMPILED]


def names(tasks: list[Task]) -> list[tuple[str, ...]]:
    return sorted((*row.key, backend) for row, backend in tasks)


def test_every_task_goes_to_one_process() -> None:
    parts = shares(TASKS, 8)
    assert len(parts) == 8
    assert names([t for p in parts for t in p]) == names(TASKS)


def test_large_rows_share_a_few_processes() -> None:
    parts = shares(TASKS, 8)
    holders = {i for i, p in enumerate(parts) for r, _ in p if r.input_bytes > LARGE_BYTES}
    assert holders == set(range(LARGE_PROCESSES))
    assert max(map(len, parts)) - min(map(len, parts)) <= len(COMPILED)


def test_a_row_makes_its_inputs_once() -> None:
    homes: dict[object, set[int]] = {}
    for i, part in enumerate(shares(TASKS, 8)):
        for row, _ in part:
            homes.setdefault(row.key, set()).add(i)
    assert {len(home) for home in homes.values()} == {1}


def test_builds_are_apart_by_family() -> None:
    first = {r.family: r for r in ROWS}
    asked = [(first[f], "flashinfer") for f in ("normalization", "top-k")]
    assert builds([*asked, *TASKS]) == [[asked[0]], [asked[1]]]


def test_few_rows_take_few_processes() -> None:
    small: list[Task] = [(r, "opkiln") for r in ROWS if r.name == "fft"]
    assert [len(p) for p in shares(small, 8)] == [1, 1, 1]


def test_only_what_compiles_is_worth_it() -> None:
    tasks = tasks_of(ROWS, ["torch", "torch-compile", "quack"])
    assert {backend for _, backend in tasks} == {"torch-compile"}
    assert len(tasks) == len(ROWS)
