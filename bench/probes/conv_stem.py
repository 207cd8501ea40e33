"""Time csrc/stem.cu (few input channels) against the shipped tiling of each row.

    python bench/probes/conv_stem.py --out DIR [--only SUBSTRING] [--budget SECONDS]
    python bench/probes/conv_stem.py --write-tuning DIR/conv_stem.json

Every candidate's output is compared with torch's in float32, as conv.py does; one that is
wrong is not timed, and what is wrong about it is printed. Variants that leave out a part (the
stores, all but one step of products, the weights) tell where the time of a first candidate goes.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import time
from typing import Any

import common
import torch
from conv import TOLERANCE, TUNING, Row, fault, read_rows
from opkiln.device import cuda
from opkiln.ops import CATALOGUE
from opkiln_conv import stem
from opkiln_conv.sources import source
from opkiln_conv.stem import StemTiling

CANDIDATES = {  # tile_h, tile_w, warps, wm, mt, resident
    "r3d-stem-k3-s1": [
        (14, 112, 8, 1, 4, 1), (14, 112, 12, 2, 2, 1), (7, 112, 8, 2, 2, 2), (7, 112, 4, 1, 4, 2),
    ],
    "3d-resnext-grouped-k3": [
        (28, 32, 7, 1, 1, 2), (28, 32, 8, 1, 1, 2), (14, 32, 4, 1, 1, 4), (14, 32, 7, 1, 1, 4),
        (28, 32, 14, 1, 1, 1),
    ],
    "resnext-grouped-3x3": [(7, 32, 4, 1, 1, 1), (4, 32, 4, 1, 1, 2), (14, 32, 4, 1, 1, 1)],
    "stem-3x3-s2": [
        (2, 56, 4, 1, 1, 2), (1, 56, 2, 1, 1, 4), (1, 56, 2, 1, 2, 2), (1, 56, 2, 2, 2, 1),
    ],
    "encodec-init": [(1, 192, 6, 1, 2, 1), (1, 256, 4, 1, 2, 1)],
    "wav2vec2-layer1": [(1, 128, 4, 1, 4, 1), (1, 128, 4, 4, 4, 1)],
}  # fmt: skip
NO_STORES = (("store_vector(to + m", "if (y[0] == 0x12345678) store_vector(to + m"),)
ONE_STEP = (("s < STEPS; ++s) {\n            Unit b", "s < 1; ++s) {\n            Unit b"),)
NO_WEIGHTS = (("    fetch_weights(weights, w, at);\n", ""),)
LEFT_OUT = {
    "no stores": NO_STORES,
    "one step": ONE_STEP,
    "neither": NO_STORES + ONE_STEP,
    "nor weights": NO_STORES + ONE_STEP + NO_WEIGHTS,
}
Edits = tuple[tuple[str, str], ...]


def plan_of(row: Row, t: StemTiling, call: Any = None) -> stem.StemPlan:
    call = call or row.call(row.tensors("meta"), real=False)
    return stem.plan_of(call, row.geometry(), t, "probe")


def changed(edits: Edits) -> str:
    text = source("stem")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def warm(task: tuple[Row, StemTiling, Edits]) -> dict[str, Any]:
    row, t, edits = task
    try:
        cuda.compile_cubin(changed(edits), "sm_90a", plan_of(row, t).macros)
    except Exception as error:  # whatever the compiler raises
        return {"compile_error": f"{type(error).__name__}: {error}"[-300:]}
    return {}


def launcher(row: Row, t: StemTiling, tensors: list[Any], edits: Edits) -> Any:
    plan, kept = plan_of(row, t, row.call(tensors)), stem.source
    vars(stem)["source"] = lambda name: changed(edits)
    launch = stem.prepare(row.call(tensors), plan)
    vars(stem)["source"] = kept
    return lambda: launch(*tensors)


def where(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """The fault, and the places of the first wrong elements."""
    found = fault(got, want, tolerance)
    if found:
        scale = want.square().mean().sqrt()
        bad = ~((got.float() - want).abs() <= tolerance * want.abs().clamp(min=scale))
        places = bad.nonzero()[:: max(int(bad.sum()) // 4, 1)][:4].tolist()
        pairs = [f"{p} {got[tuple(p)].item():.3f}/{want[tuple(p)].item():.3f}" for p in places]
        found += f" got/want at {'; '.join(pairs)}"
    return found


def measure(row: Row, flush: torch.Tensor) -> dict[str, Any]:
    from opkiln_conv.launch import prepare

    torch.manual_seed(0)
    tensors = row.tensors("cuda")
    spec, params = CATALOGUE[row.op], row.params
    wide = [None if v is None else v.float() for v in tensors]
    want = spec.reference(*wide, **params).float()
    tilings = [StemTiling(*fields) for fields in CANDIDATES[row.label.removesuffix("-bias")]]
    runs = {str(t): lambda t=t: launcher(row, t, tensors, ()) for t in tilings}
    shipped, formula = prepare(row.call(tensors)), spec.native or spec.reference
    others = {"shipped": lambda: shipped(*tensors), "torch": lambda: formula(*tensors, **params)}
    if not row.bias:
        others |= {k: launcher(row, tilings[0], tensors, e) for k, e in LEFT_OUT.items()}
    check = lambda got: where(got, want, TOLERANCE[row.dtype])  # noqa: E731
    found = common.measure(runs, others, check, flush)
    for record, t in zip(found["candidates"], tilings, strict=True):
        record["use"] = dataclasses.asdict(t)
        record["name"] = "stem " + " ".join(map(str, dataclasses.astuple(t)))
    return found


def write_tuning(results: pathlib.Path) -> None:
    """Rows where a candidate beats what was shipped by a twentieth, with a bias and without
    together, take the fastest.
    """
    data = json.loads(results.read_text("utf-8"))
    table = json.loads(TUNING.read_text("utf-8"))
    entries = {e["label"]: e for e in table["rows"]}
    default = dataclasses.asdict(StemTiling(0, 0))
    for row in data["results"]:
        rows = [r for r in data["results"] if r["label"].removesuffix("-bias") == row["label"]]
        times: dict[str, list[float]] = {}
        for c in itertools.chain.from_iterable(r["candidates"] for r in rows):
            if "us" in c:
                times.setdefault(json.dumps(c["use"]), []).append(c["us"])
        whole = {use: us for use, us in times.items() if len(us) == len(rows)}
        best = min(whole, key=lambda use: sum(whole[use]), default="")
        shipped = sum(r["baselines"]["shipped"] for r in rows)
        if row["bias"] or not best or sum(whole[best]) > 0.95 * shipped:
            continue
        entry, figure = entries[row["label"]], {k: data[k] for k in ("gpu", "date", "commit")}
        entry["stem"] = {k: v for k, v in json.loads(best).items() if v != default[k]}
        entry["stem_measured"] = figure | {"us": {row["dtype"]: round(whole[best][0], 3)}}
        print(f"{row['label']}: {whole[best]}, before {row['baselines']['shipped']:.2f}")
    common.write_json(TUNING, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="", help="rows whose 'op label dtype' contains this")
    parser.add_argument("--budget", type=float, default=45, help="seconds, compiling included")
    parser.add_argument("--write-tuning", type=pathlib.Path, metavar="RESULTS")
    options = parser.parse_args()
    if options.write_tuning:
        return write_tuning(options.write_tuning)
    torch.backends.cudnn.benchmark = True
    start = time.time()
    rows = [r for r in read_rows(options.only) if r.label in CANDIDATES]
    most = max(rows, key=lambda r: len(CANDIDATES[r.label]))
    rows.append(dataclasses.replace(most, label=f"{most.label}-bias", bias=True))
    order = list(CANDIDATES)
    rows.sort(key=lambda r: order.index(r.label.removesuffix("-bias")))
    tasks: list[Any] = []
    for r in rows:
        mine = [StemTiling(*f) for f in CANDIDATES[r.label.removesuffix("-bias")]]
        tasks += [(r, t, ()) for t in mine]
        tasks += [] if r.bias else [(r, mine[0], e) for e in LEFT_OUT.values()]
    errors = {k: v for k, v in common.warm_all(warm, tasks).items() if v}
    print(f"{len(tasks)} compiled in {time.time() - start:.0f} s, errors: {errors}", flush=True)
    flush = common.flush_buffer()
    results = common.Results(options.out / "conv_stem.json")
    for row in rows:
        if time.time() - start > options.budget:
            print(f"out of time before {row.label}")
            break
        results.add(dataclasses.asdict(row) | {"op": row.op}, measure(row, flush))
        for c in sorted(results.rows[-1]["candidates"], key=lambda c: c.get("us", 1e9)):
            print(f"    {c.get('us', 0):7.2f} {c['name']} {c['status']}", flush=True)
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
