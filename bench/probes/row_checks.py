"""What else a GPU has to say of the row norms: a line each.

One row alone against many; awkward widths against their power of two; the rule against the table.
"""

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import common
import torch

sys.path[:0] = [str(common.ROOT / "core/src"), str(common.ROOT / "packages/norm/src")]

from opkiln.ops import CATALOGUE  # noqa: E402
from opkiln.policy import Policy  # noqa: E402
from opkiln.spec import Call  # noqa: E402
from opkiln_norm import row_cluster, row_plan  # noqa: E402
from opkiln_norm.row_plan import Tiling  # noqa: E402
from row_pages import Row  # noqa: E402

Case = tuple[str, str, int, Tiling | None]  # op, dtype, N, tiling if not the plan's own
TUNED_ROWS, CLUSTER_ROWS = row_plan.tuning_rows, row_cluster.cluster_rows
OPS = ("rms_norm", "layer_norm", "fused_add_layer_norm", "ada_layer_norm", "ada_layer_norm_zero")
ALONE = (("f32", 77), ("f32", 4096), ("f16", 12), ("bf16", 77), ("bf16", 1152), ("bf16", 65544))
MANY = 4096
ODD = ("f32", 77)
ODD_TILINGS = (
    Tiling(128, 1), Tiling(128, 4, 8, preload=True), Tiling(32, 1, chunks=3),
    Tiling(64, 2, 2, chunks=2, programs_per_sm=2, stages=2), Tiling(32, 1, head=True),
)  # fmt: skip
WIDTHS = ((1000, 1024), (1152, 1024), (3000, 4096), (5120, 4096), (12289, 16384))
WIDTH_ELEMENTS = 2**26
WIDTH_LIMIT, RULE_LIMIT = 1.3, 1.25


def prepared(row: Row, tensors: list[Any], policy: Policy | None = None) -> Callable[..., Any]:
    from opkiln_norm.row_norm import prepare

    return prepare(Call.of(CATALOGUE[row.op], tensors, row.params, policy or Policy()))


def use_tables(shipped: bool) -> None:
    """The tables as they are, or none: then the rule alone chooses."""
    row_plan.tuning_rows = TUNED_ROWS if shipped else lambda: []
    row_cluster.cluster_rows = CLUSTER_ROWS if shipped else lambda: []


def alone_cases() -> list[Case]:
    cases: list[Case] = [(op, dtype, n, None) for op in OPS for dtype, n in ALONE]
    return cases + [(op, *ODD, tiling) for op in OPS[-2:] for tiling in ODD_TILINGS]


def alone_and_among_many(case: Case) -> list[str]:
    """Bits of rows alone and among others under batch_invariant: what differs, or an error."""
    op, dtype, n, tiling = case
    many = MANY if n < 2**15 else 300
    affine = 0 if op.startswith("ada") else 1 + ("layer" in op)
    row = Row(op, "alone", dtype, many, n, affine, 0, 0)
    use_tables(True)
    if tiling is not None:
        head = {"op": op, "itemsize": row.itemsize, "n": n, "rows": [1, None], "label": "alone"}
        entry = head | {"use": dataclasses.asdict(tiling)}
        row_plan.tuning_rows = lambda: [entry]
    bad = []
    try:
        tensors = row.tensors("cuda")
        want = alone(row, tensors)
        for start, count in ((0, 1), (131, 1), (131, 2), (0, 133)):
            part = [t if t is None or t.ndim == 1 else t[start : start + count] for t in tensors]
            copies = [None if t is None else t.clone() for t in part]
            for given in (part, copies):
                if not torch.equal(alone(row, given), want[start : start + count]):
                    bad.append(f"OTHER BITS {op} {dtype} {n} rows {start} + {count} {tiling}")
    except Exception as error:  # said; the other cases still run
        bad.append(f"{op} {dtype} {n} {tiling}: {type(error).__name__}: {error}"[-300:])
    return bad


