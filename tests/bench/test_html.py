"""index.html: complete without a network, and sorted, filtered and themed in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.chromium import dump, needs_chromium, title_on_phone
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
    assert re.search(r'<td class="num ahead">▲ 1.2\d×<span class="under">torch 1[12]', dom)
    assert re.search(r'<td class="num behind">▼ 0.5\d×<span class="under">quack 1', dom)
    assert '<td class="num bad">wrong<' in dom
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
def test_a_row_with_nothing_beside_it_is_not_level(
    make_row: Make, make_run: Make, tmp_path: Path
) -> None:
    found = results([make_run("r", [make_row("lonely", times_us={"opkiln": 10.0})])])
    page = write_html(tmp_path, found, None, tmp_path / "rows.csv")
    dom = dump(page, tmp_path / "profile")
    assert '<td class="num alone">–</td>' in dom
    assert "– no other 1</button>" in dom and "level 1" not in dom
    assert shown(dump(page, tmp_path / "profile", address="#verdict=alone")) == ["lonely"]


@needs_chromium
def test_a_row_shows_figures_of_peers_that_are_not_measured(
    make_row: Make, make_run: Make, tmp_path: Path
) -> None:
    row = make_row(op="FusedAddRMSNormFwd", name="fused_add_rms_norm")
    page = write_html(tmp_path, results([make_run("r", [row])]), None, tmp_path / "rows.csv")
    dom = dump(page, tmp_path / "p", script="document.querySelector('tr.row').click();")
    unmeasured = r"<td>vllm</td><td>19.1 µs on the other system's page, unmeasured here</td>"
    assert re.search(unmeasured, dom)


@pytest.fixture
def on_phone(make_row: Make, make_run: Make, tmp_path: Path) -> Callable[[int, str], str]:
    """The longest names of the catalogue, on a screen so wide."""
    conv = {"family": "convolution", "peak": "tensor", "dtype": "f16"}
    cost = {"flops": 2_000_000_000, "bytes_read": 4_000_000, "bytes_written": 4_000_000}
    slow = {"opkiln": 2000.0, "torch-native-batch-norm": 2300.0}
    rows = [
        make_row("non-neox-2d-b2-s2k-h32-d128", op="RopeNeoxPositionIdsFwd", times_us=slow),
        make_row("a", op="AdaptiveMaxPool2dIndicesFwd"),
        make_row("b", op="AdaLayerNormFwd", dtype="f16"),
        make_row("resnet", op="Conv2dFwd", cost=cost, **conv),
    ]
    run = make_run("r", rows)
    limits = limits_of(run.header["config"]["device"])
    page = write_html(tmp_path / "pages", results([run]), limits, tmp_path / "rows.csv")
    return lambda width, script: title_on_phone(page, tmp_path / "profile", width, script)


PHONES = pytest.mark.parametrize("width", [360, 400])


@needs_chromium
@PHONES
def test_a_phone_shows_a_row_without_sideways_scroll(
    on_phone: Callable[[int, str], str], width: int
) -> None:
    measure = """
    const scroll = document.querySelector('.scroll');
    const under = [...document.querySelectorAll('td.ahead .under')];
    document.title = [
      innerWidth,
      document.documentElement.scrollWidth <= innerWidth,
      scroll.scrollWidth <= scroll.clientWidth,
      under.map((e) => e.textContent.replace(/[\\d.]+$/, 'N')).sort().join(),
      under.every((e) => e.getBoundingClientRect().right <= innerWidth && e.offsetHeight > 0),
    ].join(' ')"""
    others = "torch-compile N,torch-compile N,torch-compile N,torch-native-batch-norm N"
    assert on_phone(width, measure) == f"{width} true true {others} true"


@needs_chromium
@PHONES
def test_names_on_a_phone_break_between_words(
    on_phone: Callable[[int, str], str], width: int
) -> None:
    # a word of an op's name lies on one line: its range is one rectangle
    measure = """
    const cells = [...document.querySelectorAll('tr.row td:first-child')];
    const words = cells.flatMap((td) => [...td.childNodes]);
    const lines = (node) => {
      const range = document.createRange();
      range.selectNode(node);
      return range.getClientRects().length;
    };
    const texts = words.filter((w) => w.nodeType === 3);
    document.title = texts.filter((w) => lines(w) > 1).length + ' of ' + texts.length"""
    assert on_phone(width, measure) == "0 of 16"


@needs_chromium
@PHONES
def test_plots_on_a_phone_can_be_read(on_phone: Callable[[int, str], str], width: int) -> None:
    measure = """
    const svgs = [...document.querySelectorAll('svg')];
    const size = (svg) => 12 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const names = [...document.querySelectorAll('.roof-name')].map((e) => e.textContent);
    const ticks = (svg) => svg.querySelectorAll('.grid[y2="254"]').length;
    document.title = [
      svgs.length,
      svgs.every((svg) => size(svg) >= 11),
      svgs.filter((_, i) => i % 2 === 0).every((svg) => ticks(svg) >= 2),
      names.join(),
    ].join(' ')"""
    assert on_phone(width, measure) == "4 true true 4.67 TB/s,tensor f16 790,4.67 TB/s"
