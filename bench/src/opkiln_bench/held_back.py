"""The held-back sample: shapes between those of the pages, which no table was ever made from.

Of each op 20 calls. A call takes one of the op's rows and draws each of its sizes log-uniformly
between the least and the largest that the op's rows of that form have, as a multiple of what all of
them are multiples of (at most 64), and of what the op asks for (groups, powers of two). The seed is
fixed: everyone measures the same sample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, pairwise
from typing import Any

import torch
from opkiln.errors import ArgumentError
from opkiln.spec import Call

from opkiln_bench.catalogue import TORCH_NAMES, Row, load_rows
from opkiln_bench.contestants import canonical

PAGE = "held_back"  # among a row's pages
PER_OP = 20
SEED = 20261201
MAX_BYTES = 1 << 30  # of a call's inputs: larger rows of the pages take minutes to check
MAX_STEP = 64
TRIES = 400

# Letters of the sizes of a tensor, by its rank where there are several forms; "*": the rest, each
# on its own. "": every tensor that is not named. Sizes without a letter stay.
ROW = {"": ("R N",), "weight": ("N",), "bias": ("N",)}
ADA = {"": ("R N",)}
CHANNEL = {"": ("C",), "input": ("B C *",), "grad_out": ("B C *",)}
CONV = {"input": ("B C *",), "weight": ("O I",), "bias": ("O",)}
POOL = {"input": ("B C *",)}
ROPE = {"x": ("S D", "B S H D")}
FORMS: dict[str, Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("layer_norm", "rms_norm", "fused_add_layer_norm", "fused_add_rms_norm"), ROW),
    **dict.fromkeys(("ada_layer_norm", "ada_layer_norm_zero"), ADA),
    **dict.fromkeys(("batch_norm", "batch_norm_backward", "group_norm", "instance_norm"), CHANNEL),
    **{f"conv{n}d": CONV for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": POOL for kind in ("avg", "max") for n in (1, 2, 3)},
    **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_max_pool2d"), POOL),
    "mean_pooling": {"input": ("B T H D",)},
    **{f"rope_{rule}": ROPE for rule in ("neox", "non_neox", "llama31", "yarn", "longrope")},
    "rope_neox_position_ids": {"x": ("S H D",), "position_ids": ("S",)},
    "fft": {"input": ("P", "B P")},
    "mhc_pre": {"phi": ("W",), "x": ("B W",)},
    "mhc_post": {"x_layer_out": ("B C",), "h_post": ("B",), "x_res": ("B W",)},
    "topk_selector": {"scores": ("B S V G",), "starts": ("B S",), "ends": ("B S",)},
}
COUNTS = "BRSTVP"  # of samples, rows, positions: one value in all the rows gives a quarter of it up
SMALL_CHANNELS = 4  # of an image or a waveform: they stay

Sizes = dict[str, int]


def held_back(rows: Sequence[Row], per_op: int = PER_OP) -> list[Row]:
    """The sample of the ops that have rows; of an op with few shapes fewer than `per_op`."""
    found: list[Row] = []
    for op in dict.fromkeys(row.op for row in rows):
        of_op = [row for row in rows if row.op == op and row.function in FORMS]
        if of_op:
            found += sample(of_op, per_op)
    return found


def sample(rows: Sequence[Row], count: int) -> Iterator[Row]:
    """Distinct calls between the rows of one op, none of which is one of them."""
    choice = random.Random(f"{SEED} {rows[0].op}")
    seen = {identity(row) for row in rows}
    spans = ranges(rows)
    forms = choice.sample(rows, len(rows))  # each in its turn
    number = 0
    for form in islice(cycle(forms), TRIES):
        if number == count:
            return
        made = drawn(form, spans, choice)
        if identity(made) in seen or made.input_bytes > MAX_BYTES or not is_valid(made):
            continue
        seen.add(identity(made))
        number += 1
        label = f"held-back-{number:02}"
        yield replace(made, label=label, pages={PAGE: label}, model=None, note=None)


def every_row() -> list[Row]:
    """All rows that a run may have measured: the catalogue's and the sample."""
    rows = load_rows(mode="all")
    return [*rows, *held_back(rows)]


def identity(row: Row) -> str:
    return repr(({n: (t.shape, t.dtype) for n, t in row.tensors.items()}, row.args))


def letters(row: Row, tensor: str) -> list[str]:
    """A letter for each leading size of a tensor that may change; `*` gives X0 of rank 3, ..."""
    forms = FORMS[row.function]
    rank = len(row.tensors[tensor].shape)
    for form in forms.get(tensor, forms.get("", ())):
        names = form.split()
        if names[-1] == "*":
            rest = rank - len(names) + 1
            return [*names[:-1], *(f"X{i} of {rest}" for i in range(rest))]
        if len(names) <= rank and (len(names) == rank or tensor in ("phi", "weight", "h_post")):
            return names
    return []


def sizes_of(row: Row) -> Sizes:
    return {
        letter: size
        for name, tensor in row.tensors.items()
        for letter, size in zip(letters(row, name), tensor.shape, strict=False)
    }


