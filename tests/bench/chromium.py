"""Headless Chromium for the tests of index.html: what a page looks like after its scripts ran."""

from __future__ import annotations

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
    assert CHROMIUM is not None
    acted = page.with_name(f"{page.stem}-acted.html")
    text = page.read_text(encoding="utf-8")
    acted.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    done = subprocess.run(
        [
            *(CHROMIUM, *QUIET, *options, f"--user-data-dir={profile}"),
            "--dump-dom",
            f"{acted.as_uri()}{address}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
