"""Where and on what a run of the kit took place: everything needed to repeat it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from opkiln.registry import REGISTRY


def environment(device: torch.device) -> dict[str, Any]:
    """Date, commit, versions, GPU and plugins."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "opkiln": installed("opkiln"),
        "plugins": {p.name: p.version for p in REGISTRY.plugins},
    }


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """OPKILN_COMMIT, else the HEAD of the source tree ("-dirty" where changed), else None."""
    stated = os.environ.get("OPKILN_COMMIT")
    if stated:
        return stated
    head = git("rev-parse", "HEAD")
    return f"{head}-dirty" if head and git("status", "--porcelain") else head or None


def git(*arguments: str) -> str:
    """Output of a git command on the tree that this file lies in; empty where there is none."""
    folder = str(Path(__file__).resolve().parent)
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