def alone(row: Row, tensors: list[Any]) -> torch.Tensor:
    out = prepared(row, tensors, Policy(batch_invariant=True))(*tensors)
    return out[0] if isinstance(out, tuple) else out


def times_of(rows: list[Row], flush: torch.Tensor, ways: tuple[bool, ...]) -> list[list[float]]:
    """Median us of every row, with the tables and, if asked, without."""
    found = []
    for row in rows:
        tensors = row.tensors("cuda")
        calls: list[Callable[[], Any]] = []
        for shipped in ways:
            use_tables(shipped)
            launch = prepared(row, tensors)
            launch(*tensors)
            calls.append(functools.partial(launch, *tensors))
        use_tables(True)
        iterations = common.ITERATIONS if row.rows * row.n < 2**29 else 5
        samples = common.kernel_times_us(calls, flush, iterations)
        found.append([statistics.median(s) for s in samples])
    return found


def width_rows(op: str) -> list[Row]:
    lengths = [n for pair in WIDTHS for n in pair]
    return [Row(op, "width", "bf16", WIDTH_ELEMENTS // n, n, 1, 0, 0) for n in lengths]


def widths(flush: torch.Tensor) -> list[str]:
    """Time per byte over that of the nearest power of two."""
    lines: list[str] = []
    worst = 0.0
    for op in ("rms_norm", "layer_norm"):
        rows = width_rows(op)
        per_element = [
            us / (row.rows * row.n)
            for row, (us,) in zip(rows, times_of(rows, flush, (True,)), strict=True)
        ]
        ratios = [a / b for a, b in zip(per_element[::2], per_element[1::2], strict=True)]
        worst = max(worst, *ratios)
        said = " ".join(f"{n}/{p} {r:.2f}" for (n, p), r in zip(WIDTHS, ratios, strict=True))
        lines.append(f"width {op} bf16: {said}")
    return [*lines, f"worst width ratio {worst:.2f}, limit {WIDTH_LIMIT}"]


def tuned_rows(pages: list[Row]) -> list[Row]:
    """The pages' rows that the table names; float16 has bfloat16's tiling."""
    entries = [*TUNED_ROWS(), *CLUSTER_ROWS()]

    def named(row: Row) -> bool:
        key = (row.op, row.itemsize, row.n)
        return any(row_plan.covers(entry, key, row.rows) for entry in entries)

    return [row for row in pages if row.dtype != "f16" and named(row)]


def rule_against_table(pages: list[Row], flush: torch.Tensor) -> list[str]:
    """Time by the rule over time by the table."""
    tuned = tuned_rows(pages)
    pairs = times_of(tuned, flush, (True, False))
    ratios = [(ruled / table, row) for row, (table, ruled) in zip(tuned, pairs, strict=True)]
    over = [f"rule {r.op} {r.label} {x:.2f}" for x, r in ratios if x > RULE_LIMIT]
    worst = max(x for x, _ in ratios)
    return [*over, f"worst rule/table ratio {worst:.2f} of {len(ratios)}, limit {RULE_LIMIT}"]


def kernels(pages: list[Row]) -> list[tuple[Row, Tiling]]:
    """What the timed checks launch, to be compiled before."""
    found = []
    for row in [*width_rows("rms_norm"), *width_rows("layer_norm"), *tuned_rows(pages)]:
        call = Call.of(CATALOGUE[row.op], row.tensors("meta"), row.params, real=False)
        found.append((row, row_plan.plan_for(call).tiling))
        found.append((row, row_plan.rule(row.itemsize, row.n, row.rows, row.adds)))
    return list(dict.fromkeys(found))


def timed_checks(pages: list[Row], flush: torch.Tensor) -> list[str]:
    lines = []
    for check in (widths, functools.partial(rule_against_table, pages)):
        try:
            lines += check(flush)
        except Exception as error:  # said; the other checks still run
            lines.append(f"{type(error).__name__}: {error}"[-300:])
        torch.cuda.empty_cache()
    return lines