def ranges(rows: Sequence[Row]) -> dict[str, tuple[int, int, int]]:
    """Letter -> least, largest, step."""
    values: dict[str, set[int]] = {}
    for row in rows:
        for letter, size in sizes_of(row).items():
            if not (letter == "C" and size <= SMALL_CHANNELS):
                values.setdefault(letter, set()).add(size)
    found = {}
    for letter, sizes in values.items():
        low, high = min(sizes), max(sizes)
        if low == high and letter in COUNTS:
            low = max(low // 4, 1)
        found[letter] = low, high, math.gcd(low, *sizes, MAX_STEP)
    return found


def drawn(row: Row, spans: Mapping[str, tuple[int, int, int]], choice: random.Random) -> Row:
    """The row with every size that has a letter drawn anew."""
    sizes = sizes_of(row)
    for letter, size in sizes.items():
        fixed = letter == "I" or (letter == "C" and size <= SMALL_CHANNELS)
        if letter in spans and not fixed:
            sizes[letter] = draw(letter, spans[letter], groups_of(row), choice)
    args = dict(row.args)
    SETTLE.get(row.function, unchanged)(row, sizes, args)
    tensors = {}
    for name, tensor in row.tensors.items():
        new = [sizes[letter] for letter in letters(row, name)]
        tensors[name] = replace(tensor, shape=(*new, *tensor.shape[len(new) :]))
    made = replace(row, tensors=tensors, args=args)
    return FILL.get(row.function, lambda row: row)(made)


def draw(letter: str, span: tuple[int, int, int], groups: int, choice: random.Random) -> int:
    low, high, step = span
    size = math.exp(choice.uniform(math.log(low), math.log(high)))
    if letter == "P":
        return 1 << round(math.log2(size))
    if letter in "CO":
        step = math.lcm(step, groups)
    return max(round(size / step), 1) * step


def groups_of(row: Row) -> int:
    """What divides the channels; 1 where every channel is a group, however many there are."""
    groups = int(row.args.get("num_groups", row.args.get("groups", 1)))
    return 1 if groups == sizes_of(row).get("C") else groups


Settle = Callable[[Row, Sizes, dict[str, Any]], None]


def unchanged(row: Row, sizes: Sizes, args: dict[str, Any]) -> None:
    """Nothing else depends on the sizes."""


def settle_row_norm(row: Row, sizes: Sizes, args: dict[str, Any]) -> None:
    args["normalized_shape"] = [sizes["N"]]


def settle_conv(row: Row, sizes: Sizes, args: dict[str, Any]) -> None:
    """Depthwise stays depthwise; the weight has the channels of a group."""
    before = sizes_of(row)
    if args["groups"] == before["C"] > 1:
        args["groups"] = sizes["C"]
        sizes["O"] = sizes["C"] * (before["O"] // before["C"])
    sizes["I"] = sizes["C"] // args["groups"]


def settle_fft(row: Row, sizes: Sizes, args: dict[str, Any]) -> None:
    args["n"] = sizes["P"]


def settle_mhc_post(row: Row, sizes: Sizes, args: dict[str, Any]) -> None:
    sizes["W"] = sizes["C"] * row.tensors["h_post"].shape[1]


def settle_positions(row: Row, sizes: Sizes, args: dict[str, Any]) -> None:
    args["max_position"] = 2 * sizes["S"]


def settle_mean_pooling(row: Row, sizes: Sizes, args: dict[str, Any]) -> None:
    """Sequences as long in proportion; the chunks of them."""
    if "cu_seqlens" in row.tensors:
        ends = boundaries(row, sizes["T"])
        lengths = [b - a for a, b in pairwise(ends)]
        args["num_chunks"] = sum(-(-n // args["chunk_size"]) for n in lengths)


def boundaries(row: Row, tokens: int) -> list[int]:
    """Where the sequences of a row end, as parts of so many tokens."""
    ends = row.tensors["cu_seqlens"].fill
    return [end * tokens // ends[-1] for end in ends]


SETTLE: dict[str, Settle] = {
    **{name: settle_row_norm for name, forms in FORMS.items() if forms is ROW},
    **{f"conv{n}d": settle_conv for n in (1, 2, 3)},
    "fft": settle_fft,
    "mhc_post": settle_mhc_post,
    "rope_neox_position_ids": settle_positions,
    "mean_pooling": settle_mean_pooling,
}


def fill_mean_pooling(row: Row) -> Row:
    if "cu_seqlens" not in row.tensors:
        return row
    ends = boundaries(row, row.tensors["input"].shape[1])
    return replace(
        row, tensors=row.tensors | {"cu_seqlens": replace(row.tensors["cu_seqlens"], fill=ends)}
    )


def fill_topk(row: Row) -> Row:
    """All of the positions are searched."""
    ends = replace(row.tensors["ends"], fill=row.tensors["scores"].shape[2])
    return replace(row, tensors=row.tensors | {"ends": ends})


def condition_of_rope(row: Row) -> Row:
    """The largest position, whose float32 angle is off by half a unit."""
    return replace(row, condition=float(sizes_of(row)["S"]))


FILL: dict[str, Callable[[Row], Row]] = {
    "mean_pooling": fill_mean_pooling,
    "topk_selector": fill_topk,
    **{name: condition_of_rope for name in FORMS if name.startswith("rope_")},
}


def is_valid(row: Row) -> bool:
    """Whether the public function takes the call: a window may not fit into its plane."""
    tensors = {
        name: torch.empty(t.shape, dtype=getattr(torch, TORCH_NAMES[t.dtype]), device="meta")
        for name, t in row.tensors.items()
    }
    try:
        Call.of(*canonical(row.function, {**tensors, **row.args}), real=False)
    except ArgumentError:
        return False
    return True
