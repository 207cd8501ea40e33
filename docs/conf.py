"""Sphinx configuration: `python -m sphinx -W docs OUT` builds the site.

The pages of the ops and of the results are written from the specs, the installed backends and
results/h200/rows.csv before each build (site_pages.py).
"""

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

project = "opkiln"
author = "opkiln developers"
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
# Links from the guides into the source tree, which the site does not hold: tests/test_docs.py
# checks that they exist.
suppress_warnings = ["myst.xref_missing"]


def write_pages(app: Any) -> None:
    import site_pages

    site_pages.write(DOCS / "generated")


def setup(app: Any) -> None:
    app.connect("builder-inited", write_pages)
