"""Headless Chromium for the tests of index.html: what a page looks like after its scripts ran."""

from __future__ import annotations

import html
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium"
)
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)


def dump(page: Path, profile: Path, *options: str, address: str = "", script: str = "") -> str:
    """The page's DOM. address: its #state; script: run at its end, as a reader's hand would."""
    shown = page.with_name(f"{page.stem}-acted.html")
    shown.write_text(acted(page, script), encoding="utf-8")
    return dom(f"{shown.as_uri()}{address}", profile, *options)


def title_on_phone(page: Path, profile: Path, width: int, script: str) -> str:
    """What `script` leaves in document.title of the page as a phone shows it.

    In a frame: Chromium's window does not get narrower than 500 pixels.
    """
    told = f"{{{script}}}\nparent.document.title = document.title;"
    frame = page.with_name(f"{page.stem}-phone.html")
    frame.write_text(
        f'<meta charset="utf-8"><iframe width="{width}" height="800" style="border: 0" '
        f'srcdoc="{html.escape(acted(page, told))}"></iframe>',
        encoding="utf-8",
    )
    return dom(frame.as_uri(), profile).partition("<title>")[2].partition("</title>")[0]


def acted(page: Path, script: str) -> str:
    text = page.read_text(encoding="utf-8")
    return text.replace("</body>", f"<script>{script}</script></body>")


def dom(address: str, profile: Path, *options: str) -> str:
    """The document at an address after its scripts, as text."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [*(CHROMIUM, *QUIET, *options, f"--user-data-dir={profile}"), "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
