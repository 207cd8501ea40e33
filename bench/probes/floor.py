"""Is the L2 cold, and what is the floor? One call on the GPU, about a minute.

    python bench/probes/floor.py --out DIR      flushes, `calibrate` with its time, rows
    python bench/probes/floor.py --judge FILE   on any machine: published rows against that profile

A load with `evict_last` (Inductor's pools and two-pass norms have some) may leave its line in L2
through a flush that only zeroes. All backends of a row share the inputs, so the next one would then
read from L2. `twin` is the truth: the same call on a tensor that no `evict_last` load has touched.
"""

import argparse
import csv
import json
import pathlib
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from common import MARKER, ROOT, MeasureError, attribute, flush_buffer, mark, recorded

SIZES_MB = (1, 4, 12, 40)
SAMPLES = 15
ROWS = (
    ("MaxPool2dFwd", "vgg-block", "f16"),
    ("AvgPool1dFwd", "audio-downsample", "f16"),
    ("AvgPool3dFwd", "video-2x2x2", "f16"),
    ("LayerNormFwd", "dit-xl-2", "bf16"),
    ("AdaLayerNormFwd", "llama-8b-prefill", "bf16"),
    ("InstanceNormFwd", "image-affine", "f16"),
)
Thunk = Callable[[], Any]


def medians_us(cases: dict[str, tuple[Thunk, Thunk, Thunk]]) -> dict[str, float]:
    """name -> (before, flush, timed): the median of the third; before and flush are not counted."""
    activities: list[Any] = []
    with recorded(activities):
        for before, flush, timed in cases.values():
            for _ in range(SAMPLES):
                before()
                flush()
                mark()
                timed()
                mark()
    found: dict[str, list[float]] = {name: [] for name in cases}
    names = [name for name in cases for _ in range(SAMPLES)]
    for name, span in zip(names, attribute(activities, MARKER, len(names)), strict=True):
        found[name].append(float("nan") if isinstance(span, MeasureError) else span.busy_ns / 1e3)
    return {name: round(statistics.median(times[2:]), 3) for name, times in found.items()}


@triton.jit
def read_some(x_ptr, y_ptr, read_words, write_words, BLOCK: tl.constexpr, EVICT: tl.constexpr):
    """Reads x in blocks, and writes the first write_words of y."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < read_words, other=0, eviction_policy=EVICT)
    tl.store(y_ptr + offs, x + 1, mask=offs < write_words)


@triton.jit
def demote(x_ptr, words, BLOCK: tl.constexpr):
    """The L2's priority of x's lines back to normal; an address stands for its 128 bytes."""
    offs = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * 32 % words
    ASM: tl.constexpr = "applypriority.global.L2::evict_normal [$1], 128; mov.b32 $0, 0;"
    addresses = (x_ptr + offs).to(tl.int64)
    tl.inline_asm_elementwise(ASM, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)


def reader(x: torch.Tensor, y: torch.Tensor, writes: int, evict: str) -> Thunk:
    block = 4096
    grid = (-(-x.numel() // block),)
    return lambda: read_some[grid](x, y, x.numel(), writes, BLOCK=block, EVICT=evict, num_warps=8)


def priority_of(x: torch.Tensor) -> Thunk:
    return partial(demote[(-(-x.numel() // 32 // 256),)], x, x.numel(), BLOCK=256)


def reset_persisting() -> None:
    """The driver's own way to make persisting lines normal; it acts at once, so wait first."""
    import ctypes

    torch.cuda.synchronize()
    status = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
    if status:
        raise RuntimeError(f"cuCtxResetPersistingL2Cache: {status}")


def flushes() -> dict[str, Thunk]:
    """zero: twice the L2, as the bench flushes. Each other one ends with it."""
    buffer = flush_buffer()
    large = torch.empty(4 * buffer.numel(), dtype=torch.int32, device="cuda")
    keep = reader(buffer, buffer, 0, "evict_last")
    let_go = reader(buffer, buffer, 0, "evict_first")

    def after(*steps: Thunk) -> Thunk:
        return lambda: [step() for step in (*steps, buffer.zero_)]

    return {
        "zero": buffer.zero_,
        "zero8x": after(large.zero_),
        "keep": after(keep),
        "keep-letgo": after(keep, let_go),
        "keep-priority": after(keep, priority_of(buffer)),
        "letgo": after(let_go),
        "reset": after(reset_persisting),
    }


