"""index.html: complete without a network, and sorted, filtered and themed in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.chromium import dump, needs_chromium
from opkiln_bench.analysis import results
from opkiln_bench.html import write_html
from opkiln_bench.limits import limits_of

Make = Callable[..., Any]


@pytest.fixture
def page(make_row: Make, make_run: Make, tmp_path: Path) -> Path:
    conv = {"op": "Conv2dFwd", "name": "conv2d", "family": "convolution", "peak": "tensor"}
    broken = make_row("broken", times_us={"opkiln": 10.0, "torch": 9.0})
    broken["backends"]["opkiln"] = {"status": "wrong", "reason": "</script><b>3 of 8 wrong"}
    rows = [
        make_row("middle", times_us={"opkiln": 10.0, "torch": 12.0}),
        make_row("best", dtype="f16", times_us={"opkiln": 4.0, "torch": 20.0}),
        make_row("worst", times_us={"opkiln": 20.0, "quack": 10.0, "liger": "no liger here"}),
        make_row("resnet", times_us={"opkiln": 30.0, "torch": 29.95}, **conv),
        broken,
    ]
    run = make_run("r", rows)
    limits = limits_of(run.header["config"]["device"])
    return write_html(tmp_path / "pages", results([run]), limits, tmp_path / "rows.csv")


@pytest.fixture
def browse(page: Path, tmp_path: Path) -> Callable[..., str]:
    return lambda *options, **what: dump(page, tmp_path / "profile", *options, **what)


def shown(dom: str) -> list[str]:
    return [key.split("/")[1] for key in re.findall(r'data-key="([^"]+/[^"]+)"', dom)]


def test_needs_nothing_else(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sorted(links) == ["data:,", "method.md", "rows.csv"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not a place


def test_holds_every_row_and_its_link(page: Path) -> None:
    text = re.search(r'<script id="data"[^>]*>(.*?)</script>', page.read_text(), re.S)
    assert text is not None
    data = json.loads(text[1])
    assert [r["label"] for r in data["rows"]] == ["middle", "best", "worst", "resnet", "broken"]
    assert [r["verdict"] for r in data["rows"]] == ["ahead", "ahead", "behind", "level", "bad"]
    assert data["rows"][4]["reason"] == "</script><b>3 of 8 wrong"
    assert data["meta"]["rows_csv"] == "../rows.csv"


@needs_chromium
def test_rows_plots_and_colours(browse: Callable[..., str]) -> None:
    dom = browse()
    assert shown(dom) == ["middle", "best", "worst", "resnet", "broken"]
    assert "5 of 5 rows; geometric mean of the ratios 1.3" in dom
    assert re.search(r'<td class="num ahead">▲ 1.2\d×</td>', dom)
    assert re.search(r'<td class="num behind">▼ 0.5\d×</td>', dom)
    assert '<td class="num bad">wrong</td>' in dom
    assert re.findall(r'data-family="([^"]+)"', dom) == ["normalization", "convolution"]
    assert dom.count("<svg") == 4


@needs_chromium
def test_sorting_by_a_click_on_a_heading(browse: Callable[..., str]) -> None:
    click = "document.querySelector('th[data-key=ratio] button').click();"
    rising = browse(script=click)
    assert shown(rising) == ["worst", "resnet", "middle", "best", "broken"]
    assert 'data-key="ratio" aria-sort="ascending"' in rising
    falling = browse(script=click * 2)
    assert shown(falling) == ["best", "middle", "resnet", "worst", "broken"]  # absent comes last
    assert shown(browse(address="#sort=label&dir=asc")) == [
        *("best", "broken", "middle", "resnet", "worst")
    ]


@needs_chromium
@pytest.mark.parametrize(
    ("address", "script", "labels"),
    [
        ("#q=resnet", "", ["resnet"]),
        ("#q=quack", "", ["worst"]),
        ("#verdict=ahead", "", ["middle", "best"]),
        ("#family=convolution", "", ["resnet"]),
        ("#dtype=f16&verdict=behind", "", []),
        ("", "document.querySelector('#verdict .behind').click();", ["worst"]),
        (
            "",
            "byId('q').value = 'rmsnorm best'; byId('q').dispatchEvent(new Event('input'));",
            ["best"],
        ),
    ],
    ids=["word", "backend", "verdict", "family", "none", "click", "typing"],
)
def test_filtering(
    browse: Callable[..., str], address: str, script: str, labels: list[str]
) -> None:
    dom = browse(address=address, script=script)
    assert shown(dom) == labels
    assert f"{len(labels)} of 5 rows" in dom


@needs_chromium
def test_a_row_opens(browse: Callable[..., str]) -> None:
    dom = browse(script="document.querySelector('tr[data-key*=worst]').click();")
    assert "no liger here" in dom and "ratio 0.5" in dom
    broken = browse(script="document.querySelector('tr[data-key*=broken]').click();")
    assert "ours wrong: &lt;/script&gt;&lt;b&gt;3 of 8 wrong" in broken


COLOURS = "document.title = getComputedStyle(document.body).backgroundColor;"
LIGHT, DARK = "<title>rgb(251, 250, 248)</title>", "<title>rgb(21, 23, 26)</title>"


@needs_chromium
def test_light_and_dark(browse: Callable[..., str]) -> None:
    toggle = "byId('theme').click();"
    assert LIGHT in browse(script=COLOURS)
    assert DARK in browse(script=toggle + COLOURS)
    assert DARK in browse(address="#theme=dark", script=COLOURS)
    assert LIGHT in browse(address="#theme=dark", script=toggle + COLOURS)


@needs_chromium
def test_a_phone_has_no_sideways_page(browse: Callable[..., str]) -> None:
    measure = (
        "document.title = document.documentElement.scrollWidth <= innerWidth ? 'fits' : 'wide';"
    )
    dom = browse("--window-size=500,900", script=measure)
    assert "<title>fits</title>" in dom
