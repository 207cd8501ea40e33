"""What a repeated eager call costs the host, whole and part by part, beside torch and its peers.

    python bench/probes/host_cost.py --out DIR

One row of 4096 bf16, for the pool 1 x 64 x 8 x 8. Writes DIR/host_cost.json and prints p50 and p99
of CALLS calls in us; the device is idle between rounds of ROUND, so no call waits for it. Without a
GPU nothing is launched: a call's road is timed alone, with Triton's interpreter for the plans.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = pathlib.Path(__file__).resolve().parents[2]
FAMILIES = ("norm", "pool", "rope")
sys.path[:0] = [str(ROOT / "core/src"), *(str(ROOT / f"packages/{f}/src") for f in FAMILIES)]

import opkiln.functional as F  # noqa: E402
from opkiln import road  # noqa: E402

CALLS, ROUND = 4000, 100
EPS = 1e-6
ALLOWED = 1.25  # times torch's own op
T = torch.nn.functional
Fn = Callable[[], Any]


def tensors() -> dict[str, torch.Tensor]:
    device = "cuda" if GPU else "cpu"
    shapes = {"x": (1, 4096), "residual": (1, 4096), "w": (4096,), "b": (4096,)}
    shapes |= {"image": (1, 64, 8, 8), "q": (1, 1, 32, 128)}
    return {k: torch.randn(s, device=device).bfloat16() for k, s in shapes.items()}


def ours(t: dict[str, torch.Tensor]) -> dict[str, Fn]:
    x, residual, w, b, image, q = t.values()
    return {
        "rms_norm": lambda: F.rms_norm(x, (4096,), w, EPS),
        "layer_norm": lambda: F.layer_norm(x, (4096,), w, b, EPS),
        "max_pool2d": lambda: F.max_pool2d(image, 2),
        "fused_add_rms_norm, in place": lambda: F.fused_add_rms_norm(
            x, residual, (4096,), w, EPS, inplace=True
        ),
        "rope_neox": lambda: F.rope_neox(q),
    }


def peers(t: dict[str, torch.Tensor]) -> dict[tuple[str, str], Fn]:
    """(our op, who) -> the call."""
    x, residual, w, b, image, _ = t.values()
    found: dict[tuple[str, str], Fn] = {
        ("rms_norm", "torch"): lambda: T.rms_norm(x, (4096,), w, EPS),
        ("layer_norm", "torch"): lambda: T.layer_norm(x, (4096,), w, b, EPS),
        ("max_pool2d", "torch"): lambda: T.max_pool2d(image, 2),
    }
    try:
        from flashinfer import norm

        found["rms_norm", "flashinfer"] = lambda: norm.rmsnorm(x, w, EPS)
        added = ("fused_add_rms_norm, in place", "flashinfer")
        found[added] = lambda: norm.fused_add_rmsnorm(x, residual, w, EPS)
    except ImportError as error:
        print(f"no flashinfer: {error}")
    try:
        from quack import rmsnorm as quack

        found["rms_norm", "quack"] = lambda: quack.rmsnorm(x, w, eps=EPS)
        found["rms_norm", "quack rmsnorm_fwd"] = lambda: quack.rmsnorm_fwd(x, w, eps=EPS)
    except ImportError as error:
        print(f"no quack: {error}")
    return found


def cells(fn: Any) -> dict[str, Any]:
    return dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))


def parts(call: Fn) -> dict[str, Fn]:
    """What a recognised call does one after the other, each as a call of its own."""
    given: list[Any] = []
    real = road.run

    def spy(*args: Any) -> Any:
        given.append(args)
        return real(*args)

    modules = [m for n, m in sys.modules.items() if n.startswith("opkiln.functional.")]
    spied = [m for m in modules if getattr(m, "run", None) is real]
    for module in spied:
        module.run = spy  # type: ignore[attr-defined]
    call()
    for module in spied:
        module.run = real  # type: ignore[attr-defined]
    ((canonical, values, args, backend),) = given
    text = road.dumps((args, backend, road.policies.STATE.number, road.REGISTRY.generation), 2)
    site = road.SITES[canonical, text]
    (recent, *_) = site.recent
    launch = recent.launch

    def nothing(*args: Any) -> Any:
        return None

    def road_alone() -> Any:
        recent.launch = nothing
        try:
            return call()
        finally:
            recent.launch = launch

    def key() -> Any:
        numbers = (args, backend, road.policies.STATE.number, road.REGISTRY.generation)
        return road.SITES.get((canonical, road.dumps(numbers, 2)))

    found = {"road": road_alone, "road: key": key, "road: guards": lambda: recent.fits(values)}
    if not GPU:
        return found
    found["launch"] = lambda: launch(*values)
    inner = launch
    while "run" not in cells(inner):  # inside the checks of writing ops, or of several devices
        inner = cells(inner)["launch"].cell_contents
    own = cells(inner)
    if "allocate" in own:
        found["launch: outputs"] = own["allocate"].cell_contents
    run = own["run"].cell_contents
    seen: list[Any] = []
    own["run"].cell_contents = lambda *pointers: seen.append(pointers)
    inner(*values)
    own["run"].cell_contents = run
    (pointers,) = seen
    found["launch: kernel"] = lambda: run(*pointers)
    ready = cells(run).get("ready")
    if ready is not None and ready.cell_contents is not None:
        send, filled, *_ = ready.cell_contents
        packed = list(filled)
        for place, i in ready.cell_contents.pointers:
            packed[place] = pointers[i].data_ptr()
        packed[ready.cell_contents.stream_at] = torch.cuda.current_stream().cuda_stream
        found["launch: kernel: C and driver"] = lambda: send(*packed)
    return found


def measure(calls: dict[Any, Fn]) -> dict[Any, list[float]]:
    """Times of every call in us, all calls in turns of ROUND so that drift hits all alike."""
    times: dict[Any, list[int]] = {name: [] for name in calls}
    for _ in range(CALLS // ROUND):
        for name, call in calls.items():
            for _ in range(10):
                call()
            if GPU:
                torch.cuda.synchronize()
            kept = times[name]
            for _ in range(ROUND):
                start = perf_counter_ns()
                call()
                kept.append(perf_counter_ns() - start)
            if GPU:
                torch.cuda.synchronize()
    empty = statistics.median(times["nothing",])
    return {name: [max(ns - empty, 0) / 1e3 for ns in kept] for name, kept in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    inputs = tensors()
    calls: dict[Any, Fn] = {("nothing",): lambda: None}
    for op, call in ours(inputs).items():
        for _ in range(3):
            call()
        try:
            details = parts(call)
        except (
            KeyError,
            ValueError,
            AttributeError,
        ) as error:  # the whole is measured all the same
            print(f"{op}: no parts: {error!r}")
            details = {}
        if GPU:
            calls[op, "opkiln"] = call
        calls |= {(op, f"  {name}"): part for name, part in details.items()}
    if GPU:
        for name, call in peers(inputs).items():
            try:
                call()
                calls[name] = call
            except Exception as error:  # a peer that does not run here hides no other
                print(f"{name}: {type(error).__name__}: {error}"[:200])
    times = measure(calls)
    rows = []
    for (op, who), kept in ((k, v) for k, v in times.items() if len(k) == 2):
        ordered = sorted(kept)
        p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
        rows.append({"op": op, "who": who, "p50_us": round(p50, 3), "p99_us": round(p99, 3)})
    device = torch.cuda.get_device_name() if GPU else "no GPU, nothing launched"
    about = {
        "device": device, "python": platform.python_version(), "torch": torch.__version__,
        "calls": CALLS, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    (out / "host_cost.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
    print(about)
    whole = {(r["op"], r["who"]): r["p50_us"] for r in rows}
    for row in sorted(rows, key=lambda r: [*ours(inputs)].index(r["op"])):
        theirs = whole.get((row["op"], "torch"))
        verdict = ""
        if row["who"] == "opkiln" and theirs:
            ratio = row["p50_us"] / theirs
            verdict = f"  {ratio:.2f} of torch's, {'ok' if ratio <= ALLOWED else 'TOO SLOW'}"
        print(
            f"{row['op']:<29} {row['who']:<32} {row['p50_us']:7.2f} {row['p99_us']:8.2f}{verdict}"
        )


if __name__ == "__main__":
    main()