def flush_table(made: dict[str, Thunk]) -> dict[str, Any]:
    """For each size: the same reader after plain reads, after `evict_last` reads, and its twin."""
    found: dict[str, Any] = {}
    for mb in SIZES_MB:
        words = mb << 18
        x, twin, y = (torch.empty(words, dtype=torch.int32, device="cuda").random_() for _ in "xty")
        plain, of_twin = (reader(t, y, words // 4, "") for t in (x, twin))
        keep = reader(x, y, words // 4, "evict_last")
        priority = priority_of(x)
        cases = {"plain": (plain, made["zero"], plain), "twin": (keep, made["zero"], of_twin)}
        cases |= {name: (keep, flush, plain) for name, flush in made.items()}
        cases["priority of x"] = (keep, lambda p=priority: (p(), made["zero"]()), plain)
        times: dict[str, Any] = {}
        for name, case in cases.items():
            try:
                times |= medians_us({name: case})
            except Exception as error:  # one flush that fails costs no other
                times[name] = f"{type(error).__name__}: {error}"[:80]
        found[f"{mb} MB"] = times
        print(f"read {mb} MB, write {mb / 4:g} MB:", json.dumps(times), flush=True)
    return found


def row_table(made: dict[str, Thunk]) -> dict[str, Any]:
    """Ours and torch-compile, each after itself and after the other, by two flushes."""
    from opkiln_bench.catalogue import load_rows
    from opkiln_bench.contestants import bring, enter

    rows = {row.key: row for row in load_rows()}
    found: dict[str, Any] = {}
    for key in ROWS:
        try:
            torch._dynamo.reset()
            subject = bring(rows[key], torch.device("cuda", 0))
            ours = partial(enter(subject, "opkiln")[0].launch, *subject.tensors)
            # no other's lines are about yet
            alone = medians_us({"ours alone": (ours, made["zero"], ours)})
            other = partial(enter(subject, "torch-compile")[0].launch, *subject.tensors)
            cases = {}
            for flush in ("zero", "keep-letgo", "keep-priority", "reset"):
                cases |= {
                    f"ours/ours {flush}": (ours, made[flush], ours),
                    f"other/ours {flush}": (other, made[flush], ours),
                    f"other/other {flush}": (other, made[flush], other),
                }
            found["/".join(key)] = alone | medians_us(cases)
        except Exception:  # one row that fails costs no other
            found["/".join(key)] = traceback.format_exc()[-300:]
        print("/".join(key), json.dumps(found["/".join(key)]), flush=True)
    return found


def judge(path: pathlib.Path) -> None:
    """Published rows whose share of this profile's floor is above 105 %, the largest first."""
    import yaml
    from opkiln.spec import Call
    from opkiln_bench.catalogue import TORCH_NAMES, load_rows
    from opkiln_bench.contestants import canonical
    from opkiln_bench.limits import ceiling, limits_of

    limits = limits_of(yaml.safe_load(path.read_text()))
    assert limits is not None
    rows, shares = {row.key: row for row in load_rows()}, []
    for line in csv.DictReader((ROOT / "results/h200/rows.csv").open()):
        row = rows.get((line["op"], line["label"], line["dtype"]))
        if row is None or not line["ours_ms"]:
            continue
        tensors = {
            n: torch.empty(t.shape, dtype=getattr(torch, TORCH_NAMES[t.dtype]), device="meta")
            for n, t in row.tensors.items()
        }
        spec, bound, params = canonical(row.function, {**tensors, **row.args})
        cost = spec.cost(Call.of(spec, bound, params, real=False))
        named = {n: getattr(cost, n) for n in ("flops", "bytes_read", "bytes_written")}
        floor_us = ceiling(limits, named, row.peak, row.dtype).floor_us
        ours_us = float(line["ours_ms"]) * 1e3
        shares.append((floor_us / ours_us, str(row), ours_us, floor_us, cost))
    above = sorted((s for s in shares if s[0] > 1.05), reverse=True)
    for share, name, ours_us, floor_us, cost in above:
        kib = f"{cost.bytes_read >> 10} + {cost.bytes_written >> 10} KiB"
        print(f"{share:5.2f}  {name:45} ours {ours_us:8.2f}  floor {floor_us:8.2f}  {kib}")
    print(f"{len(above)} of {len(shares)} rows above 105 %")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--judge", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.judge:
        judge(arguments.judge)
        return
    from opkiln_bench.calibrate import calibrate, write_profile

    made = flushes()
    found = {"flushes": flush_table(made)}
    (arguments.out / "floor.json").write_text(json.dumps(found))
    start = time.monotonic()
    profile = calibrate(torch.device("cuda", 0), samples=40)
    print(
        f"calibrate: {time.monotonic() - start:.1f} s, {profile['bandwidth_gbps']} GB/s", flush=True
    )
    write_profile(profile, arguments.out / "h200.yaml")
    found["rows"] = row_table(made)
    (arguments.out / "floor.json").write_text(json.dumps(found))
    judge(arguments.out / "h200.yaml")


if __name__ == "__main__":
    main()
