"""Run every kernel once under compute-sanitizer: memcheck, racecheck, synccheck.

    python3 bench/probes/sanitize.py --out DIR [--family NAME] [--tool NAME]

One process for each family and tool, all at once; the families are installed. Each first runs the
family's cases (sanitize_cases.py), then kernels with a planted error, which the tool must find: a
run that checks nothing is a failure, not a clean one. Prints a table and writes DIR/sanitize.json
beside the logs; exits 1 unless all is clean.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import sanitize_cases  # noqa: E402

LIMIT_S = 130
PORTS = 49152  # compute-sanitizer's; every run needs some of its own
# What the tool must find, so that one knows it looks at our kernels: CUDA C++ and Triton.
PLANTED = {
    "memcheck": {"planted_memory", "planted_memory_triton"},
    "racecheck": {"planted_race"},
    "synccheck": {"planted_sync"},
}
# Reports that name no kernel; an error of our own kernels always does.
NAMELESS = re.compile(
    r"Target application|Internal|not supported|Process didn't|Program hit|timed out"
)


def command(tool: str, family: str, status: pathlib.Path, port: int) -> list[str]:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    return [
        found, "--tool", tool, "--error-exitcode", "9", "--port", str(port),
        # torch's kernels have C++ names; ours are extern "C" or Triton's, which begin with a letter
        "--kernel-name-exclude", "regex=^_Z",
        "--destroy-on-device-error", "kernel", "--target-processes", "application-only",
        "--show-backtrace", "no", "--print-limit", "0", "--launch-timeout", "60",
        *(["--padding", "512", "--report-api-errors", "no"] if tool == "memcheck" else []),
        sys.executable, str(HERE / "sanitize_cases.py"), family, str(status),
        *sorted(PLANTED[tool]),
    ]  # fmt: skip


def sanitized(family: str, tool: str, out: pathlib.Path, port: int) -> dict[str, Any]:
    """What one process found."""
    log, status = out / f"{family}-{tool}.log", out / f"{family}-{tool}.status.json"
    status.unlink(missing_ok=True)
    # Without torch's allocator every tensor is an allocation, with bounds of its own.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "SANITIZER": tool}
    start = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command(tool, family, status, port),
            stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"stopped after {LIMIT_S} s"
    seconds = time.monotonic() - start
    told = json.loads(status.read_text()) if status.exists() else {"cases": {}, "kernels": []}
    return {"family": family, "tool": tool, "seconds": round(seconds, 1), "exit": code} | verdict(
        log.read_text(errors="replace"), tool, told
    )


def verdict(log: str, tool: str, told: dict[str, Any]) -> dict[str, Any]:
    """Errors by kernel, what was planted and not found, cases that did not run."""
    reports = [line for line in log.splitlines() if line.startswith("=========")]
    names = collections.Counter(
        name for line in reports for name in re.findall(r"\bat (?:void )?([A-Za-z_]\w*)", line)
    )
    planted = {n for n in names if n.startswith("planted_")}
    errors = {n: c for n, c in names.items() if n not in planted and n not in ("kernel",)}
    return {
        "errors": errors,
        "not_found": sorted(PLANTED[tool] - planted),
        "nameless": sorted({line for line in reports if NAMELESS.search(line)})[:5],
        "failed_cases": {k: v for k, v in told["cases"].items() if v != "ok"},
        "finished": bool(told.get("finished")),
        "cases": len(told["cases"]),
        "kernels": told["kernels"],
        "summary": [line for line in reports if "SUMMARY" in line],
    }


def is_clean(r: dict[str, Any]) -> bool:
    """The tool ran over everything, found what was planted, and nothing else."""
    bad = r["errors"] or r["not_found"] or r["nameless"] or r["failed_cases"]
    return r["finished"] and r["cases"] > 0 and not bad


def words(r: dict[str, Any]) -> str:
    if is_clean(r):
        return f"clean {r['cases']:3d} {r['seconds']:5.0f} s"
    if r["errors"]:
        return f"{sum(r['errors'].values())} ERRORS {r['seconds']:5.0f} s"
    return f"FAILED {r['cases']:3d} {r['seconds']:5.0f} s"


def show(results: list[dict[str, Any]], tools: list[str], families: list[str]) -> None:
    print(f"{'':14s}" + "".join(f"{tool:>20s}" for tool in tools))
    for family in families:
        mine = {r["tool"]: r for r in results if r["family"] == family}
        print(f"{family:14s}" + "".join(f"{words(mine[tool]):>20s}" for tool in tools))
    for family in families:
        ran = {k for r in results if r["family"] == family for k in r["kernels"]}
        missed = sorted(sanitize_cases.kernels_of(family) - ran)
        print(
            f"{family}: {len(ran)} kernels ran" + (f", NOT RUN: {', '.join(missed)}" * bool(missed))
        )
    for r in [r for r in results if not is_clean(r)]:
        print(f"{r['family']} {r['tool']}: exit {r['exit']}, finished {r['finished']}")
        for key in ("errors", "not_found", "nameless", "failed_cases"):
            if r[key]:
                print(f"    {key}: {str(r[key])[:400]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--family", choices=sorted(sanitize_cases.FAMILIES))
    parser.add_argument("--tool", choices=sorted(PLANTED))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    families = [options.family] if options.family else list(sanitize_cases.FAMILIES)
    tools = [options.tool] if options.tool else list(PLANTED)
    runs = [(family, tool) for family in families for tool in tools]
    with ThreadPoolExecutor(len(runs)) as pool:
        jobs = [
            pool.submit(sanitized, family, tool, options.out, PORTS + 32 * i)
            for i, (family, tool) in enumerate(runs)
        ]
        results = [job.result() for job in jobs]
    (options.out / "sanitize.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    show(results, tools, families)
    return 0 if all(map(is_clean, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
