"""Check and measure csrc/shift.cu: its arithmetic from one tile up, then its tilings on heavy rows.

    python bench/probes/conv_shift.py --out DIR [--only SUBSTRING] [--budget SECONDS]
    python bench/probes/conv_shift.py --write-tuning DIR

Compiles all, then runs a worker process that writes a line to DIR/events.jsonl before and after
each candidate. A fault of the device ends the worker; the next one goes on after the candidate that
faulted. A wrong candidate is looked into (which taps, channels, pixels) and timed all the same.
Prints a table; beside each candidate: what ships, torch, and the pack kernel alone. The second
form puts the tilings that beat what ships into the tuning table.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import common
import torch
from conv import TOLERANCE, TUNING, Row, read_rows  # and puts the packages on the path
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln_conv import conv_plan, shift
from opkiln_conv.geometry import geometry_of
from opkiln_conv.shift import ShiftTiling as S

ITERATIONS = 15
RESTARTS = 8
UNITS = {  # what is new in each: label, dtype, input, weight, window, tiling
    "one-tap": ("f16", (1, 64, 8, 8), (64, 64, 1, 1), {}, S(64, w_stages=2)),
    "taps": ("f16", (1, 64, 8, 8), (128, 64, 3, 3), {"p": 1}, S(64, mb=2, w_stages=2)),
    "bf16": ("bf16", (1, 64, 8, 8), (128, 64, 3, 3), {"p": 1}, S(64, mb=2, w_stages=2)),
    "turns": ("f16", (3, 192, 56, 56), (200, 192, 3, 3), {"p": 1}, S(96, mb=2, w_stages=3)),
    "block-32": ("f16", (1, 64, 8, 40), (64, 64, 3, 3), {"p": 1}, S(64, 32)),
    "block-16": ("f16", (1, 64, 8, 40), (64, 64, 3, 3), {"p": 1}, S(64, 16)),
    "lines": ("f16", (1, 128, 24, 24), (128, 128, 3, 3), {"p": 6, "d": 6}, S(96, group=2)),
    "resident": ("bf16", (1, 32, 5, 9, 16), (64, 32, 3, 3, 3), {"p": 1},
                 S(64, 32, group=1, w_stages=0)),
}  # fmt: skip
CANDIDATES = {
    "highres-3x3-s1": [S(192, mb=2, w_stages=w) for w in (4, 5, 6)]
    + [S(192, mb=2, group=2, x_stages=3, w_stages=6), S(256, w_stages=8)],
    "highres-3x3-s1-bias": [S(192, mb=2, w_stages=6)],
    "unet-encoder-k3-s1": [
        S(256, 32, group=1, x_stages=x, w_stages=w) for x, w in ((2, 0), (3, 0), (3, 12))
    ]
    + [S(256, 32, group=2, x_stages=4, w_stages=0)],
}


def rows_of(only: str) -> list[tuple[Row, list[S]]]:
    rows = {row.label: row for row in read_rows("")}
    return [
        (rows[label], [t for t in found if shift.can_use(rows[label].geometry(), t)])
        for label, found in CANDIDATES.items()
        if only in label
    ]


def units(only: str) -> list[tuple[Row, list[S]]]:
    found = []
    for label, (dtype, shape, weight, how, t) in UNITS.items():
        if only and only not in label:
            continue
        options = tuple(f"{k}={v}" for k, v in how.items())
        row = Row(f"unit-{label}", dtype, shape, weight, 0.0, 0.0, (*options, "b=1"), bias=True)
        found.append((row, [t]))
    return found


def plan_of(row: Row, tensors: list[Any], t: S, real: bool = True) -> Any:
    call = row.call(tensors, real=real)
    return call, shift.plan_of(call, geometry_of(call), t, "probe")


def warm(task: tuple[Row, S]) -> dict[str, Any]:
    row, t = task
    try:
        _, plan = plan_of(row, row.tensors("meta"), t, real=False)
        cuda.compile_cubin(shift.text_of(plan), "sm_90a", plan.macros)
    except Exception as error:  # a finding
        return {"compile_error": f"{type(error).__name__}: {error}"[-400:]}
    return {}


def changed(t: S) -> dict[str, int]:
    """The fields of a tiling that are not at their default."""
    default = dataclasses.asdict(S(0))
    return {k: v for k, v in dataclasses.asdict(t).items() if v != default[k]}


def name_of(t: S) -> str:
    return " ".join(f"{k}{v}" for k, v in changed(t).items())


def share_wrong(got: torch.Tensor, want: torch.Tensor, dtype: str) -> torch.Tensor:
    """Where an output is off by more than the tolerance of the output's RMS, or its own value."""
    scale = want.square().mean().sqrt()
    return ~((got.float() - want).abs() <= TOLERANCE[dtype] * want.abs().clamp(min=scale))


