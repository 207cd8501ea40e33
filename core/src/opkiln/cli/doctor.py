"""What `opkiln doctor` looks at: versions, devices, plugins, environment."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict
from typing import Any

import torch

from opkiln import policy
from opkiln.errors import nearest
from opkiln.ops import CATALOGUE
from opkiln.registry import REGISTRY


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[str]:
    """The GPUs that torch sees, with compute capability."""
    found = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        found.append(f"cuda:{i} {torch.cuda.get_device_name(i)}, compute {major}.{minor}")
    return found


def wrong_preferences() -> list[str]:
    """What in OPKILN_BACKEND cannot be read, and what it names that nobody has."""
    problems = [f"OPKILN_BACKEND: {problem}" for problem in policy.UNREADABLE]
    for op, names in policy.BASE.prefer:
        if op != policy.ANY_OP and op not in CATALOGUE:
            problems.append(f"OPKILN_BACKEND names the op {op!r}{nearest(op, CATALOGUE)}")
        for name in names:
            if name not in REGISTRY.backends():
                hint = nearest(name, REGISTRY.backends())
                problems.append(f"OPKILN_BACKEND names the backend {name!r}{hint}")
    return problems


def examine() -> dict[str, Any]:
    """All findings as JSON-ready values; `problems` has one line each."""
    REGISTRY.load()
    plugins = [{**asdict(p), "ok": p.ok} for p in REGISTRY.plugins]
    problems = [f"plugin {p.name} {p.version} failed: {p.error}" for p in REGISTRY.failures()]
    return {
        "versions": {
            "opkiln": version_of("opkiln"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": version_of("triton"),
        },
        "devices": devices(),
        "plugins": plugins,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("OPKILN_")},
        "problems": problems + wrong_preferences(),
    }
