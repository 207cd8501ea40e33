"""The plan of a replacement: what is served, how, and what for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opkiln.replacing.gain import Gain, calls_of, gain_of
from opkiln.replacing.match import way_of
from opkiln.replacing.rms import Probes, RMSWay
from opkiln.replacing.served import Way, served_class
from opkiln.spec import Call

NO_EXAMPLE = "unknown: shapes come with example="
NOT_REACHED = "unknown: not called on the example"
WRITTEN_OUT = "the time of torch's own rms_norm stands for classes that write it out"


@dataclass(frozen=True)
class Row:
    """One module. way: None where it stays as it is, for `reason`.

    calls: what opkiln would compute of it on the example. gain: their time, or why it is not known.
    """

    name: str
    module: torch.nn.Module
    own: type
    way: Way | None
    reason: str = ""
    calls: tuple[Call, ...] = ()
    gain: Gain | str = NO_EXAMPLE


class Plan:
    """What `replace` found in a model. `str()` is a table. apply() and revert() may alternate."""

    def __init__(self, model: torch.nn.Module, rows: tuple[Row, ...]) -> None:
        self.model = model
        self.rows = rows
        self.applied = False

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The rows that apply() changes."""
        return tuple(row for row in self.rows if row.way is not None)

    def apply(self) -> Plan:
        """Serve the modules from now on. RuntimeError, and nothing is done, if it is applied, or a
        module's class has been changed since the plan was made.
        """
        if self.applied:
            raise RuntimeError("opkiln.replace: this plan is applied already")
        self._switch([(row, row.own, served(row)) for row in self.replaced])
        self.applied = True
        return self

    def revert(self) -> Plan:
        """The modules' own classes again; else the model is as it is. RuntimeError, and nothing is
        done, if the plan is not applied, or a module's class has been changed since.
        """
        if not self.applied:
            raise RuntimeError("opkiln.replace: this plan is not applied")
        self._switch([(row, served(row), row.own) for row in self.replaced])
        self.applied = False
        return self

    def _switch(self, changes: list[tuple[Row, type, type]]) -> None:
        """All of them or none."""
        for row, before, _ in changes:
            if type(row.module) is not before:
                raise RuntimeError(
                    f"opkiln.replace: the class of {row.name} has been changed, "
                    f"to {type(row.module).__qualname__}"
                )
        for row, _, after in changes:
            row.module.__class__ = after

    def __str__(self) -> str:
        state = "served" if self.applied else "can be served"
        head = f"{type(self.model).__name__}: {len(self.replaced)} modules {state} by opkiln"
        served_rows = [
            (row.name, row.own.__name__, row.way.op, str(row.gain))
            for row in self.rows
            if row.way is not None
        ]
        kept = [(r.name, r.own.__name__, "stays", r.reason) for r in self.rows if r.way is None]
        return "\n".join([head, *table([*served_rows, *kept]), *self._totals()])

    def _totals(self) -> list[str]:
        gains = [row.gain for row in self.replaced if isinstance(row.gain, Gain)]
        if not gains:
            return []
        total = Gain(sum(g.torch_us for g in gains), sum(g.chosen_us for g in gains), "")
        lines = [
            f"  device time of the forward of {len(gains)} of {len(self.replaced)}: {total}",
            *sorted({f"  times: {g.source}" for g in gains}),
        ]
        if any(isinstance(r.way, RMSWay) and isinstance(r.gain, Gain) for r in self.replaced):
            lines.append(f"  {WRITTEN_OUT}")
        return lines


def served(row: Row) -> type:
    assert row.way is not None
    return served_class(row.own, row.way)


def table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return [
        "  " + "  ".join([*[f"{c:<{w}}" for c, w in zip(r, widths, strict=False)], r[3]])
        for r in rows
    ]


def replace(model: torch.nn.Module, dry_run: bool = True, *, example: Any = None) -> Plan:
    """Plan to have opkiln.functional compute the modules of `model` that it has an op for.

    torch.nn's norms, pools and convolutions are found by their class, subclasses too where they
    compute the same; RMSNorm classes of any library by what they compute, tried on random inputs.
    Only the class of such a module changes: the object, its parameters, buffers and hooks stay.

    dry_run: False applies the plan at once. example: inputs of one forward, a tensor, a tuple of
    positional or a mapping of keyword arguments; with it the plan states the expected gain from the
    measured tables. The model runs once on it, on copies of its buffers.

        plan = opkiln.replace(model, example=x)
        print(plan)
        plan.apply()

    Raises TypeError if model is no torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"opkiln.replace: model must be a Module, got {type(model).__name__}")
    probes = Probes()
    found = [(name, m, way_of(m, probes)) for name, m in model.named_modules()]
    ways = {m: way for _, m, way in found if way is not None and not isinstance(way, str)}
    calls = None if example is None else calls_of(model, ways, example)
    rows = []
    for name, module, way in found:
        if isinstance(way, str):
            rows.append(Row(name, module, type(module), None, way))
        elif way is not None:
            rows.append(served_row(name, module, way, None if calls is None else calls[module]))
    plan = Plan(model, tuple(rows))
    return plan if dry_run else plan.apply()


def served_row(name: str, module: torch.nn.Module, way: Way, calls: list[Call] | None) -> Row:
    if calls is None:
        return Row(name, module, type(module), way)
    gain = gain_of(calls) if calls else NOT_REACHED
    return Row(name, module, type(module), way, "", tuple(calls), gain)