def pattern(row: Row, t: S, tensors: list[Any]) -> dict[str, Any]:
    """Which taps, channels and pixels a wrong candidate gets wrong: one at a time is not 0."""
    x, w, _ = tensors
    spec = CATALOGUE[row.op]

    def wrong(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        given = [x, w, None]
        call, plan = plan_of(dataclasses.replace(row, bias=False), given, t)
        got = shift.prepare(call, plan)(*given)
        want = spec.reference(x.float(), w.float(), None, **row.params).float()
        return share_wrong(got, want, row.dtype)[0].flatten(1).float()

    whole = wrong(x, w)
    out: dict[str, Any] = {"share": float(whole.mean())}
    first = whole.flatten().nonzero()
    if len(first):
        at = int(first[0])
        out["first"] = [at // whole.shape[1], at % whole.shape[1]]
    rows = whole.mean(1)
    out["by channel % 64"] = [
        round(float(rows[i::64].mean()), 3) for i in range(min(64, len(rows)))
    ]
    pixels = whole.mean(0)
    out["by pixel % 16"] = [round(float(pixels[i::16].mean()), 3) for i in range(16)]
    flat = w.flatten(2)
    for i in range(min(flat.shape[2], 27)):
        only = torch.zeros_like(flat)
        only[..., i] = flat[..., i]
        out[f"tap {i}"] = round(float(wrong(x, only.reshape(w.shape)).mean()), 4)
    for i in range(0, min(x.shape[1], 64), 8):
        only = torch.zeros_like(w)
        only[:, i : i + 8] = w[:, i : i + 8]
        out[f"channels {i}+8"] = round(float(wrong(x, only).mean()), 4)
    return out


class Events:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def add(self, **event: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def all(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def work(out: pathlib.Path, only: str) -> None:
    """The worker: everything that no event says has been started."""
    events = Events(out / "events.jsonl")
    seen = events.all()
    started = {(e["row"], e["name"]) for e in seen if e["what"] == "start"}
    right = {(e["row"], e["name"]) for e in seen if e["what"] == "checked"}
    done = {e["row"] for e in seen if e["what"] == "timed"}
    if not any(e["what"] == "provenance" for e in seen):
        events.add(what="provenance", row="", name="", **common.provenance())
    torch.backends.cudnn.benchmark = True
    flush = common.flush_buffer()
    patterns = 0
    for row, tilings in [*units(only), *rows_of(only)]:
        if row.label in done or not tilings:
            continue
        torch.manual_seed(0)
        tensors = row.tensors("cuda")
        wide = [None if v is None else v.float() for v in tensors]
        want = CATALOGUE[row.op].reference(*wide, **row.params).float()
        calls: dict[str, Any] = {}
        for t in tilings:
            key = (row.label, name_of(t))
            if key in started and key not in right:
                continue  # it faulted
            events.add(what="start", row=key[0], name=key[1])
            call, plan = plan_of(row, tensors, t)
            launch = shift.prepare(call, plan)
            torch.use_deterministic_algorithms(True, warn_only=True)  # outputs start as NaN
            got = launch(*tensors)
            torch.cuda.synchronize()
            torch.use_deterministic_algorithms(False)
            wrong = share_wrong(got, want, row.dtype)
            again = torch.equal(launch(*tensors), got)
            found = {"wrong": float(wrong.float().mean()), "same bits again": again}
            if found["wrong"] and patterns < 12:
                patterns += 1
                found |= {"pattern": pattern(row, t, tensors)}
            events.add(what="checked", row=key[0], name=key[1], tiling=changed(t), **found)
            calls[key[1]] = partial(launch, *tensors)
            calls.setdefault("pack alone", pack_alone(plan, tensors))
            calls.setdefault(
                f"all but pack, {name_of(tilings[0])}", without_pack(plan, tensors, call)
            )
        if row.label.startswith("unit"):
            continue
        from opkiln_conv.launch import prepare  # imports Triton, which the compiling need not

        call = row.call(tensors)
        shipped = f"shipped: {conv_plan.plan_for(call).tiling}"
        calls[shipped] = partial(prepare(call), *tensors)
        formula = CATALOGUE[row.op].native or CATALOGUE[row.op].reference
        calls["torch"] = partial(formula, *tensors, **row.params)
        for call in calls.values():
            call()
        torch.cuda.synchronize()
        times = common.kernel_times_us(list(calls.values()), flush, ITERATIONS)
        us = {k: [statistics.median(v), min(v)] for k, v in zip(calls, times, strict=True)}
        events.add(what="timed", row=row.label, name="", us=us)
        torch.cuda.empty_cache()


def pack_alone(plan: Any, tensors: list[Any]) -> Any:
    pack, _, x_blocks, xp, wp = scratch(plan, tensors)
    return lambda: pack(tensors[0], tensors[1], xp, wp, x_blocks)


def without_pack(plan: Any, tensors: list[Any], call: Any) -> Any:
    pack, multiply, x_blocks, xp, wp = scratch(plan, tensors)
    pack(tensors[0], tensors[1], xp, wp, x_blocks)
    out = call.outputs[0].empty()
    return lambda: multiply(xp, wp, 0 if tensors[2] is None else tensors[2], out, plan.images)


def scratch(plan: Any, tensors: list[Any]) -> tuple[Any, ...]:
    x, sizes = tensors[0], plan.sizes
    rows = plan.images * sizes.blocks * sizes.rows * plan.tiling.block
    xp, wp = x.new_empty(rows), x.new_empty(sizes.packed_weights)
    return *shift.kernels_of(plan, x.device), xp, wp


def table(events: list[dict[str, Any]]) -> None:
    checked = {(e["row"], e["name"]): e for e in events if e["what"] == "checked"}
    for e in events:
        if e["what"] == "start" and (e["row"], e["name"]) not in checked:
            print(f"FAULT   {e['row']:26s} {e['name']}")
    for (row, name), e in checked.items():
        if row.startswith("unit") or e["wrong"] or not e["same bits again"]:
            state = "ok     " if not e["wrong"] else "WRONG  "
            print(f"{state} {row:26s} {name:50s} {e['wrong']:.4f} bits {e['same bits again']}")
            if e["wrong"]:
                print(f"         {str(e.get('pattern'))[:700]}")
    for e in events:
        for name, (us, least) in sorted(e.get("us", {}).items(), key=lambda item: item[1][0]):
            wrong = checked.get((e["row"], name), {}).get("wrong", 0)
            print(f"{e['row']:26s} {us:8.2f} {least:8.2f} {'WRONG ' if wrong else ''}{name}")


def write_tuning(out: pathlib.Path) -> None:
    """Rows where a right tiling was faster than what shipped get it, and its time."""
    events = Events(out / "events.jsonl").all()
    known = {(e["row"], e["name"]): e for e in events if e["what"] == "checked"}
    (where,) = [e for e in events if e["what"] == "provenance"][:1]
    table = json.loads(TUNING.read_text("utf-8"))
    dtypes = {row.label: row.dtype for row in read_rows("")}
    for e in events:
        entry = next((r for r in table["rows"] if r["label"] == e["row"]), None)
        if e["what"] != "timed" or entry is None:
            continue
        us = {name: median for name, (median, _) in e["us"].items()}
        right = [n for n in us if known.get((e["row"], n), {"wrong": 1})["wrong"] == 0]
        best = min(right, key=us.__getitem__)
        if us[best] < min(v for n, v in us.items() if n.startswith("shipped")):
            figure = {k: where[k] for k in ("gpu", "date")} | {"commit": where["commit"][:12]}
            entry["shift"] = known[e["row"], best]["tiling"]
            entry["shift_measured"] = figure | {"us": {dtypes[e["row"]]: round(us[best], 3)}}
            print(e["row"], best, us[best])
    common.write_json(TUNING, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--only", default="")
    parser.add_argument("--budget", type=float, default=55, help="seconds, compiling included")
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    if options.worker:
        return work(options.out, options.only)
    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    events = Events(options.out / "events.jsonl")
    tasks = [(r, t) for r, ts in [*units(options.only), *rows_of(options.only)] for t in ts]
    compiled = common.warm_all(warm, tasks)
    for (row, t), found in compiled.items():
        if found:
            events.add(what="start", row=row.label, name=name_of(t), error=found["compile_error"])
            print(f"DOES NOT COMPILE {row.label} {name_of(t)} {found['compile_error'][-200:]}")
    print(f"{len(tasks)} candidates compiled in {time.monotonic() - start:.0f} s", flush=True)
    for attempt in range(RESTARTS):
        left = options.budget - (time.monotonic() - start)
        if left < 8:
            print("out of time")
            break
        command = [sys.executable, __file__, "--worker", "--out", str(options.out)]
        with (options.out / f"worker-{attempt}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--only", options.only], stdout=log, stderr=subprocess.STDOUT
            )
            try:
                code: int | str = process.wait(left)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = "out of time"
        print(f"worker {attempt}: {code}", flush=True)
        if code in (0, "out of time"):
            break
        tail = (options.out / f"worker-{attempt}.log").read_text().splitlines()[-2:]
        print("   " + " | ".join(tail)[-300:])
    table(events.all())
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
