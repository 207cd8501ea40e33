"""On a GPU: capture a step, tune it, and see that another process serves it by what was found.

    python bench/probes/capture_tune.py --out $OUT

Ends with a table: each call's time as shipped and as tuned, both taken by the second process, and
whether it uses the tiling. About a minute; most of it is compiling the candidates.
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import time

import opkiln
import opkiln.functional as F
import torch

CHILD = "child"


def calls() -> None:
    """Sizes that the shipped tables do not name; a training step's forward and backward."""
    torch.manual_seed(0)
    half = {"device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(777, 3072, **half)
    F.rms_norm(hidden, (3072,), torch.randn(3072, **half))
    F.rms_norm(hidden[:3], (3072,), torch.randn(3072, **half))
    images = torch.randn(4, 96, 61, 61, device="cuda", dtype=torch.float16)
    F.max_pool2d(images, 3, 2, 1)
    F.mean_pooling(torch.randn(1, 3000, 16, 128, **half), 32)
    wide = torch.randn(512, 2560, **half, requires_grad=True)
    F.layer_norm(wide, (2560,)).sum().backward()


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    print(done.stdout, end="")
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def child(step: pathlib.Path) -> None:
    """The second process: does it find the tilings, and what do they take?"""
    import common
    from opkiln import tilings
    from opkiln.dispatch import plan
    from opkiln.policy import DEFAULT
    from opkiln_bench.contestants import bring
    from opkiln_bench.step import read_step

    flush = common.flush_buffer()
    for row in read_step(step):
        subject = bring(row, torch.device("cuda", 0))
        call = subject.call
        tiling = tilings.of(call)
        given = subject.spec, subject.tensors, subject.params, DEFAULT.only("opkiln"), row.train
        try:
            launches = [plan(*given).launch]
        except opkiln.BackendError as error:
            print(f"{row}: {error}")
            continue
        known = tilings.tuned
        tilings.tuned = lambda arch, where: {}  # as shipped
        launches.append(plan(*given).launch)
        tilings.tuned = known
        times = common.kernel_times_us(
            [functools.partial(launch, *subject.tensors) for launch in launches], flush
        )
        mine, shipped = (sorted(samples)[len(samples) // 2] for samples in times)
        used = json.dumps(dict(tiling)) if tiling else "-"
        print(f"{row!s:44} shipped {shipped:7.2f} us  mine {mine:7.2f} us  {used}")
    x = torch.empty(777, 3072, device="cuda", dtype=torch.bfloat16)
    print(opkiln.explain(F.rms_norm, x, (3072,), x[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--child", type=pathlib.Path)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    os.environ["XDG_CONFIG_HOME"] = str(options.out / "config")
    options.out.mkdir(parents=True, exist_ok=True)
    step = options.out / "step.json"
    with opkiln.capture(step):
        calls()
    print(f"captured {sum(len(f['rows']) for f in json.loads(step.read_text())['files'])} calls")
    began = time.perf_counter()
    tune = ("tune", "--from", str(step), "--runs-dir", str(options.out / "runs"))
    run("-m", "opkiln_bench", *tune)
    print(f"tuned in {time.perf_counter() - began:.0f} s")
    run(__file__, "--out", str(options.out), "--child", str(step))


if __name__ == "__main__":
    main()
