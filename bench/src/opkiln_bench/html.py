"""`index.html`: the judged rows as one page that needs nothing else, filtered and sorted in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from opkiln_bench.analysis import Result
from opkiln_bench.limits import Limits, peak_key
from opkiln_bench.pages import FAMILIES, family_of, label, regrets, sizes
from opkiln_bench.peers import unmeasured_figures
from opkiln_bench.records import row_key


def verdict(result: Result) -> str:
    """ahead, level or behind; bad where ours has no time; alone where nothing else has one."""
    if result.status != "ok":
        return "bad"
    return result.ratio.verdict if result.ratio else "alone"


def rounded(value: float | None) -> float | None:
    """Six digits: a third of the page's size is figures."""
    return None if value is None else float(f"{value:.6g}")


def row_data(result: Result) -> dict[str, Any]:
    """What the page shows of one row."""
    record, ratio = result.record, result.ratio
    ours = record["backends"].get("opkiln", {})
    cost = record["cost"]
    return {
        **{k: record[k] for k in ("op", "dtype", "model", "note", "date", "commit")},
        "family": family_of(result),
        "label": label(result),
        "status": result.status,
        "reason": result.reason,
        "verdict": verdict(result),
        "ratio": rounded(ratio.value) if ratio else None,
        "lo": rounded(ratio.low) if ratio else None,
        "hi": rounded(ratio.high) if ratio else None,
        "ours_us": rounded(result.ours_us),
        "alternatives": [[a.backend, rounded(a.time_us)] for a in result.alternatives],
        "unusable": [list(pair) for pair in result.unusable],
        "theirs": [[name, rounded(us)] for name, us in unmeasured_figures(*row_key(record))],
        "tflops": rounded(result.tflops),
        "sol": rounded(result.sol),
        "share_of_floor": rounded(result.share_of_floor),
        "bound": result.ceiling.bound if result.ceiling else None,
        "spread": rounded(result.spread),
        "host_us": ours.get("host_us"),
        "kernels": ours.get("kernels"),
        "throttled": result.throttled,
        "auto": result.regret.picked if result.regret else None,
        "regret": rounded(result.regret.value) if result.regret else None,
        "peak": peak_key(record["peak"], record["dtype"]),
        "flops": cost["flops"],
        "bytes": cost["bytes_read"] + cost["bytes_written"],
        "tensors": sizes(record).replace("`", ""),
        "run": result.run,
    }


def about(results: Sequence[Result]) -> str:
    """Where, when and how, in a line."""
    parts = {
        name: sorted({value(r.record) for r in results})
        for name, value in (
            ("gpu", lambda r: r["gpu"]),
            ("timer", lambda r: r["timer"]["title"]),
            ("date", lambda r: r["date"][:10]),
        )
    }
    told = [", ".join(values) for values in parts.values()]
    return " · ".join(filter(None, [*told, regrets(results)]))


def asset(name: str) -> str:
    return (files("opkiln_bench") / "templates" / name).read_text(encoding="utf-8")


def render(results: Sequence[Result], limits: Limits | None, rows_csv: str = "rows.csv") -> str:
    """The page. limits: whose roofs the plots show, None for a device without; rows_csv: a link."""
    data = {
        "meta": {
            "about": about(results),
            "rows_csv": rows_csv,
            "headings": FAMILIES,
            "bandwidth_gbps": limits.bandwidth_gbps if limits else None,
            "peaks_tflops": dict(limits.peaks_tflops) if limits else {},
        },
        "rows": [row_data(r) for r in results],
    }
    # "<" as an escape: no text of a record can end the script element that holds it
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    script = f"{asset('report.js')}\n{asset('plots.js')}draw();"
    page = asset("report.html").replace("/*CSS*/", asset("report.css"))
    return page.replace("/*JS*/", script).replace("/*DATA*/", text)


def write_html(
    folder: Path, results: Sequence[Result], limits: Limits | None, rows_csv: Path
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    link = Path(os.path.relpath(rows_csv, folder)).as_posix()
    path.write_text(render(results, limits, link), encoding="utf-8")
    return path
